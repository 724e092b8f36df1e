"""Kinds of records that make each activity type. Imported wherever activity types are told apart: nothing else here."""

from typing import Dict, FrozenSet, Tuple

# rocprofiler_buffer_tracing_kind_t, and those of agent/native/rocprofiler/hip_calls.h: 60 HIP's runtime, 61 its
# compiler. Kernels and copies get their streams, and kernels that were loaded before us their names, from the calls: so
# these are recorded with them. The kind 1 stands for all of HSA's.
_HIP_CALLS = 60
KINDS: Dict[str, Tuple[int, ...]] = {
    "kernel": (11, _HIP_CALLS),
    "gpu_memcpy": (10, _HIP_CALLS),
    "cuda_runtime": (_HIP_CALLS, 61),
    "cuda_driver": (1,),
    "rocm_memory": (16,),
    "rocm_scratch": (12,),
}
ALL_ALLOCATIONS = 62  # HIP's calls that allocate in stream order, too

# HSA is the layer below HIP: its calls say little beside HIP's, and come by the thousand.
ON_REQUEST: FrozenSet[str] = frozenset(("cuda_driver", "rocm_memory", "rocm_scratch"))
