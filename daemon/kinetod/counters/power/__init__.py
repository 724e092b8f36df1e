"""Power, clocks, temperature and throttling of whole GPUs, recorded without hardware counters."""
