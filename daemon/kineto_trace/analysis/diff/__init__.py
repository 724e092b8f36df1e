"""Compares two traces with each other."""
