"""Limits the memory that the buffers of a capture take in a process, so that they never cause an out-of-memory kill.

Theory of operation
    The buffers are charged to the process and its control groups as they are written, and are not freed before the end.
    Before the agent is asked, `MemoryShare.take` checks what is left below every limit. The buffers may take at most
    half of it and must leave LEAST_LEFT_BYTES, because the program keeps allocating. Memory promised to other captures
    below the same limit counts as used. If the usual buffers do not fit, the buffer limit is halved until they do; if
    the smallest do not fit, the capture is refused, as it is where another budget (budgets.py) is short.

    During the recording, `shortage` checks again, because the program or its neighbours in the group may have grown. It
    ends the collection while there is still room for the records of the next moments, and the buffers are freed.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kineto_agent.protocol import wire
from kineto_trace.base.quantities import format_size

from kinetod.base.errors import VerdictReason
from kinetod.captures.request.capture_spec import MIN_BUFFER_BYTES
from kinetod.captures.result.verdict import Ending, EndState
from kinetod.processes.budgets import MemoryWatch, Room, memory_room, what_is_left

LEAST_LEFT_BYTES = 4 << 20
LOOK_EVERY_S = 0.5
_NEXT_MOMENTS_SHARE, _NEXT_MOMENTS_BYTES = 4, 16 << 20  # of the buffers; a busy source fills some 10 MiB in 0.1 s
_STRINGS_BYTES = 16 << 20  # besides the buffers of a source, at most, and never more than those
# Minimum use of a source, whatever the limit: two buffers, 1 MiB of names, and CUPTI's own.
_LEAST_BYTES = {"cupti": 32 << 20}
_MOST_BYTES = {"python_stacks": 8 << 20}  # 64 buffers of 64 KiB and 4 MiB of names
# torch's own profiler keeps its events in the process until the end: twice the limit, then it is stopped.
_PROFILER_OPTIONS, _PROFILER_SHARE = ("with_flops",), 3
_CALL_OPTIONS = ("stack_trace", "with_modules")  # calls of Python have buffers of their own
_ON_REQUEST = frozenset(("memory_snapshot", "cpu_instant_event"))
_OPTIONS = {"profile_memory": "cpu_instant_event"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedBuffers:
    """The request with buffers that fit and a warning if they shrank, or why not even the smallest fit."""

    request: wire.Start
    size: int = 0  # their maximum size
    warning: str = ""
    refused: Ending | None = None


class Promises:
    """Memory promised to running captures, each below the memory limit that is tightest for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[object, tuple[str, int]] = {}

    def others(self, owner: object, limit: str) -> int:
        """Bytes promised to all other owners below this limit."""
        with self._lock:
            return sum(size for each, (name, size) in self._taken.items() if each is not owner and name == limit)

    def note(self, owner: object, limit: str, size: int) -> None:
        """Replaces the promise to this owner."""
        with self._lock:
            self._taken[owner] = limit, size

    def forget(self, owner: object) -> None:
        """Removes the promise to this owner."""
        with self._lock:
            self._taken.pop(owner, None)


