"""Starts child processes and blocking calls and makes sure that nobody waits for them without a deadline."""
