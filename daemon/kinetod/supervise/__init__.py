"""Starts child processes and blocking calls, and gives every wait for them a deadline."""
