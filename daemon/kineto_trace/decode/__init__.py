"""Decodes the raw records of the activity sources into columns."""
