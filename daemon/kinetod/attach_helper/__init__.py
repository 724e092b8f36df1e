"""Runs attaches and inspections in separate processes, as children of the daemon or in the kinetod-attach service."""
