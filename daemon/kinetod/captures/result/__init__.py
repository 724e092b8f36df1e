"""Decodes, judges, serves and keeps what captures have recorded."""
