"""torch's history of CUDA allocations: switched on for our recordings, never touched if it is the program's.

Theory of operation
    torch's caching allocator can record its actions (torch.cuda.memory._record_memory_history) and return all of it at
    once (_snapshot: segments, blocks, and the last `max_entries` actions of each device). A process has one such
    recording. If the program has switched it on, ours only takes snapshots. If the program switches it on or off while
    ours runs (torch's two entry points are wrapped during that time), it belongs to the program from then on.

    A snapshot is made with the GIL held, in time proportional to the number of entries: hence MAX_ENTRIES. Garbage
    collection is paused for that, since it would traverse all the new objects repeatedly. Snapshots are freed in
    slices, so that the program gets the GIL in between. `AllocatorSnapshot.took_ns` says how long a snapshot took.

    Stacks of the allocations cost 2 us each: only with option with_stack, and only Python's.

    Times of the entries are Unix microseconds: the allocator reads the time-stamp counter, and torch converts it when
    the snapshot is made (c10::ApproximateClockToUnixTimeConverter, linear between the loading of torch and now), then
    truncates it to whole microseconds. That is the error, plus any slew of the wall clock in between.
"""

import gc
import pickle
import sys
import time
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

from kineto_agent.protocol.records import (
    FILE_FORMAT,
    MEMORY_ALLOCATED,
    MEMORY_EVENT,
    MEMORY_EVENTS_FORMAT,
    MEMORY_FREED,
    MEMORY_OUT_OF_MEMORY,
    MEMORY_RELEASED,
    MEMORY_RESERVED,
)
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_agent.sources.file_arena import FileArena
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.system.debuglog import log_exception

MAX_ENTRIES = 20_000  # per device: 11 ms (17 with stacks) in which the program does not get the GIL
_WRAPPED = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
_SLICE = 500  # objects freed at once: well below a millisecond


class AllocatorSnapshot(NamedTuple):
    """torch's snapshot. value: torch's dictionary, which History.end frees."""

    value: Dict[str, Any]
    took_ns: int  # time torch took; GIL held, except for the first snapshot with stacks
    entries: int
    full: List[int]  # devices whose history has overwritten older entries
    end_ns: int  # Unix ns after its creation


