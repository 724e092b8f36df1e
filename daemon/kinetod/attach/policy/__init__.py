"""Decides whether a process may be attached to and whether it can be."""
