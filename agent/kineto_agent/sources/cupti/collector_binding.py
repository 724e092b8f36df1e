"""The collector's C interface (agent/native/cupti/collector.h) through ctypes. Imported when a capture is prepared.

Every call releases the GIL. The mirror of the C structures is checked by `kc_abi` when the library is loaded.
"""

import ctypes
import os
from typing import Sequence

from kineto_agent.sources import collector_library
from kineto_agent.sources.cupti import cuda_devices
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.kit.claims import Claim
from kineto_agent.sources.native_interface import EnableResult, NativeCounts, NativeInterface, enable

LIBRARY = collector_library.INSTALLED

_NOT_ASKED = -1  # not a CUPTI result
# For captures of graphs on unknown streams: most take milliseconds. If torch's streams are known, few are left.
_SETTLE_MS, LONG_SETTLE_MS = 100, 500
_CALL_STANDS = (
    "CUPTI's first call has not returned: it is waiting for GPU work that does not end, and launches into the same "
    "context are blocked too. GPU activities can be recorded once that work has ended"
)
_LEFT_ALONE = (
    "CUPTI was not used: %s, and CUPTI's first call would block every launch of the program until the GPU is idle. "
    "Trace again once the GPU's work has ended; `kinetoctl stacks` shows what the program is waiting for"
)
_LIBRARY, _SYSTEM, _CUPTI, _ORDER, _FORKED, _BUSY = -1, -2, -3, -4, -5, -6
_REASONS = {
    _LIBRARY: "CUPTI_LIBRARY",
    _SYSTEM: "ARENA_FAILED",
    _CUPTI: "CUPTI_FAILED",
    _ORDER: "CUPTI_BUSY",
    _FORKED: "CUPTI_FORKED",
}

DETACHED, SUBSCRIBED_ELSEWHERE, NO_CALL, REFUSED, STUCK, MUST_STAY, BUSY = range(7)  # kc_detach_outcome
SHORT, SOON, DOES_NOT_DRAIN, CAPTURING, UNKNOWN, CALLED, UNANSWERED = range(7)  # kc_drain_outcome


def why_busy(outcome: int, queued_ns: int = 0) -> str:
    """Explains why CUPTI cannot be called. outcome: kc_drain_outcome; queued_ns: 0 if unknown."""
    if outcome == CAPTURING:
        return "the program keeps capturing CUDA graphs, so it is unknown whether the GPU's work will end soon"
    if outcome == UNANSWERED:
        return (
            "the CUDA driver is not responding to the agent (for example because another thread is in a call that "
            "waits for the GPU), so it is unknown whether the GPU's work will end soon"
        )
    if queued_ns == 0:
        return "while the trace was being prepared, the GPU began work that does not end"
    return "the GPU has been busy for %.1f s without a break" % (queued_ns / 1e9)


def busy(outcome: int, queued_ns: int = 0) -> SourceError:
    """Error for a capture that would have to wait for the GPU; arguments as in why_busy."""
    code = "CUDA_DOES_NOT_ANSWER" if outcome == UNANSWERED else "GPU_DOES_NOT_DRAIN"
    return SourceError(code, _CALL_STANDS if outcome == CALLED else _LEFT_ALONE % why_busy(outcome, queued_ns))


