"""Records GPU activities and CUDA API calls through NVIDIA's CUPTI."""
