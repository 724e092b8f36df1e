"""Uploads of captures to object storage, and reading them back."""
