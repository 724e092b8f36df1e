"""Runs captures from the request to the stored result."""
