"""Decodes what PyTorch recorded: operators, their inputs, allocator events and documents of torch's own profiler."""
