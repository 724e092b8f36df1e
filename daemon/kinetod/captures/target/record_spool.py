"""Writes the raw records of one target to disk. Methods block; call one at a time, from any thread."""

import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kineto_agent.protocol import wire
from kineto_agent.protocol.records import GRAPH_NODES_FORMAT, STEP_MARKS_FORMAT
from kineto_trace.base.atomic_files import is_full
from kineto_trace.base.quantities import format_size
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import FORMAT as FILE_FORMAT
from kineto_trace.spool.raw_records import RawWriter

from kinetod.base.safe_text import clean
from kinetod.captures.target.arena_reader import ArenaCounts, ArenaReader, BadArena

log = logging.getLogger(__name__)

_NO_ACTIVITIES = (STEP_MARKS_FORMAT, GRAPH_NODES_FORMAT)
MAX_SOURCES = 8
_MAX_LOSSES = 256  # periods in which records were dropped; the last one absorbs the rest
_SOURCE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


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
