"""Finds other GPU profilers on this host and says what they interfere with."""
