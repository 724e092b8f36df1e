"""Records the history of PyTorch's CUDA allocator, as snapshots or as allocation events."""
