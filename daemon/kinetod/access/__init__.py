"""Identifies the caller of every call, authorizes the call, limits it and writes the audit log."""
