"""The GPU's part of HTA's critical path graph (hta_critical_path.py), by HTA's rules for waits.

Theory of operation
    HTA goes through GPU rows one by one and remembers the last activity of each stream and which activity has to wait
    for which. With the rows sorted, the last activity of a stream before a row is found by a search; a wait counts for
    the next launch of its thread and stream, if the row of the wait comes before the activity's; if there are several
    waits for one activity, the last one counts.

    Streams of several devices with one number are one stream, as in HTA. Rows are sorted as pandas sorts one column: by
    numpy's unstable sort, so that rows with equal times come in the same order as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Ints
from kineto_trace.compat.hta_frame import KIND, HtaError, HtaFrame
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.structure.dependency_graph import (
    KERNEL_DELAY,
    KERNEL_DELAY_LIMIT_NS,
    LAUNCH_DELAY,
    OPERATOR,
    SYNC,
    LatestEnds,
)

LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "runFunction - job_prep_and_submit_for_execution",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipMemsetAsync",
    "hipMemcpyAsync",
    "hipMemcpyWithStream",
)
NO_QUEUE = -1
_STREAM_BITS = 24
_EVENT_SYNC, _STREAM_WAIT, _STREAM_SYNC, _CONTEXT_SYNC = (
    "Event Sync",
    "Stream Wait Event",
    "Stream Sync",
    "Context Sync",
)


@dataclass(frozen=True, slots=True)
class Clipped:
    """HTA's frame in the order of the file, and which rows are in the window. Times in Unix ns.

    start_node, end_node: of each row, or NOTHING. The nodes are numbered by time.
    """

    frame: HtaFrame
    inside: Flags
    start_node: Ints
    end_node: Ints
    node_time: Ints
    node_event: Ints
    node_starts: Flags


def _is(strings: Sequence[str], column: AnyArray, *names: str) -> Flags:
    numbers = [number for number, text in enumerate(strings) if text in names]
    found: Flags = np.isin(column, np.array(numbers, np.int64))
    return found


def launches(strings: Sequence[str], frame: HtaFrame) -> Flags:
    """Returns the calls that HTA takes for launches: of these names, and with a GPU row."""
    found: Flags = _is(strings, frame.name, *LAUNCHES) & (frame.link != NOTHING) & ~frame.links_to_first()
    return found


def queue_lengths(strings: Sequence[str], frame: HtaFrame) -> Ints:
    """Returns for each launch and GPU row how many activities its stream's queue holds; NO_QUEUE if unknown."""
    on_gpu = frame.stream != NOTHING
    calls = np.flatnonzero(launches(strings, frame))
    calls = calls[on_gpu[frame.link[calls]]]
    gpus = np.flatnonzero(on_gpu)
    gpus = gpus[np.isin(frame.correlation[gpus], frame.correlation[calls])]
    rows = np.concatenate([calls, gpus])
    change = np.repeat([1, -1], [len(calls), len(gpus)])
    stream = np.concatenate([frame.stream[frame.link[calls]], frame.stream[gpus]])
    order = frame.order(frame.start[rows])
    order = order[np.argsort(stream[order], kind="stable")]
    total = np.cumsum(change[order])
    begins = np.ones(len(order), np.bool_)
    begins[1:] = stream[order][1:] != stream[order][:-1]
    before = np.concatenate([[0], total])[:-1][begins] if len(order) else np.empty(0, np.int64)
    lengths = np.full(len(frame), NO_QUEUE, np.int64)
    if len(order):
        lengths[rows[order]] = total - before[np.cumsum(begins) - 1]
    return lengths


def _sync_columns(trace: Trace, frame: HtaFrame) -> tuple[Ints, Ints]:
    """Returns (wait_on_stream, wait_on_correlation) of each row; -1 for none."""
    stream, correlation = np.full(len(frame), NOTHING), np.full(len(frame), NOTHING)
    table = trace.table("cuda_sync")
    rows = np.flatnonzero(frame.kind == KIND["cuda_sync"])
    stream[rows] = table["wait_on_stream"][frame.row[rows]]
    correlation[rows] = table["wait_on_correlation"][frame.row[rows]]
    return stream, correlation


