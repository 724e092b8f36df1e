"""Takes finished buffers out of the memory that a target writes.

Theory of operation
    The descriptor came from a target, so nothing about it is trusted: it must be a memfd whose size is sealed
    (otherwise the target could shrink it and a read here would be a fatal SIGBUS), and the geometry in its header is
    checked once against that size and kept; later writes to the header change nothing. Every count and length read
    while draining is bounded by that geometry.

    A drain reads all states, then the string table (the names of what is READY are there), then copies
    the READY buffers in the order of their sequence and sets each back to FREE. The locks are memory
    barriers: acquire between the states and the contents, release between the contents and FREE.

    Header and descriptors are read through a mapping, contents with pread(2). A target may leave holes in its memory;
    reading a hole through a mapping would allocate it and charge it to our control group instead of the target's.
    Contents are copied once: a target that rewrites them at the same time spoils only its own records.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kineto_agent.protocol import arena

MAX_BUFFERS = 1 << 16
MAX_BUFFER_BYTES = 64 << 20  # of one; the largest that there is has 4 MiB
_PIECE_BYTES = 4 << 20  # of strings
MAX_STRINGS_BYTES = 1 << 30
_F_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)
_SIZE_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK | F_SEAL_GROW
_INT64_MAX = 2**63 - 1


class BadArena(Exception):
    """The memory that a target passed is not a valid arena; the text says why."""


class ArenaSink(Protocol):
    """Receives the contents; implemented by `kineto_trace.spool.raw_records.RawWriter`."""

    def append_buffer(self, data: memoryview, *, sequence: int, records: int) -> None:
        """Takes one buffer of records."""

    def append_strings(self, data: memoryview) -> None:
        """Takes the next part of the string table."""


@dataclass(frozen=True, slots=True)
class ArenaCounts:
    """What the source reports to have recorded so far."""

    records: int
    bytes: int
    dropped: int


@dataclass(frozen=True, slots=True)
class _Ready:
    sequence: int
    index: int
    valid_bytes: int
    records: int


class ArenaReader:
    """One mapped arena. Not thread-safe; `close` frees the mapping."""

    def __init__(self, fd: int, *, max_buffer_bytes: int) -> None:
        """Maps the arena; takes `fd`. Raises BadArena; `max_buffer_bytes` bounds all its buffers together."""
        self._fd = fd
        try:
            size = _checked_size(fd)
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as exc:
            self._close_fd()
            raise BadArena(f"it cannot be mapped: {exc}") from exc
        except BadArena:
            self._close_fd()
            raise
        self._piece = bytearray()
        self._view = memoryview(self._map)
        try:
            self._geometry(size, max_buffer_bytes)
        except BadArena:
            self.close()
            raise
        self._words = self._view[: size - size % 8].cast("Q")
        self._states = self._view[: size - size % 8].cast("I")
        self._fence = threading.Lock()
        self._strings_copied = 0
        self._next_sequence = 0
        self.copied_bytes = 0  # of records

    def _geometry(self, size: int, max_buffer_bytes: int) -> None:
        fields: dict[str, Any] = dict(zip(arena.FIXED_FIELDS, arena.FIXED.unpack_from(self._view), strict=True))
        count: int = fields["buffer_count"]
        buffer_bytes: int = fields["buffer_bytes"]
        self._descriptors: int = fields["descriptors_offset"]
        self._strings: int = fields["strings_offset"]
        self._strings_bytes: int = fields["strings_bytes"]
        self._buffers: int = fields["buffers_offset"]
        self._buffer_bytes, self._count = buffer_bytes, count
        descriptors_end = self._descriptors + count * arena.DESCRIPTOR_BYTES
        checks = (
            (fields["magic"] == arena.MAGIC, "its magic is wrong"),
            (fields["header_bytes"] == arena.HEADER_BYTES, "its header has the wrong size"),
            (fields["total_bytes"] == size, "its size differs from what its header says"),
            (0 < count <= MAX_BUFFERS, "its number of buffers is out of range"),
            (0 < buffer_bytes <= min(size, MAX_BUFFER_BYTES), "its buffer size is out of range"),
            (count * buffer_bytes <= max_buffer_bytes, "its buffers are larger than the request allows"),
            (self._strings_bytes <= MAX_STRINGS_BYTES, "its string table is too large"),
            (self._descriptors >= arena.HEADER_BYTES and self._descriptors % 8 == 0, "its descriptors are misplaced"),
            (descriptors_end <= self._strings, "its descriptors are misplaced"),
            (self._strings % 8 == 0 and self._strings + self._strings_bytes <= self._buffers, "its strings overlap"),
            (self._buffers % 8 == 0 and self._buffers + count * buffer_bytes <= size, "its buffers are misplaced"),
        )
        for good, problem in checks:
            if not good:
                raise BadArena(problem)

    def counts(self) -> ArenaCounts:
        """The cumulative counters in the header."""
        return ArenaCounts(self._word(arena.RECORDS), self._word(arena.VALID_BYTES), self._word(arena.DROPPED))

    def record_bytes(self) -> Mapping[int, int]:
        """Observed size of one record by activity kind."""
        start = arena.RECORD_BYTES // 4
        sizes = self._states[start : start + arena.RECORD_KINDS].tolist()
        return {kind: size for kind, size in enumerate(sizes) if size}

    def clocks(self) -> list[list[int]]:
        """The two clock samples described in kineto_agent.protocol.arena; empty if the source provides none."""
        samples = [[self._word(at + 8 * each) for each in range(3)] for at in (arena.CLOCKS_FIRST, arena.CLOCKS_LAST)]
        return samples if all(sample[0] for sample in samples) else []

    def drain(self, sink: ArenaSink, *, target_is_dead: bool = False, max_bytes: int = _INT64_MAX) -> int:
        """Copies what is READY (of a dead target also what is only COMPLETED); returns the bytes copied.

        Raises OSError of the sink; the buffer in question and those behind it stay READY. Stops once
        `max_bytes` are copied.
        """
        ready = self._ready(target_is_dead)
        copied = self._drain_strings(sink)
        for entry in ready:
            if copied >= max_bytes:
                break
            start = self._buffers + entry.index * self._buffer_bytes
            if entry.valid_bytes:
                data = self._contents(start, entry.valid_bytes)
                sink.append_buffer(data, sequence=entry.sequence, records=entry.records)
            self._next_sequence = max(self._next_sequence, min(entry.sequence + 1, _INT64_MAX))
            self.copied_bytes += entry.valid_bytes
            copied += entry.valid_bytes
            with self._fence:
                pass
            self._states[self._descriptor(entry.index) // 4] = arena.FREE
        return copied

    def _ready(self, target_is_dead: bool) -> list[_Ready]:
        states = [self._states[self._descriptor(index) // 4] for index in range(self._count)]
        with self._fence:
            pass
        ready = sorted(
            (self._entry(index, None) for index, state in enumerate(states) if state == arena.READY),
            key=lambda entry: entry.sequence,
        )
        if target_is_dead:
            following = max((entry.sequence + 1 for entry in ready), default=self._next_sequence)
            completed = [index for index, state in enumerate(states) if state == arena.COMPLETED]
            ready += [self._entry(index, following + place) for place, index in enumerate(completed)]
        return ready

    def _entry(self, index: int, sequence: int | None) -> _Ready:
        at = self._descriptor(index)
        valid = min(self._word(at + arena.BUFFER_VALID_BYTES), self._buffer_bytes)
        records = min(self._word(at + arena.BUFFER_RECORDS), valid)
        own = min(self._word(at + arena.BUFFER_SEQUENCE), _INT64_MAX - 1)
        return _Ready(own if sequence is None else sequence, index, valid, records)

    def _drain_strings(self, sink: ArenaSink) -> int:
        used = min(self._word(arena.STRINGS_USED), self._strings_bytes)
        if used <= self._strings_copied:
            return 0
        before = self._strings_copied
        while self._strings_copied < used:
            size = min(used - self._strings_copied, _PIECE_BYTES)
            sink.append_strings(self._contents(self._strings + self._strings_copied, size))
            self._strings_copied += size
        return used - before

    def _contents(self, start: int, size: int) -> memoryview:
        """A copy of these bytes, valid until the next call."""
        if len(self._piece) < size:
            self._piece = bytearray(size)
        view = memoryview(self._piece)[:size]
        done = 0
        while done < size:
            done += os.preadv(self._fd, [view[done:]], start + done)
        return view

    def _descriptor(self, index: int) -> int:
        return self._descriptors + index * arena.DESCRIPTOR_BYTES

    def _word(self, offset: int) -> int:
        value: int = self._words[offset // 8]
        return min(value, _INT64_MAX)

    def close(self) -> None:
        """Unmaps. Safe to call twice."""
        for name in ("_words", "_states", "_view"):
            view: memoryview | None = getattr(self, name, None)
            if view is not None:
                view.release()
        self._map.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _checked_size(fd: int) -> int:
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as exc:
        raise BadArena("it is not a memfd") from exc
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise BadArena("its size is not sealed")
    size = os.fstat(fd).st_size
    if size < arena.HEADER_BYTES:
        raise BadArena(f"it has only {size} bytes")
    return size
