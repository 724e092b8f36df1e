"""The CUPTI activity kinds behind each activity type."""

from typing import Dict, Tuple

# Kineto's activity type -> CUpti_ActivityKind. Never KERNEL (3), which serialises kernels, nor GRAPH_TRACE (51), which
# hides the kernels of graphs. They are enabled in this order: where CUPTI is attached already (torch.profiler was used
# before), enabling copies or sets before kernels while a thread launches made libcupti 13.0 lose all kernels of that
# thread, in our recording and in the program's next torch.profiler traces (docs/measurements.md).
KINDS: Dict[str, Tuple[int, ...]] = {
    "kernel": (10,),  # CONCURRENT_KERNEL
    "cuda_runtime": (5,),
    "cuda_driver": (4,),
    "cuda_sync": (38,),
    "overhead": (17,),
    "gpu_memset": (2,),
    "gpu_memcpy": (1, 22),  # 22: between two devices
}
