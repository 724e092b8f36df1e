"""Which activity types are recorded through PTI."""

from typing import Dict, Tuple

# Kineto's activity type -> pti_view_kind.
KINDS: Dict[str, Tuple[int, ...]] = {
    "kernel": (1,),  # DEVICE_GPU_KERNEL
    "gpu_memcpy": (8, 10),  # 10: between two devices
    "gpu_memset": (9,),
    "xpu_runtime": (6,),  # calls of SYCL
    "xpu_driver": (3,),  # calls of Level Zero
    "xpu_sync": (11,),
    "overhead": (5,),
}
# Recorded only if named. Calls and waits cost their own records; overhead is what PTI says of itself.
ON_REQUEST = frozenset(("xpu_driver", "xpu_sync", "overhead"))
# Calls of SYCL reach PTI only if PTI was there before SYCL: it is when torch, which needs both, is.
NEEDS_SYCL = frozenset(("xpu_runtime",))
