"""Hardware counters of whole GPUs, sampled by a process of its own, kinetod-counters, without touching any target."""
