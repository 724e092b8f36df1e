"""Keeps Kineto off CUPTI while a session of ours begins or ends, for operators alone: kineto_gate.c has why."""

import contextlib
import ctypes
import os
from typing import Iterator, Optional

from kineto_agent.sources import collector_library
from kineto_agent.sources.cupti.libcupti import mapped_files
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.native_interface import ErrorText
from kineto_agent.system.debuglog import log

LIBRARY = "libtorch_cpu.so"  # Kineto is linked into it
_NOTHING = 1  # KC_GATE_NOTHING


@contextlib.contextmanager
def kept_off(*, required: bool = True, maps: str = "/proc/self/maps", library: str = LIBRARY) -> Iterator[None]:
    """What this thread makes the library ask of CUPTI inside the block is not asked. Without CUPTI it does nothing.

    Raises SourceError if that is required and cannot be had: TORCH_PROFILER_UNAVAILABLE, since it might harm the
    program's own torch.profiler.
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
    """The collector whose gate is up; None if the library does not use CUPTI."""
    error = ErrorText()
    try:
        collector = ctypes.CDLL(collector_library.path())
        collector.kc_gate_down.restype = ctypes.c_uint64
        code = collector.kc_gate_up(os.fsencode(library), os.fsencode(cupti), *error.room)
    except (OSError, AttributeError) as exc:
        raise _unavailable(str(exc)) from exc
    if code == _NOTHING:
        return None
    if code != 0:
        raise _unavailable(str(error))
    collector_library.loaded()
    return collector


def _unavailable(why: str) -> SourceError:
    return SourceError(
        "TORCH_PROFILER_UNAVAILABLE",
        "torch's profiler would have CUPTI record every CUDA call, which cannot be kept from it here (%s): "
        "trace without what needs it" % why,
    )
