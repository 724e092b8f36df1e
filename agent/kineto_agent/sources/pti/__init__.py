"""Records activities of Intel GPUs through PTI."""
