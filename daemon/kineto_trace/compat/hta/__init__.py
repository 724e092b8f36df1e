"""Reproduces the figures of Holistic Trace Analysis (HTA)."""
