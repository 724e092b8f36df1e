"""Reads facts about CUDA's devices and versions through the collector (agent/native/cupti/cuda_devices.c).

Loads no library, creates no context and initialises nothing: facts that need this are left out. There is one call per
device, because each call may wait 5 ms for the GIL beside a busy thread and CUDA has a function per property.
"""

import struct
import uuid
from typing import Any, Callable, Dict, Sequence

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
_WANTED = struct.pack("=%di" % len(ATTRIBUTES), *(number for _, number in ATTRIBUTES))
_VALUES = 32
FACTS = struct.Struct("=iiiIQ%di256s16sI4x" % _VALUES)  # device_facts in agent/native/cupti/cuda_devices.h
_MOST_DEVICES = 64
_UUIDS = {1: "GPU-%s", 2: "MIG-%s"}  # by device_facts.uuid_of, as NVML prints them


def describe(ask: Callable[[int, bytes], bytes]) -> Dict[str, Any]:
    """Returns `devices`, `cuda_driver_version` and `cuda_runtime_version`, as far as known.

    A device has the form of Kineto's deviceProperties, with its `uuid` as NVML prints it. ask: returns FACTS of a
    device, given its index and the wanted attributes; b"" if they are unknown.
    """
    found: Dict[str, Any] = {"devices": []}
    count = 1
    while len(found["devices"]) < min(count, _MOST_DEVICES):
        index = len(found["devices"])
        facts = ask(index, _WANTED)
        if len(facts) != FACTS.size:
            break
        count, driver, runtime, known, memory, *values, name, number, whose = FACTS.unpack(facts)
        versions = {"cuda_driver_version": driver, "cuda_runtime_version": runtime}
        found.update((key, value) for key, value in versions.items() if value)
        if count > 0:
            device = _device(index, known, memory, values, name)
            if whose in _UUIDS:
                device["uuid"] = _UUIDS[whose] % uuid.UUID(bytes=number)
            found["devices"].append(device)
    return found


def _device(index: int, known: int, memory: int, values: Sequence[int], name: bytes) -> Dict[str, Any]:
    properties: Dict[str, Any] = {"id": index}
    text = name.split(b"\0", 1)[0].decode("utf-8", "replace")
    if text:
        properties["name"] = text
    if memory:
        properties["totalGlobalMem"] = memory
    for bit, (key, _number) in enumerate(ATTRIBUTES):
        if known >> bit & 1:
            properties[key] = values[bit]
    return properties