class _Waits:
    """The activity (row) that each synchronisation waits for, and the activity that waits."""

    def __init__(self, trace: Trace, frame: HtaFrame) -> None:
        strings = trace.strings
        self._frame = frame
        calls = np.flatnonzero(launches(strings, frame))
        calls = calls[frame.stream[frame.link[calls]] != NOTHING]
        activity = frame.link[calls]
        self._calls, self._queue = calls, frame.pid[activity] << 32 | frame.stream[activity]
        self._wait_stream, self._wait_correlation = _sync_columns(trace, frame)
        self._records = np.flatnonzero(_is(strings, frame.name, "cudaEventRecord"))
        self._waiting = _is(strings, frame.name, "cudaStreamWaitEvent")

    def sources(self, rows: Ints) -> Ints:
        """Returns for each synchronisation with an event the last activity launched before the event's record."""
        frame = self._frame
        record = np.full(len(rows), NOTHING)
        known = self._wait_correlation[rows] >= 0
        if len(self._records):
            order = self._records[np.argsort(frame.correlation[self._records], kind="stable")]
            at = np.searchsorted(frame.correlation[order], self._wait_correlation[rows])
            found = order[np.minimum(at, len(order) - 1)]
            record = np.where(known & (frame.correlation[found] == self._wait_correlation[rows]), found, NOTHING)
        # the stream of a record is the one that any synchronisation with it states
        told = np.flatnonzero(self._wait_stream > NOTHING)
        stream, device = np.full(len(rows), NOTHING), np.full(len(rows), NOTHING)
        if len(told):
            order = told[np.argsort(self._wait_correlation[told], kind="stable")]
            at = np.minimum(
                np.searchsorted(self._wait_correlation[order], self._wait_correlation[rows]), len(order) - 1
            )
            same = self._wait_correlation[order[at]] == self._wait_correlation[rows]
            stream = np.where(same, self._wait_stream[order[at]], NOTHING)
            device = np.where(same, frame.pid[order[at]], NOTHING)
        latest = LatestEnds(self._queue, frame.start[self._calls], self._calls)
        call = latest.latest(device << 32 | np.maximum(stream, 0), frame.start[record])
        call = np.where((record >= 0) & (stream >= 0), call, NOTHING)
        return np.where(call >= 0, frame.link[call], NOTHING)

    def targets(self, rows: Ints) -> Ints:
        """Returns for each wait of a stream the activity that its thread launched on the stream next."""
        frame = self._frame
        call = frame.link[rows]
        usable = (call >= 0) & self._waiting[call]
        own = frame.tid[self._calls] << _STREAM_BITS | frame.stream[frame.link[self._calls]]
        wanted = frame.tid[call] << _STREAM_BITS | frame.stream[rows]
        following = LatestEnds(own, -frame.start[self._calls], self._calls).latest(wanted, -frame.start[call])
        following = np.where(usable, following, NOTHING)
        return np.where(following >= 0, frame.link[following], NOTHING)


def _sorted(frame: HtaFrame, rows: Ints, is_sync: Flags) -> Ints:
    """Sorts activities by start, synchronisations by end; as in pandas, ties depend on the type of the times."""
    if not is_sync.any():
        return frame.order(frame.start[rows])
    return np.argsort(np.where(is_sync, frame.end[rows], frame.start[rows]).astype(np.float64), kind="quicksort")


