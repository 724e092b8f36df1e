"""Reads and writes Chrome trace JSON as Kineto defines it."""
