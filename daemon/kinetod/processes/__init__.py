"""Reads from the kernel who a process is, whose it is, its limits, container and job, and what it uses."""
