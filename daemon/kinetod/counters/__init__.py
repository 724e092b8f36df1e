"""Samples hardware counters of whole GPUs in a separate process, kinetod-counters, without touching any target."""
