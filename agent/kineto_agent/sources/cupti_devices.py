"""What CUDA says about its devices and versions, from the libraries that the process has loaded.

No library is loaded, no context made and nothing initialised: what cannot be had that way is absent.
"""

import ctypes
from typing import Any, Dict, List, Optional

from kineto_agent.sources.cupti_library import mapped_files

# Kineto's name of a device property -> CUdevice_attribute; in Kineto's order.
ATTRIBUTES = (
    ("computeMajor", 75),
    ("computeMinor", 76),
    ("maxThreadsPerBlock", 1),
    ("maxThreadsPerMultiprocessor", 39),
    ("regsPerBlock", 12),
    ("warpSize", 10),
    ("sharedMemPerBlock", 8),
    ("numSms", 16),
    ("regsPerMultiprocessor", 82),
    ("sharedMemPerBlockOptin", 97),
    ("sharedMemPerMultiprocessor", 81),
)
_NAME_BYTES = 256


def _loaded(stem: str, maps: str) -> Optional[ctypes.CDLL]:
    for path in mapped_files(stem, maps):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _version(library: Optional[ctypes.CDLL], function: str) -> Optional[int]:
    number = ctypes.c_int()
    if library is None or not hasattr(library, function) or getattr(library, function)(ctypes.byref(number)) != 0:
        return None
    return number.value


def _device(cuda: ctypes.CDLL, index: int) -> Dict[str, Any]:
    handle, number, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    properties: Dict[str, Any] = {"id": index}
    if cuda.cuDeviceGet(ctypes.byref(handle), index) != 0:
        return properties
    if cuda.cuDeviceGetName(name, _NAME_BYTES, handle) == 0:
        properties["name"] = name.value.decode("utf-8", "replace")
    if cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle) == 0:
        properties["totalGlobalMem"] = size.value
    for key, attribute in ATTRIBUTES:
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle) == 0:
            properties[key] = number.value
    return properties


def _devices(cuda: Optional[ctypes.CDLL]) -> List[Dict[str, Any]]:
    count = ctypes.c_int()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_device(cuda, index) for index in range(count.value)]


def describe(maps: str = "/proc/self/maps") -> Dict[str, Any]:
    """`devices` (as Kineto's deviceProperties), `cuda_driver_version`, `cuda_runtime_version`; only what is known."""
    cuda = _loaded("libcuda.so", maps)
    found: Dict[str, Any] = {"devices": _devices(cuda)}
    versions = {
        "cuda_driver_version": _version(cuda, "cuDriverGetVersion"),
        "cuda_runtime_version": _version(_loaded("libcudart.so", maps), "cudaRuntimeGetVersion"),
    }
    found.update((key, value) for key, value in versions.items() if value is not None)
    return found
