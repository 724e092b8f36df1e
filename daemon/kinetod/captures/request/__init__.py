"""Validates a capture request and resolves its selector to target processes."""
