"""Version 1 of the interface, generated from profiler.proto."""
