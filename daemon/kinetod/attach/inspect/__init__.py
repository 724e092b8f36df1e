"""Looks at a target process and its files and changes nothing."""
