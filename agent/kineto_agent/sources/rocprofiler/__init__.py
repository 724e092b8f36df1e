"""Records activities of AMD GPUs and HIP calls through rocprofiler-sdk."""
