"""Records programs that use JAX or XLA: through JAX's own profiler, or through a PJRT plug-in's profiler extension."""
