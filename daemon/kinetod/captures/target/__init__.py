"""Traces one target of a capture, from the request to its agent until its verdict."""
