"""Prints what commands have to say: results on stdout, progress and messages on stderr."""
