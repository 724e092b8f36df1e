"""Brings the agent into a process that nobody prepared."""
