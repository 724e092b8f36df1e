"""Decodes records by their declared schema: what vendors and plug-ins write, and what their decoders build on."""