def find_torch() -> Any:
    """torch, if the program has imported it completely; otherwise None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and sys.modules.get("torch.cuda.memory") is not None else None


def usable_torch(what: str) -> Any:
    """torch, if its history of CUDA allocations can be recorded now. Raises SourceError."""
    torch = find_torch()
    if torch is None:
        raise SourceError("NO_TORCH", "torch is not imported in this process, so there is no %s" % what)
    if not torch.version.cuda and not getattr(torch.version, "hip", None):
        text = (
            "this torch (%s) is built without CUDA, and torch reports CPU allocations only on the threads that make "
            "them, so no %s is possible"
        )
        raise SourceError("NO_CUDA", text % (torch.__version__, what))
    if not torch.cuda.is_initialized():
        text = "the program has not used CUDA yet: there is no %s to take; try again once it has"
        raise SourceError("NO_CUDA", text % what)
    if not hasattr(torch._C, "_cuda_isHistoryEnabled") or not hasattr(torch.cuda.memory, "_record_memory_history_impl"):
        text = "torch %s is too old for a %s: only 2.1 and later report whether the program itself is recording"
        raise SourceError("TORCH_TOO_OLD", text % (torch.__version__, what))
    backend = torch._C._cuda_getAllocatorBackend()
    if backend != "native":
        text = "the program uses torch's allocator %r, which keeps no history; a %s needs the native one"
        raise SourceError("NO_CUDA_HISTORY", text % (backend, what))
    return torch


class History:
    """The recording of this process. Its methods belong to the agent's thread."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._users = 0
        self._ours = False
        self._told: List[str] = []  # warnings about the program's own use of it
        self._originals: Dict[str, Callable[..., Any]] = {}
        self._wrappers: Dict[str, Callable[..., Any]] = {}
        self._latest: Optional[AllocatorSnapshot] = None

    @property
    def ours(self) -> bool:
        """Whether we switched it on and the program has not touched it since."""
        return self._ours

    def told(self) -> List[str]:
        """Warnings for the user: how the program itself used the recording."""
        return list(self._told)

    def begin(self, torch: Any, with_stack: bool) -> None:
        """Add a user; switches the history on if necessary. Raises SourceError."""
        if self._users == 0:
            self._latest = None
            self._told = []
            self._torch = torch
            try:
                self._switch_on(with_stack)
            except Exception as exc:  # torch's own errors have many types
                self._unwrap()
                raise SourceError("MEMORY_HISTORY_FAILED", "torch cannot record its allocations: %s" % exc) from exc
        self._users += 1

    def _switch_on(self, with_stack: bool) -> None:
        if self._torch._C._cuda_isHistoryEnabled():
            self._told.append("the program records its allocations itself: its own history was used and left on")
            return
        context = "all" if with_stack else None
        self._torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=MAX_ENTRIES)
        self._ours = True
        self._wrap()

    def snapshot(self) -> AllocatorSnapshot:
        """The snapshot, which all users of one recording share. Raises SourceError."""
        if self._latest is None:
            try:
                self._latest = self._take()
            except Exception as exc:  # torch's own errors have many types
                raise SourceError("MEMORY_SNAPSHOT_FAILED", "torch cannot make a memory snapshot: %s" % exc) from exc
        return self._latest

    def _take(self) -> AllocatorSnapshot:
        collecting = gc.isenabled()
        if collecting:
            gc.disable()
        try:
            before_ns = time.perf_counter_ns()
            value: Dict[str, Any] = self._torch.cuda.memory._snapshot()
            took_ns = time.perf_counter_ns() - before_ns
        finally:
            if collecting:
                gc.enable()
        traces = value.get("device_traces", [])
        full = [device for device, trace in enumerate(traces) if len(trace) >= MAX_ENTRIES]
        return AllocatorSnapshot(value, took_ns, sum(map(len, traces)), full, time.time_ns())

    def end(self) -> None:
        """Remove a user; after the last one the history is switched off if it is ours. Never raises."""
        self._users -= 1
        if self._users > 0:
            return
        self._unwrap()
        if self._ours:
            self._ours = False
            try:
                self._torch.cuda.memory._record_memory_history(None)
            except Exception:  # noqa: BLE001 - nobody can do anything about it
                log_exception("torch's memory history cannot be switched off")
        latest, self._latest = self._latest, None
        if latest is not None:
            _free(latest.value)

    # ------------------------------------------------------------ the program's own calls

    def _wrap(self) -> None:
        module = self._torch._C
        for name in _WRAPPED:
            original = getattr(module, name, None)
            if original is not None:
                self._originals[name] = original
                self._wrappers[name] = self._wrapper(original)
                setattr(module, name, self._wrappers[name])

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def record_memory_history(enabled: Any, *args: Any, **kwargs: Any) -> Any:
            if self._ours:
                self._ours = False
                what = (
                    "on: its own history was used from then on" if enabled else "off: nothing was recorded from then on"
                )
                self._told.append("the program switched the recording of its allocations %s" % what)
            return original(enabled, *args, **kwargs)

        return record_memory_history

    def _unwrap(self) -> None:
        for name, wrapper in self._wrappers.items():
            if getattr(self._torch._C, name, None) is wrapper:
                setattr(self._torch._C, name, self._originals[name])
        self._wrappers.clear()
        self._originals.clear()


def _free(value: Dict[str, Any]) -> None:
    """Free a snapshot slice by slice."""
    for items in [value.get("segments", []), *value.get("device_traces", [])]:
        while items:
            del items[-_SLICE:]
    value.clear()


history = History()


# Records the actions of torch's CUDA allocator within the window.
#
# They are taken from the history of allocations (allocator_history.py) when the recording stops. Sizes are as requested
# by the program. The totals at that time are metadata; earlier totals follow from the records. CPU allocations cannot
# be recorded: torch reports them only to profilers on the allocating thread.
EVENTS_TYPE = "cpu_instant_event"
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
    on_request: FrozenSet[str] = frozenset((EVENTS_TYPE,))

    def activity_types(self) -> List[str]:
        """Offered with torch; prepare() says what is missing in this process."""
        return [] if find_torch() is None else [EVENTS_TYPE]

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


# CUDA memory snapshots: the pickle of torch.cuda.memory._dump_snapshot, as a file beside the trace.
#
# The history of allocations runs from start() on (allocator_history.py). stop() takes the snapshot and pickles it
# straight into the arena, with the pickle protocol of PyTorch's memory visualiser. Pickling releases the GIL every 64
# KiB.
SNAPSHOT_TYPE = "memory_snapshot"
PICKLE_PROTOCOL = 4  # default before Python 3.14; the visualiser in the browser reads no later one
NOTABLE_NS = 50_000_000


class MemorySource:
    """Takes a snapshot of torch's CUDA memory at the end of the window."""

    name = SNAPSHOT_TYPE
    on_request: FrozenSet[str] = frozenset((SNAPSHOT_TYPE,))

    def activity_types(self) -> List[str]:
        """Offered with torch; prepare() says what is missing in this process."""
        return [] if find_torch() is None else [SNAPSHOT_TYPE]

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
        self.metadata: Dict[str, Any] = {"file": SNAPSHOT_TYPE, "max_entries": MAX_ENTRIES}
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
