"""Counters of NVIDIA's GPUs by CUPTI's PM sampling."""
