"""Injects the agent into a process that was not prepared for it."""
