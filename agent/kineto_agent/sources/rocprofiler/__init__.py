"""Activities of AMD GPUs and HIP's calls, through rocprofiler-sdk."""
