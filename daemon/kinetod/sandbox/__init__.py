"""Confines the daemon's own worker processes before they handle hostile data."""
