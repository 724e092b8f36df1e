"""The C interface of agent/native/python/call_tracer.h through ctypes. Imported when a capture is prepared.

Functions that touch the interpreter are called with the GIL held, the others release it.
"""

import ctypes
from typing import Any

from kineto_agent.sources.native_interface import NativeCounts, NativeInterface
from kineto_agent.system.libraries import PyLibrary

_PYTHON, _SYSTEM, _ORDER = -1, -2, -4
_REASONS = {_PYTHON: "PYTHON_CALLS_UNAVAILABLE", _SYSTEM: "ARENA_FAILED", _ORDER: "PYTHON_CALLS_BUSY"}


class TracerConfig(ctypes.Structure):
    """kc_tracer_config."""

    _fields_ = [
        ("buffer_limit_bytes", ctypes.c_uint64),
        ("buffer_bytes", ctypes.c_uint64),
        ("strings_bytes", ctypes.c_uint64),
        ("prefault_bytes", ctypes.c_uint64),
        ("modules_only", ctypes.c_uint64),
    ]


class TracerResult(ctypes.Structure):
    """kc_tracer_result."""

    counts: NativeCounts
    threads: int
    others: int
    crowded: int
    names_lost: int
    elsewhere: int
    full_ns: int
    _fields_ = [
        ("counts", NativeCounts),
        ("threads", ctypes.c_uint64),
        ("others", ctypes.c_uint64),
        ("crowded", ctypes.c_uint64),
        ("names_lost", ctypes.c_uint64),
        ("elsewhere", ctypes.c_uint64),
        ("full_ns", ctypes.c_uint64),
    ]


class CallTracer(NativeInterface):
    """The one recorder of this process. Methods raise SourceError with the C side's reason."""

    ABI_FUNCTION = "kc_tracer_abi"
    ABI = 4
    USE = " for Python calls"
    REASONS = _REASONS

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._with_gil: Any = PyLibrary(path, handle=self._library._handle)
        self._forked = self._with_gil.kc_tracer_forked  # looked up before a fork, since the child calls it

    def open(self) -> None:
        """Find the interpreter's functions."""
        self._check(self._library.kc_tracer_open(*self._error.room))

    def prepare(self, config: TracerConfig) -> int:
        """Create the arena and return its file descriptor, which the recorder keeps."""
        return self._check(self._library.kc_tracer_prepare(ctypes.byref(config), *self._error.room))

    def leave_out(self) -> None:
        """Exclude the calling thread from the recording."""
        self._with_gil.kc_tracer_leave_out()

    def start(self, module_call: int) -> None:
        """Set the profile function. module_call: address of the code of torch.nn.Module.__call__, or 0."""
        self._check(self._with_gil.kc_tracer_start(ctypes.c_void_p(module_call), *self._error.room))

    def look(self) -> None:
        """Set the profile function on new threads."""
        self._with_gil.kc_tracer_look()

    def counts(self) -> NativeCounts:
        """Counts so far; zeros when nothing is recorded."""
        counts = NativeCounts()
        self._library.kc_tracer_counts(ctypes.byref(counts))
        return counts

    def stop(self) -> TracerResult:
        """End the recording; zeros when nothing was recorded."""
        result = TracerResult()
        self._with_gil.kc_tracer_stop(ctypes.byref(result))
        return result

    def close(self) -> None:
        """Free the arena."""
        self._library.kc_tracer_close()

    def forked(self) -> None:
        """Remove our profile function from the thread of a forked child."""
        self._forked()
