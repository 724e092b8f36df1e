"""Decodes, judges, serves and keeps the records of captures."""
