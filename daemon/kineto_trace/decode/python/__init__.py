"""Decodes samples of Python stacks and records of exact Python calls."""
