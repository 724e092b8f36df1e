"""Columns to files that trace viewers read."""
