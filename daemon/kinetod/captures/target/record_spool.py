"""Takes finished buffers out of the memory that a target writes, and writes its raw records to disk.

Methods block; call one at a time, from any thread.

Theory of operation
    The memory's descriptor came from a target, so nothing about it is trusted: it must be a memfd of ordinary pages
    whose size is sealed, and the geometry in its header is checked once against that size and kept; later writes to the
    header change nothing. Every count and length read while draining is bounded by that geometry.

    Nothing is mapped here. A target can take back a page that is mapped (by punching a hole where no page can be had
    again: huge pages, a control group at its limit), and the next access is killed by SIGBUS, seals or not. pread(2)
    and pwrite(2) fail instead, which affects only this target's capture. Neither waits for the target: its userfaultfd
    covers only its own mappings. pread does not allocate the holes that it reads.

    A drain reads all states, then the descriptors, then the string table (it has the names of READY records), then
    copies the READY buffers in the order of their sequence and sets each back to FREE. The locks are memory barriers:
    acquire between the states and the contents, release between the contents and FREE. The kernel copies an aligned
    word of 8 bytes with one access. Contents are copied once: a target that rewrites them at the same time spoils only
    its own records.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kineto_agent.protocol import arena, wire
from kineto_agent.protocol.records import GRAPH_NODES_FORMAT, STEP_MARKS_FORMAT
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.atomic_files import is_full
from kineto_trace.base.quantities import format_size
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import FORMAT as FILE_FORMAT
from kineto_trace.spool.raw_records import RawWriter

from kinetod.base.safe_text import clean

log = logging.getLogger(__name__)

_NO_ACTIVITIES = (STEP_MARKS_FORMAT, GRAPH_NODES_FORMAT)
MAX_SOURCES = 8
_MAX_LOSSES = 256  # periods in which records were dropped; the last one absorbs the rest
_SOURCE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
MAX_BUFFERS = 1 << 16
MAX_BUFFER_BYTES = 64 << 20  # of one buffer; the largest has 4 MiB
_PIECE_BYTES = 4 << 20  # of strings, and of the memory kept for the next read
MAX_STRINGS_BYTES = 1 << 30
_F_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)
_SIZE_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK | F_SEAL_GROW
_INT64_MAX = 2**63 - 1
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_FREE = struct.pack("=I", arena.FREE)
_MAX_WAY_CHARS = 200


class BadArena(Exception):
    """The memory that a target passed is not a valid arena; the message says why."""


class ArenaSink(Protocol):
    """Receives the contents; implemented by `kineto_trace.spool.raw_records.RawWriter`."""

    def append_buffer(self, data: memoryview, *, sequence: int, records: int) -> None:
        """Takes one buffer of records."""

    def append_strings(self, data: memoryview) -> None:
        """Takes the next part of the string table."""


@dataclass(frozen=True, slots=True)
class ArenaCounts:
    """The source's counts so far."""

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
    """One arena. Not thread-safe; `close` frees the descriptor. Its methods raise BadArena if the target spoiled it."""

    def __init__(self, fd: int, *, max_buffer_bytes: int) -> None:
        """Checks the arena; takes ownership of `fd`. Raises BadArena; `max_buffer_bytes` limits all its buffers
        together.
        """
        self._fd = fd
        self._piece = bytearray()
        try:
            self._geometry(_checked_size(fd), max_buffer_bytes)
        except BadArena:
            self.close()
            raise
        self._fence = threading.Lock()
        self._strings_copied = 0
        self._next_sequence = 0
        self.copied_bytes = 0  # of records

    def _geometry(self, size: int, max_buffer_bytes: int) -> None:
        header = self._contents(0, arena.FIXED.size)
        fields: dict[str, Any] = dict(zip(arena.FIXED_FIELDS, arena.FIXED.unpack(header), strict=True))
        count: int = fields["buffer_count"]
        buffer_bytes: int = fields["buffer_bytes"]
        self._descriptors: int = fields["descriptors_offset"]
        self._strings: int = fields["strings_offset"]
        self._strings_bytes: int = fields["strings_bytes"]
        self._buffers: int = fields["buffers_offset"]
        self._buffer_bytes, self._count = buffer_bytes, count
        descriptors_end = self._descriptors + count * arena.DESCRIPTOR_BYTES
        checks = (
            (fields["magic"] == arena.MAGIC, "its magic number is wrong"),
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
        """The cumulative counters in the header; bytes are those copied, since they count for the user's share of the
        store.
        """
        claimed = self._word(arena.VALID_BYTES)
        return ArenaCounts(self._word(arena.RECORDS), min(claimed, self.copied_bytes), self._word(arena.DROPPED))

    def record_bytes(self) -> Mapping[int, int]:
        """Observed size of one record by activity kind."""
        sizes = self._contents(arena.RECORD_BYTES, 4 * arena.RECORD_KINDS).cast("I").tolist()
        return {kind: size for kind, size in enumerate(sizes) if size}

    def clocks(self) -> list[list[int]]:
        """The two clock samples described in kineto_agent.protocol.arena; empty if the source provides none."""
        samples = [[self._word(at + 8 * each) for each in range(3)] for at in (arena.CLOCKS_FIRST, arena.CLOCKS_LAST)]
        return samples if all(sample[0] for sample in samples) else []

    def drain(self, sink: ArenaSink, *, target_is_dead: bool = False, max_bytes: int = _INT64_MAX) -> int:
        """Copies READY buffers (of a dead target also COMPLETED ones); returns the bytes copied.

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
            self._free(entry.index)
        return copied

    def _free(self, index: int) -> None:
        try:
            os.pwrite(self._fd, _FREE, self._descriptors + index * arena.DESCRIPTOR_BYTES + arena.STATE)
        except OSError as exc:
            raise BadArena(f"a buffer cannot be returned to the process: {exc.strerror}") from exc

    def _ready(self, target_is_dead: bool) -> list[_Ready]:
        size = self._count * arena.DESCRIPTOR_BYTES
        words = arena.DESCRIPTOR_BYTES // 4
        states = self._contents(self._descriptors, size).cast("I")[arena.STATE // 4 :: words].tolist()
        with self._fence:
            pass
        descriptors = self._contents(self._descriptors, size).cast("Q")
        ready = sorted(
            (self._entry(descriptors, index, None) for index, state in enumerate(states) if state == arena.READY),
            key=lambda entry: entry.sequence,
        )
        if target_is_dead:
            following = max((entry.sequence + 1 for entry in ready), default=self._next_sequence)
            completed = [index for index, state in enumerate(states) if state == arena.COMPLETED]
            ready += [self._entry(descriptors, index, following + place) for place, index in enumerate(completed)]
        return ready

    def _entry(self, descriptors: memoryview, index: int, sequence: int | None) -> _Ready:
        at = index * arena.DESCRIPTOR_BYTES
        valid = min(descriptors[(at + arena.BUFFER_VALID_BYTES) // 8], self._buffer_bytes)
        records = min(descriptors[(at + arena.BUFFER_RECORDS) // 8], valid)
        own = min(descriptors[(at + arena.BUFFER_SEQUENCE) // 8], _INT64_MAX - 1)
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
        piece = self._piece
        if len(piece) < size:  # a large one is freed: a user may have thousands of arenas
            piece = bytearray(size)
            self._piece = piece if size <= _PIECE_BYTES else self._piece
        view = memoryview(piece)[:size]
        done = 0
        while done < size:
            try:
                got = os.preadv(self._fd, [view[done:]], start + done)
            except OSError as exc:
                raise BadArena(f"it cannot be read: {exc.strerror}") from exc
            if not got:
                raise BadArena("it ends prematurely")
            done += got
        return view

    def _word(self, offset: int) -> int:
        value: int = self._contents(offset, 8).cast("Q")[0]
        return min(value, _INT64_MAX)

    def close(self) -> None:
        """Closes the descriptor. Safe to call twice."""
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
    if os.fstatvfs(fd).f_bsize != _PAGE_BYTES:
        raise BadArena("it has huge pages (MFD_HUGETLB)")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise BadArena("it is not open for reading and writing")
    size = os.fstat(fd).st_size
    if size < arena.HEADER_BYTES:
        raise BadArena(f"it has only {size} bytes")
    return size


def noted_ways(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Each source's description of how it records, from its untrusted metadata. Silent sources are left out."""
    ways = {source: part.get("way") for source, part in metadata.items()}
    return {source: clean(way, _MAX_WAY_CHARS) for source, way in ways.items() if isinstance(way, str) and way}


def stored_bytes(target: pb.Target) -> int:
    """Bytes that a target of a running capture takes on disk: its files, or its records before they are decoded."""
    return sum(file.size_bytes for file in target.files) or sum(counts.bytes for counts in target.counts)


def made_records(target: pb.Target) -> int:
    """All records of a target, as clients see them."""
    return sum(counts.records for counts in target.counts)


def source_counts(counts: Mapping[str, ArenaCounts], ways: Mapping[str, str]) -> list[pb.SourceCounts]:
    """One entry for each source with an arena."""
    return [
        pb.SourceCounts(
            source=name, records=each.records, bytes=each.bytes, dropped=each.dropped, way=ways.get(name, "")
        )
        for name, each in counts.items()
    ]


class DiskFull(Exception):
    """Nothing more may be written; the message says why."""


class StoreLost(DiskFull):
    """Nothing can be written, for a reason other than a full disk."""


class ShareUsed(DiskFull):
    """The user may store nothing more; the message says why."""


class TraceLimit(Exception):
    """The target's share of the disk is used up."""


@dataclass(slots=True)
class _Source:
    format: str
    reader: ArenaReader
    writer: RawWriter
    counts: ArenaCounts
    counted_ns: int  # Unix time of these counts
    broken: bool = False  # a write failed in the middle: later data would be unreadable
    losing_ns: list[list[int]] = field(default_factory=list)  # start and end of periods in which records were dropped

    def count(self) -> None:
        """Updates the counts."""
        dropped, before_ns = self.counts.dropped, self.counted_ns
        self.counts, self.counted_ns = self.reader.counts(), time.time_ns()
        if self.counts.dropped == dropped:
            return
        goes_on = self.losing_ns and self.losing_ns[-1][1] >= before_ns
        if goes_on or len(self.losing_ns) >= _MAX_LOSSES:
            self.losing_ns[-1][1] = self.counted_ns
        else:
            self.losing_ns.append([before_ns, self.counted_ns])


class Spool:
    """Drains the arenas of one target into its folder."""

    def __init__(
        self,
        directory: Path,
        *,
        buffer_limit_bytes: int,
        max_trace_bytes: int,
        min_free_bytes: int,
        free_bytes: Callable[[], int],
        check_share: Callable[[], None] = lambda: None,
    ) -> None:
        """check_share raises ShareUsed once the user's share is used up."""
        self.directory = directory
        self._buffer_limit_bytes = buffer_limit_bytes
        self._max_trace_bytes = max_trace_bytes
        self._min_free_bytes = min_free_bytes
        self._free_bytes = free_bytes
        self._check_share = check_share
        self._sources: dict[str, _Source] = {}
        self._busy = threading.Lock()  # while descriptors are read

    def open(self, arena: wire.Arena, fd: int) -> None:
        """Opens a source's arena and creates its folder; takes ownership of `fd`. Raises BadArena, DiskFull."""
        problem = self._problem(arena)
        if problem:
            os.close(fd)
            raise BadArena(problem)
        # Sources round their buffers up, and a source may have a small pool beside the large one.
        reader = ArenaReader(fd, max_buffer_bytes=2 * self._buffer_limit_bytes + (64 << 20))
        try:
            writer = RawWriter(
                self.directory / "raw" / arena.source,
                source=arena.source,
                format=clean(arena.format, 64),
                metadata=arena.metadata,
            )
        except OSError as exc:
            reader.close()
            raise disk_error(exc, self.directory) from exc
        self._sources[arena.source] = _Source(arena.format, reader, writer, reader.counts(), time.time_ns())

    def _problem(self, arena: wire.Arena) -> str:
        if not _SOURCE_NAME.fullmatch(arena.source):
            return f"the source name {arena.source!r:.40} is not allowed"
        if arena.source in self._sources:
            return f"the source {arena.source} was announced twice"
        return "too many sources" if len(self._sources) >= MAX_SOURCES else ""

    def write_info(self, info: TargetInfo) -> None:
        """Replaces target.json. Raises DiskFull."""
        try:
            info.write(self.directory)
        except OSError as exc:
            raise disk_error(exc, self.directory) from exc

    def drain(self, *, target_is_dead: bool = False, last: bool = False) -> None:
        """Copies READY buffers; `last`: without a disk reserve. Raises DiskFull, TraceLimit, ShareUsed, BadArena."""
        with self._busy:
            self._drain(target_is_dead, last)

    def _drain(self, target_is_dead: bool, last: bool) -> None:
        if not last:
            self._check_share()
        for source in self._sources.values():
            if source.broken:
                continue
            rest = self._max_trace_bytes - self.bytes_written()
            if rest <= 0:
                raise TraceLimit
            if not last and self._min_free_bytes:
                rest = min(rest, self._room())
            try:
                source.reader.drain(source.writer, target_is_dead=target_is_dead, max_bytes=rest)
            except OSError as exc:
                source.broken = True
                raise disk_error(exc, self.directory) from exc
            except BadArena:
                source.broken = True
                raise
            finally:
                source.count()

    def _room(self) -> int:
        """Bytes that may be written before the disk reserve is reached. Raises DiskFull, StoreLost."""
        try:
            room = self._free_bytes() - self._min_free_bytes
        except OSError as exc:
            raise disk_error(exc, self.directory) from exc
        if room <= 0:
            raise DiskFull(
                f"less than {format_size(self._min_free_bytes)} is free on the disk of {self.directory} "
                "(kinetod --min-free-bytes)"
            )
        return room

    def finish(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Makes the spool durable; `metadata` by source, from the agent's Result. Raises DiskFull, BadArena."""
        with self._busy:
            self._finish(metadata)

    def _finish(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        for name, source in self._sources.items():
            clocks = source.reader.clocks()  # others are in the source's own metadata
            try:
                source.writer.finish(
                    metadata={
                        **metadata.get(name, {}),
                        **({"clocks": clocks} if clocks else {}),
                        "losing_ns": source.losing_ns,
                    },
                    record_bytes=source.reader.record_bytes(),
                    records=source.counts.records,
                    dropped=source.counts.dropped,
                )
            except OSError as exc:
                raise disk_error(exc, self.directory) from exc

    def counts(self) -> dict[str, ArenaCounts]:
        """Record counts by source."""
        return {name: source.counts for name, source in self._sources.items()}

    def dropped_records(self) -> int:
        """Records dropped by all sources except file sources, whose losses the conversion reports."""
        return sum(each.counts.dropped for each in self._sources.values() if each.format != FILE_FORMAT)

    def bytes_written(self) -> int:
        """Bytes written for all sources."""
        return sum(source.writer.bytes_written for source in self._sources.values())

    def copied_bytes(self) -> int:
        """Bytes of activities copied from all sources; iterations and captured graphs do not count by themselves."""
        return sum(each.reader.copied_bytes for each in self._sources.values() if each.format not in _NO_ACTIVITIES)

    def close(self) -> None:
        """Closes everything; the files remain."""
        if not self._busy.acquire(blocking=False):
            return  # a thread still copies as the daemon ends: the number it uses must not be reused for another file
        for source in self._sources.values():
            source.reader.close()
            with contextlib.suppress(OSError):
                source.writer.close()


def disk_error(exc: OSError, directory: Path) -> DiskFull:
    """Translates a failed write into a target's folder."""
    if is_full(exc) or exc.errno == errno.EFBIG:
        return DiskFull(f"the disk is full: {directory}")
    return StoreLost(f"writing failed ({exc.strerror}): {directory}")
