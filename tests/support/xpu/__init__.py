"""Programs that use Intel GPUs, with the real tracing library and a fake driver."""
