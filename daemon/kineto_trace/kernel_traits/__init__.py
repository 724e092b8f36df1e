"""Determines the kind of work of a kernel from its name and launch shape."""
