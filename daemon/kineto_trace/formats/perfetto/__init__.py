"""Reads and writes Perfetto's protobuf trace format."""