def gpu_edges(context: Context, clipped: Clipped) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Returns the edges in HTA's order: first node, last node, type, weight (ns), event whose time it is. Raises
    HtaError.
    """
    trace, frame = context.trace, clipped.frame
    strings = trace.strings
    is_sync = frame.exact & (frame.kind == KIND["cuda_sync"])
    rows = clipped.inside & ((frame.stream != NOTHING) | _is(strings, frame.name, _EVENT_SYNC, _CONTEXT_SYNC))
    rows = np.flatnonzero(rows & ((frame.correlation >= 0) | (frame.link != NOTHING)))
    rows = rows[_sorted(frame, rows, is_sync[rows])]
    place = np.arange(len(rows))
    waits = _Waits(trace, frame)
    parts = [_sync_edges(strings, clipped, rows, waits), _activity_edges(strings, clipped, rows, place, waits)]
    order_of, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(order_of, kind="stable")
    first, last, type_, weight, event = (column[order] for column in columns)
    return first, last, type_, weight, event


_SLOTS = 1 << 20  # streams: more than any trace has


def _last_on_stream(frame: HtaFrame, rows: Ints, activity: Flags) -> LatestEnds:
    places = np.flatnonzero(activity)
    return LatestEnds(frame.stream[rows[places]], places, rows[places])


def _sync_edges(
    strings: Sequence[str], clipped: Clipped, rows: Ints, waits: _Waits
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    frame = clipped.frame
    is_sync = frame.exact[rows] & (frame.kind[rows] == KIND["cuda_sync"])
    last = _last_on_stream(frame, rows, ~is_sync)
    found: list[tuple[Ints, Ints, Ints]] = []  # order, source row, row of the synchronisation

    one = np.flatnonzero(is_sync & _is(strings, frame.name[rows], _STREAM_SYNC))
    found.append((one * _SLOTS, last.latest(frame.stream[rows[one]], one), rows[one]))
    whole = np.flatnonzero(is_sync & _is(strings, frame.name[rows], _CONTEXT_SYNC))
    streams, first = np.unique(frame.stream[rows[~is_sync]], return_index=True)
    for rank, stream in enumerate(streams[np.argsort(first)].tolist()):
        source = last.latest(np.full(len(whole), stream), whole)
        found.append((whole * _SLOTS + rank, source, rows[whole]))
    event = np.flatnonzero(is_sync & _is(strings, frame.name[rows], _EVENT_SYNC))
    found.append((event * _SLOTS, waits.sources(rows[event]), rows[event]))

    order, source, row = (np.concatenate(column) for column in zip(*found, strict=True))
    call = frame.link[row]
    use = (source >= 0) & (call >= 0)
    order, source, call = order[use], source[use], call[use]
    use = (clipped.end_node[source] != NOTHING) & (clipped.end_node[call] != NOTHING)
    order, first_node, last_node = order[use], clipped.end_node[source[use]], clipped.end_node[call[use]]
    zero, nobody = np.zeros(len(order), np.int64), np.full(len(order), NOTHING)
    return order, first_node, last_node, np.full(len(order), SYNC), zero, nobody


def _waited_for(clipped: Clipped, strings: Sequence[str], rows: Ints, waits: _Waits) -> Ints:
    """Returns for each row the activity that it has to wait for; of several waits before it, the last one counts."""
    frame = clipped.frame
    source_of = np.full(len(frame), NOTHING)
    at = np.full(len(frame), NOTHING)
    place = np.full(len(frame), NOTHING)
    place[rows] = np.arange(len(rows))
    is_wait = frame.exact[rows] & (frame.kind[rows] == KIND["cuda_sync"]) & _is(strings, frame.name[rows], _STREAM_WAIT)
    waiting = np.flatnonzero(is_wait)
    source, target = waits.sources(rows[waiting]), waits.targets(rows[waiting])
    use = (source >= 0) & (target >= 0)
    use &= np.where(target >= 0, place[target], NOTHING) > waiting
    source_of[target[use]], at[target[use]] = source[use], waiting[use]
    return source_of[rows]


def _activity_edges(
    strings: Sequence[str], clipped: Clipped, rows: Ints, place: Ints, waits: _Waits
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    frame, time = clipped.frame, clipped.node_time
    activity = ~frame.exact[rows] | (frame.kind[rows] != KIND["cuda_sync"])
    lengths = queue_lengths(strings, frame)
    source = _waited_for(clipped, strings, rows, waits)[activity]
    previous = _last_on_stream(frame, rows, activity).latest(frame.stream[rows[activity]], place[activity] - 1)
    rows, place = rows[activity], place[activity]
    start, end = clipped.start_node[rows], clipped.end_node[rows]
    waited = np.where(source >= 0, clipped.end_node[source], NOTHING)
    last_end = np.where(previous >= 0, clipped.end_node[previous], NOTHING)
    call = frame.link[rows]
    called = np.where(call >= 0, frame.start[call], np.iinfo(np.int64).max)
    empty = (call >= 0) & (lengths[rows] == 0) & (np.where(call >= 0, lengths[call], NO_QUEUE) == 1)
    empty &= (last_end < 0) | (time[last_end] < called)
    empty &= (waited < 0) | (time[waited] < called)
    if (clipped.start_node[call[empty]] < 0).any():
        raise HtaError("a call that launched a kernel is not in its graph")
    delayed = ~empty & (last_end >= 0) & (time[start] - time[last_end] < KERNEL_DELAY_LIMIT_NS)
    delayed &= (waited < 0) | (time[waited] < time[last_end])
    synced = waited >= 0

    def part(
        slot: int, chosen: Flags, first: Ints, last: Ints, type_: int, event: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        first, last = first[chosen], last[chosen]
        weight = np.zeros(len(first), np.int64) if type_ == SYNC else time[last] - time[first]
        return place[chosen] * _SLOTS + slot, first, last, np.full(len(first), type_), weight, event[chosen]

    nobody = np.full(len(rows), NOTHING)
    launch_start = np.where(call >= 0, clipped.start_node[call], NOTHING)
    parts = [
        part(0, np.ones(len(rows), np.bool_), start, end, OPERATOR, rows),
        part(1, synced, waited, start, SYNC, nobody),
        part(2, empty, launch_start, start, LAUNCH_DELAY, nobody),
        part(2, delayed, last_end, start, KERNEL_DELAY, previous),
    ]
    order, first, last, type_, weight, event = (np.concatenate(column) for column in zip(*parts, strict=True))
    return order, first, last, type_, weight, event
