"""Rings of samples in shared memory that kinetod-counters fills and the daemon empties; see
daemon/native_counters/sample_ring.h.

The file has no name and is sealed against resizing. The content written by the other side is checked in C.
"""

import ctypes
import fcntl
import mmap
import os
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from kineto_trace.base.array_types import Floats32, Structs
from kineto_trace.spool.counter_samples import row_type

LIBRARY = Path(__file__).parents[1] / "_native" / "libkineto_counters.so"
ABI_VERSION = 1
HEADER_BYTES = 4096
RING_BYTES = 4 << 20  # 87 s of 8 metrics at 1 ms, 8 s at 100 us
MOST_BYTES = 64 << 20  # for a ring that is read
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ROWS_AT_ONCE = 4096
# kn_ring_end
NOT_ENDED, STOPPED, TOO_LONG, ERROR = range(4)


class NativeLibraryError(Exception):
    """libkineto_counters.so cannot be loaded. The text says what to do."""


class RingError(Exception):
    """The file is not a ring, or its content is inconsistent."""


class Failure(ctypes.Structure):
    """kn_failure."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("call", ctypes.c_char * 64),
        ("text", ctypes.c_char * 448),
    )


class _Writer(ctypes.Structure):
    _fields_ = (
        ("ring", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("most_ns", ctypes.c_uint64),
        ("metrics", ctypes.c_uint32),
    )


_COUNTS = ("written", "taken", "dropped", "gaps", "lost_ns", "full_stops", "overflows", "disordered", "decodings")


class _Status(ctypes.Structure):
    _fields_ = (
        ("state", ctypes.c_uint32),
        ("end", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in _COUNTS),
        ("failure", Failure),
    )


@cache
def load(path: Path = LIBRARY) -> ctypes.CDLL:
    """Loads libkineto_counters.so once. Raises NativeLibraryError."""
    advice = "build it with: python agent/native/build_hook.py (needs a C compiler), or reinstall the package"
    try:
        library = ctypes.CDLL(str(path))
        version = library.kn_abi_version()
    except (OSError, AttributeError) as exc:
        raise NativeLibraryError(f"cannot load {path} ({exc}); {advice}") from exc
    if version != ABI_VERSION:
        raise NativeLibraryError(f"{path} has version {version}, not {ABI_VERSION}; {advice}")
    pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    writer = ctypes.POINTER(_Writer)
    for name, result, arguments in (
        ("kn_ring_make", u64, [pointer, u64, u32, u64, writer]),
        ("kn_ring_put", ctypes.c_int, [writer, ctypes.c_int64, ctypes.c_int64, pointer]),
        ("kn_ring_end", None, [writer, ctypes.c_int32, ctypes.POINTER(Failure)]),
        ("kn_ring_note_gap", None, [writer, u64]),
        ("kn_ring_wait", ctypes.c_int, [writer, u64]),
        ("kn_ring_stop", None, [pointer]),
        ("kn_ring_take", ctypes.c_int64, [pointer, u64, u32, ctypes.POINTER(u64), pointer, u64]),
        ("kn_ring_status_of", ctypes.c_int, [pointer, u64, u32, ctypes.POINTER(_Status)]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class RingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a ring. Times in ns; `failure` is a CUPTI result with its text, if `end` is ERROR."""

    ended: bool
    end: int
    written: int  # rows
    taken: int
    dropped: int  # rows without room in the ring: the reader was slow
    gaps: int  # places where the hardware's samples are missing
    lost_ns: int  # their total length
    full_stops: int
    overflows: int
    disordered: int
    decodings: int
    failed_call: str
    failed_result: int
    failure: str


