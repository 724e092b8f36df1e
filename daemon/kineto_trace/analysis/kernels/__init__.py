"""Shows kernels by name, launch shape, hardware counters and tensor core use."""
