"""Reads from the kernel a process's identity, owner, limits, container, job and resource use."""
