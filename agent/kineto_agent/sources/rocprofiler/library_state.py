"""What a loaded librocprofiler-sdk says of itself, asked without our collector and without side effects."""

import os
import sys
from typing import Any, Dict, NamedTuple, Optional

from kineto_agent.system.mappings import mapped_files

_MARKER = "kineto_agent_rocprofiler"  # attribute of sys: the process in which our client has been configured
_TOOL = "libkineto_rocprofiler.so"  # what `kinetoctl run` names: rocprofiler has asked it for a client


class SdkState(NamedTuple):
    """facts: as agent/native/rocprofiler/rocprofiler_vendor.c describes them."""

    version: int  # 10000 * major + 100 * minor + patch
    facts: Dict[str, Any]


def look(path: str, maps: str = "/proc/self/maps") -> Optional[SdkState]:
    """The state of the library at `path`; None if the process has not loaded it."""
    import ctypes  # only where there is such a library

    from kineto_agent.system.libraries import Library

    try:
        library = Library(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        numbers = [ctypes.c_uint32() for _ in range(3)]
        library.rocprofiler_get_version(*map(ctypes.byref, numbers))
        initialised, finalised = ctypes.c_int(), ctypes.c_int()
        library.rocprofiler_is_initialized(ctypes.byref(initialised))
        library.rocprofiler_is_finalized(ctypes.byref(finalised))
    except (OSError, AttributeError):
        return None
    major, minor, patch = (number.value for number in numbers)
    facts = {
        "initialised": initialised.value,
        "finalised": finalised.value,
        "configured": sys.__dict__.get(_MARKER) == os.getpid() or bool(mapped_files(_TOOL, maps)),
        "runtime_up": runtime_is_up(),
    }
    return SdkState(10000 * major + 100 * minor + patch, facts)


def note_client() -> None:
    """Say that our client has been configured in this process."""
    sys.__dict__[_MARKER] = os.getpid()


def runtime_is_up(descriptors: str = "/proc/self/fd") -> bool:
    """Whether this process has AMD's device open, as a runtime that has initialised does."""
    try:
        return any(_target(os.path.join(descriptors, name)).endswith("/kfd") for name in os.listdir(descriptors))
    except OSError:
        return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""
