"""Computes views and queries for pages in worker processes with limits, and remembers the results."""
