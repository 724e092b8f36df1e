"""Reproduces the figures of the TensorBoard profiler plug-in."""
