"""Reads a target process and its files; changes nothing."""