class _Ring:
    """Memory that is mapped until `close`."""

    def __init__(self, descriptor: int, size: int, metrics: int) -> None:
        self.metrics = metrics
        self._library = load()
        self._size = size
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, size)
        self._view: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_buffer(self._memory)
        self._address = ctypes.addressof(self._view)

    def stop(self) -> None:
        """Asks the writer to end. Harmless once it has ended."""
        if self._view is not None:
            self._library.kn_ring_stop(self._address)

    def status(self) -> RingStatus:
        """Raises RingError."""
        found = _Status()
        if self._view is None or self._library.kn_ring_status_of(
            self._address, self._size, self.metrics, ctypes.byref(found)
        ):
            raise RingError("the sample buffer is damaged")
        counts = {name: int(getattr(found, name)) for name in _COUNTS}
        return RingStatus(
            ended=found.state != 0,
            end=found.end,
            failed_call=found.failure.call.decode("utf-8", "replace"),
            failed_result=found.failure.result,
            failure=found.failure.text.decode("utf-8", "replace"),
            **counts,
        )

    def close(self) -> None:
        """Unmaps the memory. No other method may be running."""
        self._view = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class RingWriter(_Ring):
    """The side of kinetod-counters, which creates the memory; `descriptor` is a memfd for the reader."""

    def __init__(self, metrics: int, *, most_ns: int, size: int = RING_BYTES) -> None:
        """Raises OSError, NativeLibraryError."""
        self.descriptor = os.memfd_create("kinetod counters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(self.descriptor, size, metrics)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.writer = _Writer()
        if not self._library.kn_ring_make(self._address, size, metrics, most_ns, ctypes.byref(self.writer)):
            self.close()
            raise OSError(f"a sample buffer of {size} bytes has no room for {metrics} metrics")

    @property
    def most_ns(self) -> int:
        """The longest duration, from the start on."""
        return int(self.writer.most_ns)

    def put(self, start_ns: int, end_ns: int, values: Floats32) -> bool:
        """Appends a row. Returns False if there was no room."""
        assert values.dtype == np.float32 and len(values) == self.metrics
        return not self._library.kn_ring_put(
            ctypes.byref(self.writer), start_ns, end_ns, np.ascontiguousarray(values).ctypes.data
        )

    def note_gap(self, lost_ns: int) -> None:
        """Counts a place where samples are missing."""
        self._library.kn_ring_note_gap(ctypes.byref(self.writer), lost_ns)

    def wait(self, seconds: float) -> bool:
        """Waits that long, or until the ring is stopped; returns whether it is."""
        return bool(self._library.kn_ring_wait(ctypes.byref(self.writer), max(0, int(seconds * 1e9))))

    def end(self, end: int, failure: Failure | None = None) -> None:
        """Notes that no more rows come, and why."""
        self._library.kn_ring_end(ctypes.byref(self.writer), end, None if failure is None else ctypes.byref(failure))

    def close(self) -> None:
        """Unmaps the memory; a reader keeps its own mapping."""
        super().close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class RingReader(_Ring):
    """The daemon's side."""

    def __init__(self, descriptor: int, metrics: int) -> None:
        """Takes ownership of the descriptor. Raises OSError, and RingError if it is not a ring of that many metrics."""
        try:
            try:
                sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            except OSError as exc:
                raise RingError(f"the sample buffer is not shared memory: {exc.strerror}") from exc
            size = os.fstat(descriptor).st_size
            if not sealed or not HEADER_BYTES < size <= MOST_BYTES:
                raise RingError("the sample buffer can be resized, or its size is invalid")
            super().__init__(descriptor, size, metrics)
        finally:
            os.close(descriptor)
        self._taken = ctypes.c_uint64()
        self._rows = np.empty(ROWS_AT_ONCE, dtype=row_type(metrics))
        try:
            self.status()
        except RingError:
            self.close()
            raise

    def take(self) -> Structs:
        """The oldest rows that were not taken, at most ROWS_AT_ONCE, as `row_type` lays them out. Raises RingError."""
        if self._view is None:
            raise RingError("the sample buffer is closed")
        count = self._library.kn_ring_take(
            self._address, self._size, self.metrics, ctypes.byref(self._taken), self._rows.ctypes.data, ROWS_AT_ONCE
        )
        if count < 0:
            raise RingError("the sample buffer is damaged")
        return self._rows[:count].copy()
