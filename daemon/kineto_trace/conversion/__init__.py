"""Converts a target's raw folder into its stored trace, its files and its summary, in the daemon's decode worker."""
