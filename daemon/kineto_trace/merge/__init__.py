"""Merges the traces of several ranks into one file on one clock."""
