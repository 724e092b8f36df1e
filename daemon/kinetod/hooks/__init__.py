"""Runs a program or sends a webhook when a capture has ended."""
