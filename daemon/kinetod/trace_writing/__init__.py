"""Writes traces into users' folders with their rights alone, as a child of the daemon or of the kinetod-writer
service.
"""
