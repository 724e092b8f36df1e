"""Reads and writes the file formats of trace viewers."""
