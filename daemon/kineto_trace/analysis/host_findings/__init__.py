"""Finds what the host loses time on: the program's functions, loading, the optimizer, threads that share processors."""
