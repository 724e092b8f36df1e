"""CUDA memory snapshots: the pickle of torch.cuda.memory._dump_snapshot, as a file beside the trace.

The history of allocations runs from start() on (allocator_history.py). stop() takes the snapshot and pickles it
straight into the arena, with the pickle protocol of PyTorch's memory visualiser. Pickling releases the GIL every
64 KiB.
"""

import pickle
import time
from typing import Any, Dict, FrozenSet, List

from kineto_agent.protocol.records import FILE_FORMAT
from kineto_agent.sources.file_arena import FileArena
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.memory.allocator_history import MAX_ENTRIES, find_torch, history, usable_torch

ACTIVITY_TYPE = "memory_snapshot"
PICKLE_PROTOCOL = 4  # default before Python 3.14; the visualiser in the browser reads no later one
NOTABLE_NS = 50_000_000


class MemorySource:
    """Takes a snapshot of torch's CUDA memory at the end of the window."""

    name = ACTIVITY_TYPE
    on_request: FrozenSet[str] = frozenset((ACTIVITY_TYPE,))

    def activity_types(self) -> List[str]:
        """Offered with torch; prepare() says what is missing in this process."""
        return [] if find_torch() is None else [ACTIVITY_TYPE]

    def would_yield(self, request: SourceRequest) -> bool:
        """False: it does not use torch's profiler."""
        return False

    def prepare(self, request: SourceRequest) -> "MemorySession":
        """Make the arena. Raises SourceError."""
        torch = usable_torch("memory snapshot")
        with_stack = bool(request.options.get("with_stack"))
        return MemorySession(torch, with_stack, FileArena(self.name, request.buffer_limit_bytes))


class MemorySession:
    """One recording of allocations and the snapshot at its end."""

    format = FILE_FORMAT
    yields = False

    def __init__(self, torch: Any, with_stack: bool, arena: FileArena) -> None:
        self.metadata: Dict[str, Any] = {"file": ACTIVITY_TYPE, "max_entries": MAX_ENTRIES}
        self.arena_fd = arena.fd
        self._arena = arena
        self._torch = torch
        self._with_stack = with_stack
        self._begun = False

    def start(self) -> None:
        """Begin the history. Raises SourceError."""
        history.begin(self._torch, self._with_stack)
        self._begun = True

    def counts(self) -> SourceCounts:
        """Buffers of the file so far."""
        return self._arena.counts()

    def stop(self) -> SourceOutcome:
        """Take the snapshot. Raises SourceError if torch returns none; then this source delivers nothing."""
        try:
            snapshot = history.snapshot()
            warnings = history.told()
            began_ns = time.thread_time_ns()
            try:
                pickle.Pickler(self._arena, protocol=PICKLE_PROTOCOL).dump(snapshot.value)
            except Exception as exc:  # user metadata in it could be anything
                raise SourceError("MEMORY_SNAPSHOT_FAILED", "the snapshot cannot be pickled: %s" % exc) from exc
            cpu_ns = time.thread_time_ns() - began_ns
        finally:
            self._end()
        self._arena.finish()
        if snapshot.full:
            devices = ", ".join(map(str, snapshot.full))
            text = "device %s: more than %d allocations and frees in the window; the snapshot holds only the last ones"
            warnings.append(text % (devices, MAX_ENTRIES))
        text = "the memory snapshot took %.0f ms, and the program may have waited for it (%d allocations and frees)"
        if snapshot.took_ns >= NOTABLE_NS:
            warnings.append(text % (snapshot.took_ns / 1e6, snapshot.entries))
        metadata = {
            "size_bytes": self._arena.written_bytes + self._arena.lost_bytes,
            "took_ns": snapshot.took_ns,
            "pickle_ns": cpu_ns,
            "entries": snapshot.entries,
            "way": "%d allocations and frees, snapshot made in %.1f ms" % (snapshot.entries, snapshot.took_ns / 1e6),
        }
        return SourceOutcome(self.counts(), metadata, warnings, detach_ns=0, cpu_ns=cpu_ns)

    def give_way(self) -> None:
        """Do nothing: it runs beside the program's own profiler."""

    def close(self) -> None:
        """Free the arena."""
        self._end()
        self._arena.close()

    def _end(self) -> None:
        if self._begun:
            self._begun = False
            history.end()
