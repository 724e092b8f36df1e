"""Writes traces into users' folders with only their rights, as a child of the daemon or the kinetod-writer service."""
