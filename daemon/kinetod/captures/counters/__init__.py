"""Hardware counters of the GPUs that the targets of a capture use, sampled while it records."""
