"""Decodes PyTorch's records: operators, their inputs, allocator events and documents of torch's own profiler."""
