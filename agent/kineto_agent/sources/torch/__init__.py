"""Records PyTorch's operators and coordinates with the program's own use of torch.profiler and Kineto."""
