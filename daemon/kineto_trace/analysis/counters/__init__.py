"""What the samples of hardware counters say about kernels, operators, modules, steps and collectives."""
