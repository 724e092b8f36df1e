"""Starts child processes and blocking calls and makes sure that every wait for them has a deadline."""
