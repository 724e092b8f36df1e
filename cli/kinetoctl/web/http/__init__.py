"""Serves HTTP on loopback to one user: limits, sessions, and the checks and headers of every request."""
