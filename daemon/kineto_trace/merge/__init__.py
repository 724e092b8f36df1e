"""Traces of several ranks put together into one file, on one clock."""
