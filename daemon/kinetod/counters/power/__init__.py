"""Power, clocks, temperature and throttling of whole GPUs, which need nobody's hardware counters."""
