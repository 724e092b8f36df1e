"""Runs a program, sends a webhook or pushes profiles when a capture has ended."""