class MemoryShare:
    """The memory that the buffers of one target may take. `take` and `shortage` read a few small files."""

    def __init__(self, promises: Promises, pid: int) -> None:
        self._promises = promises
        self._pid = pid
        self._bytes = 0
        self._watch: MemoryWatch | None = None
        self._look_at = 0.0

    def take(self, request: wire.Start, sources: Mapping[str, Sequence[str]]) -> FittedBuffers:
        """Reserves the buffers before the agent is asked. sources: those in the agent's Hello."""
        found = what_is_left(self._pid, attached=True)
        short = next((each for each in found if each.short), None)
        if short is not None:
            reason = f"process {self._pid} is near a limit: {short.text('a capture')}; {short.room.advice}"
            ending = Ending(EndState.FAILED, VerdictReason.ATTACH_LIMIT, reason)
            return FittedBuffers(request=request, refused=ending)
        rooms = [(each.room, each.room.left - each.needed) for each in found if each.budget.buffers]
        left = [(room, size - self._promises.others(self, room.limit)) for room, size in rooms]
        taken = fit(request, wanted_sources(request, sources), left)
        self._bytes = taken.size
        memory = memory_room(self._pid)
        if memory is not None:
            self._promises.note(self, memory.limit, taken.size)
        self._watch = MemoryWatch(self._pid)
        return taken

    def due(self) -> bool:
        """Whether it is time for another `shortage` check."""
        return self._watch is not None and time.monotonic() >= self._look_at

    def shortage(self) -> Ending | None:
        """Why the collection must end now; None if it need not."""
        assert self._watch is not None
        self._look_at = time.monotonic() + LOOK_EVERY_S
        needed = LEAST_LEFT_BYTES + min(self._bytes // _NEXT_MOMENTS_SHARE, _NEXT_MOMENTS_BYTES)
        room = self._watch.less_than(needed)
        if room is None:
            return None
        reason = (
            f"process {self._pid} was running out of memory, so the capture was ended before the kernel could kill a "
            f"process: {room}; {room.advice}, or request a shorter capture"
        )
        return Ending(EndState.PARTIAL, VerdictReason.MEMORY_SHORT, reason)

    def give_back(self) -> None:
        """Releases the reservation once the buffers are freed."""
        self._promises.forget(self)
        self._watch = None


def wanted_sources(request: wire.Start, offered: Mapping[str, Sequence[str]]) -> list[str]:
    """The sources that this request may start, judging by their activity types."""
    asked = set(request.activity_types) | {kind for option, kind in _OPTIONS.items() if request.options.get(option)}
    found = []
    for name, types in offered.items():
        usual = set(types) - _ON_REQUEST if not request.activity_types else set()
        if usual or asked & set(types):
            found.append(name)
    return found


def needed_bytes(request: wire.Start, sources: Sequence[str], limit_bytes: int) -> int:
    """Upper bound of the memory for the buffers and names of these sources with that buffer limit."""
    size = limit_bytes + min(limit_bytes, _STRINGS_BYTES)
    total = sum(max(min(size, _MOST_BYTES.get(name, size)), _LEAST_BYTES.get(name, 0)) for name in sources)
    profiler = "torch_ops" in sources and any(request.options.get(option) for option in _PROFILER_OPTIONS)
    calls = any(request.options.get(option) for option in _CALL_OPTIONS)
    return total + (_PROFILER_SHARE - 1) * limit_bytes * profiler + size * calls


def _share(left_bytes: int) -> int:
    return min(left_bytes // 2, left_bytes - LEAST_LEFT_BYTES)


def fit(request: wire.Start, sources: Sequence[str], left: Sequence[tuple[Room, int]]) -> FittedBuffers:
    """Chooses buffers that fit. left: each limit with the bytes below it that are not promised to others.

    Promised bytes may never be used, so they make buffers smaller but are no reason to refuse.
    """
    limit = request.buffer_limit_bytes
    if not left:
        return FittedBuffers(request=request, size=needed_bytes(request, sources, limit))
    room, size = min(left, key=lambda each: each[1])
    there = f"{format_size(max(size, 0))} left within {room.limit}"
    while needed_bytes(request, sources, limit) > _share(size) and limit > MIN_BUFFER_BYTES:
        limit = max(limit // 2, MIN_BUFFER_BYTES)
    if needed_bytes(request, sources, limit) > max(_share(size), _share(room.left)):
        least = needed_bytes(request, sources, MIN_BUFFER_BYTES)
        reason = (
            f"there is too little memory for a trace in addition to the program: {room}, but this capture needs "
            f"{format_size(max(2 * least, least + LEAST_LEFT_BYTES))}; {room.advice}"
        )
        return FittedBuffers(request=request, refused=Ending(EndState.FAILED, VerdictReason.NO_MEMORY, reason))
    if limit == request.buffer_limit_bytes:
        return FittedBuffers(request=request, size=needed_bytes(request, sources, limit))
    warning = (
        f"the buffers were reduced from {format_size(request.buffer_limit_bytes)} to {format_size(limit)} for each "
        f"source: {there}; records may be dropped"
    )
    fitted = request._replace(buffer_limit_bytes=limit)
    return FittedBuffers(request=fitted, size=needed_bytes(request, sources, limit), warning=warning)
