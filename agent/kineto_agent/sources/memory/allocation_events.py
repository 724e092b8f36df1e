"""Records the actions of torch's CUDA allocator within the window.

They are taken from the history of allocations (allocator_history.py) when the recording stops. Sizes are as requested
by the program. The totals at that time are metadata; earlier totals follow from the records. CPU allocations cannot be
recorded: torch reports them only to profilers on the allocating thread.
"""

import time
from typing import Any, Dict, FrozenSet, List, Tuple

from kineto_agent.protocol.records import (
    MEMORY_ALLOCATED,
    MEMORY_EVENT,
    MEMORY_EVENTS_FORMAT,
    MEMORY_FREED,
    MEMORY_OUT_OF_MEMORY,
    MEMORY_RELEASED,
    MEMORY_RESERVED,
)
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_agent.sources.interface import SourceCounts, SourceOutcome, SourceRequest
from kineto_agent.sources.memory.allocator_history import (
    MAX_ENTRIES,
    AllocatorSnapshot,
    find_torch,
    history,
    usable_torch,
)

ACTIVITY_TYPE = "cpu_instant_event"
_BUFFER_BYTES = 1 << 20
_ACTIONS = {
    "alloc": MEMORY_ALLOCATED,
    "free_requested": MEMORY_FREED,  # as in Kineto: later the block may merely be reused
    "segment_alloc": MEMORY_RESERVED,
    "segment_map": MEMORY_RESERVED,
    "segment_free": MEMORY_RELEASED,
    "segment_unmap": MEMORY_RELEASED,
    "oom": MEMORY_OUT_OF_MEMORY,
}
_U64 = (1 << 64) - 1
ONLY_CUDA = "[memory] events cover CUDA only: torch reports CPU allocations only to profilers on the allocating thread"


class MemoryEventsSource:
    """Allocations and frees of torch's CUDA allocator."""

    name = "memory_events"
    on_request: FrozenSet[str] = frozenset((ACTIVITY_TYPE,))

    def activity_types(self) -> List[str]:
        """Offered with torch; prepare() says what is missing in this process."""
        return [] if find_torch() is None else [ACTIVITY_TYPE]

    def would_yield(self, request: SourceRequest) -> bool:
        """False: it does not use torch's profiler."""
        return False

    def prepare(self, request: SourceRequest) -> "MemoryEventsSession":
        """Make the arena. Raises SourceError."""
        torch = usable_torch("history of allocations")
        return MemoryEventsSession(torch, ArenaWriter(self.name, request.buffer_limit_bytes, 0, _BUFFER_BYTES))


class MemoryEventsSession:
    """One recording."""

    format = MEMORY_EVENTS_FORMAT
    yields = False

    def __init__(self, torch: Any, writer: ArenaWriter) -> None:
        self.metadata: Dict[str, Any] = {"max_entries": MAX_ENTRIES}
        self.arena_fd = writer.fd
        self._writer = writer
        self._torch = torch
        self._begun = False
        self._start_ns = 0

    def start(self) -> None:
        """Begin the history. Raises SourceError."""
        history.begin(self._torch, with_stack=False)
        self._begun = True
        self._start_ns = time.time_ns()

    def counts(self) -> SourceCounts:
        """Records so far: none before the end."""
        return self._writer.counts()

    def stop(self) -> SourceOutcome:
        """Write the history as records. Raises SourceError if torch returns none."""
        began_ns = time.thread_time_ns()
        try:
            snapshot = history.snapshot()
            warnings = [ONLY_CUDA, *history.told()]
            for device, trace in enumerate(snapshot.value.get("device_traces", [])):
                self._write(device, trace)
                if device in snapshot.full:
                    text = (
                        "device %d: more than %d allocations and frees in the window; only the last ones are recorded"
                    )
                    warnings.append(text % (device, MAX_ENTRIES))
            metadata = {"totals": _totals(snapshot), "took_ns": snapshot.took_ns}
        finally:
            self._end()
        self._writer.finish()
        cpu_ns = time.thread_time_ns() - began_ns
        return SourceOutcome(self.counts(), metadata, warnings, detach_ns=0, cpu_ns=cpu_ns)

    def _write(self, device: int, trace: List[Dict[str, Any]]) -> None:
        append, layout, since_us = self._writer.append, MEMORY_EVENT, self._start_ns // 1000
        for entry in trace:
            action = _ACTIONS.get(entry["action"])
            time_us = entry.get("time_us", 0)
            if action is not None and time_us >= since_us:
                address = entry.get("addr", 0) & _U64
                append(layout, time_us * 1000, address, entry["size"], entry["stream"] & _U64, device, action)

    def give_way(self) -> None:
        """Do nothing: it runs beside the program's own profiler."""

    def close(self) -> None:
        """Free the arena."""
        self._end()
        self._writer.close()

    def _end(self) -> None:
        if self._begun:
            self._begun = False
            history.end()


def _totals(snapshot: AllocatorSnapshot) -> Dict[str, Tuple[int, int]]:
    """Bytes held by the program (as requested) and bytes held by the allocator, by device."""
    totals: Dict[str, Tuple[int, int]] = {}
    for segment in snapshot.value.get("segments", []):
        device = str(segment["device"])
        blocks = segment["blocks"]
        held = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
        allocated, reserved = totals.get(device, (0, 0))
        totals[device] = (allocated + held, reserved + segment["total_size"])
    return totals
