"""Counts the training iterations of the program."""