class CollectorConfig(ctypes.Structure):
    """kc_config."""

    buffer_limit_bytes: int
    buffer_bytes: int
    strings_bytes: int
    prefault_bytes: int
    flush_period_ms: int
    kernel_name_offset: int
    may_decline: int
    _fields_ = [
        ("buffer_limit_bytes", ctypes.c_uint64),
        ("buffer_bytes", ctypes.c_uint64),
        ("strings_bytes", ctypes.c_uint64),
        ("prefault_bytes", ctypes.c_uint64),
        ("flush_period_ms", ctypes.c_uint32),
        ("kernel_name_offset", ctypes.c_uint32),
        ("may_decline", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class CollectorResult(ctypes.Structure):
    """kc_stop_result."""

    counts: NativeCounts
    cpu_ns: int
    names_lost: int
    calls_unnamed: int
    irregular_records: int
    withheld: int
    timed_out: int
    flushes: int
    flush_result: int
    _fields_ = [
        ("counts", NativeCounts),
        ("cpu_ns", ctypes.c_uint64),
        ("names_lost", ctypes.c_uint64),
        ("calls_unnamed", ctypes.c_uint64),
        ("irregular_records", ctypes.c_uint64),
        ("withheld", ctypes.c_uint32),
        ("timed_out", ctypes.c_uint32),
        ("flushes", ctypes.c_uint32),
        ("flush_result", ctypes.c_int32),
    ]


class DetachResult(ctypes.Structure):
    """kc_detach_result."""

    outcome: int
    result: int
    ns: int
    _fields_ = [("outcome", ctypes.c_int32), ("result", ctypes.c_int32), ("ns", ctypes.c_uint64)]


class DrainWish(ctypes.Structure):
    """kc_drain_wish."""

    _fields_ = [("limit_ms", ctypes.c_uint32), ("settle_ms", ctypes.c_uint32), ("stream_count", ctypes.c_uint32)]


class DrainResult(ctypes.Structure):
    """kc_drain_result."""

    outcome: int
    code: int
    waited_ns: int
    queued_ns: int
    _fields_ = [
        ("outcome", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("waited_ns", ctypes.c_uint64),
        ("queued_ns", ctypes.c_uint64),
    ]


class OtherUsers(ctypes.Structure):
    """kc_others."""

    time_ns: int
    caller: int
    listener: int
    in_use: int
    ended: int
    function: bytes
    unnoticed: bytes
    standing_ns: int
    _fields_ = [
        ("time_ns", ctypes.c_int64),
        ("caller", ctypes.c_uint64),
        ("listener", ctypes.c_uint64),
        ("in_use", ctypes.c_uint32),
        ("ended", ctypes.c_uint32),
        ("function", ctypes.c_char * 48),
        ("unnoticed", ctypes.c_char * 160),
        ("standing_ns", ctypes.c_int64),
    ]


class Collector(NativeInterface):
    """The one collector of this process. Methods raise SourceError with the C side's reason."""

    ABI_FUNCTION = "kc_abi"
    ABI = 6
    REASONS = _REASONS
    BY_PROGRAM = ("kc_hurry", "kc_stop", "kc_yield", "kc_others")

    def __init__(self, path: str = LIBRARY) -> None:
        super().__init__(path)
        self._claim = Claim("cupti", "CUPTI", path, "CUPTI_BUSY")

    def open(self, path: str) -> int:
        """Open libcupti and return its version number."""
        version = ctypes.c_uint32()
        self._check(self._library.kc_open(os.fsencode(path), ctypes.byref(version), *self._error.room))
        return version.value

    def drain(self, limit_ms: int, streams: Sequence[int] = ()) -> DrainResult:
        """Wait for a moment in which CUPTI's first call does not wait for the GPU, before prepare().

        limit_ms: maximum queued work. streams: handles of streams that are never destroyed, on which graph captures may
        already have begun.
        """
        settle_ms = _SETTLE_MS if streams else LONG_SETTLE_MS
        wish = DrainWish(limit_ms, settle_ms, len(streams))
        result = DrainResult()
        self._library.kc_drain(ctypes.byref(wish), (ctypes.c_uint64 * len(streams))(*streams), ctypes.byref(result))
        return result

    def prepare(self, config: CollectorConfig) -> int:
        """Make the arena and return its file descriptor, which the collector keeps."""
        self._claim.take()
        try:
            return self._check(self._library.kc_prepare(ctypes.byref(config), *self._error.room))
        except SourceError:
            self._claim.release()
            raise

    def keep_calls(self, domain: int, patterns: Sequence[str]) -> None:
        """Choose the API calls of a domain (1 driver, 2 runtime) to record, by fnmatch patterns."""
        joined = b"".join(pattern.encode() + b"\0" for pattern in patterns) + b"\0"
        code = self._library.kc_keep_calls(domain, joined, ctypes.c_size_t(len(joined)))
        if code < 0:
            raise SourceError(_REASONS[code], "the collector refused a list of %d API calls" % len(patterns))

    def subscribe(self) -> int:
        """Take CUPTI's only subscriber, after prepare(). Returns CUPTI's result: 39 if another tool has it.

        Raises SourceError if CUPTI would have to wait for the GPU.
        """
        result = ctypes.c_int32(_NOT_ASKED)
        if self._library.kc_subscribe(ctypes.byref(result)) == _BUSY:
            raise busy(result.value)
        return result.value

    def others(self) -> OtherUsers:
        """Other users of CUPTI, from prepare() to close(); afterwards only standing_ns is not zero. On any thread."""
        others = OtherUsers()
        self._library.kc_others(ctypes.byref(others))
        return others

    def record_calls(self) -> str:
        """Record the chosen API calls through the subscriber, after start(). Returns why that failed, or ""."""
        self._error.clear()
        return str(self._error) if self._library.kc_record_calls(*self._error.room) < 0 else ""

    def yield_subscriber(self) -> None:
        """Release the subscriber at once."""
        self._library.kc_yield()

    def hurry(self) -> None:
        """Make a detach() that waits on another thread give up. The only method for any thread at any time."""
        self._library.kc_hurry()

    def start(self, kinds: Sequence[int]) -> EnableResult:
        """Begin to record; never raises."""
        return enable(self._library.kc_start, kinds, self._error)

    def counts(self) -> NativeCounts:
        """Counts so far; zeros when nothing is recorded."""
        counts = NativeCounts()
        self._library.kc_counts(ctypes.byref(counts))
        return counts

    def stop(self, limit_ms: int) -> CollectorResult:
        """End the recording; zeros when nothing was recorded (or in a forked child)."""
        result = CollectorResult()
        self._library.kc_stop(limit_ms, ctypes.byref(result))
        return result

    def detach(self, limit_ms: int) -> DetachResult:
        """Take CUPTI out of the process at the end of its next CUDA call, once the GPU's queue is short."""
        result = DetachResult()
        self._library.kc_detach(limit_ms, ctypes.byref(result))
        return result

    def close(self) -> None:
        """Free the arena, unless CUPTI still uses it."""
        self._library.kc_close()
        self._claim.release()

    def device(self, index: int, attributes: bytes) -> bytes:
        """cuda_devices.FACTS of one device; attributes: 32-bit CUdevice_attributes."""
        facts = ctypes.create_string_buffer(cuda_devices.FACTS.size)
        self._library.kc_device(index, attributes, len(attributes) // 4, facts)
        return facts.raw

    def result_text(self, result: int) -> str:
        """CUPTI's text for one of its results."""
        self._library.kc_result_text(result, *self._error.room)
        return str(self._error)
