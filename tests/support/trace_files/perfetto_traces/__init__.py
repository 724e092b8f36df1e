"""Perfetto traces: samples for tests, and what Perfetto itself makes of a file."""
