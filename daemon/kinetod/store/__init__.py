"""Keeps captures on disk: the index, their folders and the retention policy."""
