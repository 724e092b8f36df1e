"""Dynolog's clients: what they send, and a client in Python."""
