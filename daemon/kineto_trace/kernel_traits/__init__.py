"""Tells what kind of work a kernel does from its name and launch shape."""
