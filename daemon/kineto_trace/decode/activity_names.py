"""The names that Kineto gives to activities, derived from CUPTI's numbers."""

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import cache

MEMCPY_KINDS = ("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
MEMORY_KINDS = (
    "Unknown",
    "Pageable",
    "Pinned",
    "Device",
    "Array",
    "Managed",
    "Device Static",
    "Managed Static",
)
SYNC_TYPES = ("Unknown Sync", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")
STREAM_WAIT_EVENT = 2
OVERHEAD_KINDS = {
    0: "Unknown",
    1: "Driver Compiler",
    1 << 16: "Buffer Flush",
    2 << 16: "Instrumentation",
    3 << 16: "Resource",
    4 << 16: "Runtime Triggered Module Loading",
    5 << 16: "Lazy Function Loading",
    6 << 16: "Command Buffer Full",
    7 << 16: "Activity Buffer Request",
    8 << 16: "UVM Activity Init",
}
ACTIVITY_BUFFER_REQUEST = 7 << 16

_VERSION_SUFFIX = re.compile(r"_v\d+$")


def name_of_number(names: Sequence[str], number: int) -> str:
    """Returns the name at this place; "unknown …" beyond the last one."""
    return names[number] if number < len(names) else f"unknown {number}"


def memcpy_name(copy_kind: int, src_kind: int, dst_kind: int) -> str:
    """Returns the name of a copy: 'Memcpy HtoD (Pageable -> Device)'."""
    kind = name_of_number(MEMCPY_KINDS, copy_kind)
    return f"Memcpy {kind} ({name_of_number(MEMORY_KINDS, src_kind)} -> {name_of_number(MEMORY_KINDS, dst_kind)})"


def memset_name(memory_kind: int) -> str:
    """Returns the name of a memset: 'Memset (Device)'."""
    return f"Memset ({name_of_number(MEMORY_KINDS, memory_kind)})"


def sync_name(sync_type: int) -> str:
    """Returns the name of a synchronization: 'Stream Sync'."""
    return name_of_number(SYNC_TYPES, sync_type)


def overhead_name(kind: int) -> str:
    """Returns the name of an overhead: 'Lazy Function Loading'."""
    return OVERHEAD_KINDS.get(kind, "Unrecognized")


def api_name(names: Mapping[int, bytes], cbid: int, what: str) -> str:
    """Returns the function's name without the version that CUPTI appends: 'cudaLaunchKernel', not '…_v7000'."""
    raw = names.get(cbid)
    return f"{what} call {cbid}" if raw is None else _VERSION_SUFFIX.sub("", raw.decode("utf-8", "replace"))


@cache
def _demangler() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """Returns libstdc++ and libc, or None if there is no C++ run time."""
    try:
        runtime = ctypes.CDLL("libstdc++.so.6")
        libc = ctypes.CDLL(None)
        runtime.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        runtime.__cxa_demangle.restype = ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return runtime, libc


# The demangler recurses, so an absurdly long name from the target could exhaust the stack.
MAX_MANGLED_BYTES = 16 * 1024


def demangle(name: bytes) -> str:
    """Returns the C++ name as people write it; a name that is not mangled stays as it is."""
    plain = name.decode("utf-8", "replace")
    libraries = _demangler() if name.startswith(b"_Z") and len(name) <= MAX_MANGLED_BYTES else None
    if libraries is None:
        return plain
    runtime, libc = libraries
    result = runtime.__cxa_demangle(name, None, None, None)
    if not result:
        return plain
    try:
        return ctypes.string_at(result).decode("utf-8", "replace")
    finally:
        libc.free(result)
