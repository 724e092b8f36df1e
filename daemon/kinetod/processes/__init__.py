"""Reads from the kernel who a process is, whose it is, and which limits, container and job it belongs to."""
