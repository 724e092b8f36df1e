"""Accelerators as plug-ins: their declaration, who may install them, loading them, and sending them to agents."""
