"""Doors for the clients and processes of other profilers."""
