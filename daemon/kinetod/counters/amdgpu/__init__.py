"""Counters of AMD's GPUs by the table `gpu_metrics` of the kernel's driver."""
