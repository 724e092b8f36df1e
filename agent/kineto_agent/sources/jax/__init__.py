"""What JAX and other users of XLA run: through JAX's own profiler, or through a PJRT plug-in's profiler extension."""
