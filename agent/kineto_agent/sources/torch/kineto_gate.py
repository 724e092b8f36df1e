"""Keeps Kineto off CUPTI while one of our operator-only sessions begins or ends; kineto_gate.c says why."""

import contextlib
import ctypes
import os
from typing import Dict, Iterator, Optional

from kineto_agent.sources import collector_library
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.native_interface import ErrorText
from kineto_agent.system.debuglog import log
from kineto_agent.system.libraries import Library
from kineto_agent.system.mappings import mapped_files

LIBRARY = "libtorch_cpu.so"  # Kineto is linked into it
_NOTHING = 1  # KC_GATE_NOTHING


@contextlib.contextmanager
def kept_off(*, required: bool = True, maps: str = "/proc/self/maps", library: str = LIBRARY) -> Iterator[None]:
    """Inside the block, the library's calls to CUPTI on this thread do nothing. Has no effect without CUPTI.

    Raises SourceError (TORCH_PROFILER_UNAVAILABLE) if this is required but impossible, since the program's own
    torch.profiler might be harmed.
    """
    found = mapped_files("libcupti.so", maps)
    if not found:
        yield
        return
    collector = None
    try:
        collector = _up(found[0], library)
    except SourceError as error:
        if required:
            raise
        log("%s", error)
    try:
        yield
    finally:
        if collector is not None:
            log("Kineto was kept off CUPTI: %d calls", collector.kc_gate_down())


def _up(cupti: str, library: str) -> Optional[ctypes.CDLL]:
    """The collector with the gate closed; None if the library does not use CUPTI."""
    error = ErrorText()
    try:
        collector = _opened()
        code = collector.kc_gate_up(os.fsencode(library), os.fsencode(cupti), *error.room)
    except (OSError, AttributeError) as exc:
        raise _unavailable(str(exc)) from exc
    if code == _NOTHING:
        return None
    if code != 0:
        raise _unavailable(str(error))
    collector_library.loaded()
    return collector


def _opened() -> Library:
    """The collector, opened once: later calls may come on a thread of the program. Raises OSError, AttributeError."""
    path = collector_library.path()
    if path not in _collectors:
        _collectors[path] = Library(path)
        _collectors[path].kc_gate_down.restype = ctypes.c_uint64
    return _collectors[path]


_collectors: Dict[str, Library] = {}


def _unavailable(why: str) -> SourceError:
    return SourceError(
        "TORCH_PROFILER_UNAVAILABLE",
        "torch's profiler would have CUPTI record every CUDA call, which cannot be prevented here (%s): "
        "trace without the options that need it" % why,
    )
