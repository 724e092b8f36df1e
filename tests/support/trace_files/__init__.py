"""Traces for tests: recorded, made by hand, made at random, and read by other programs."""
