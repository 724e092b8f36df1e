"""How much launched work waits in the queue of each stream.

Theory of operation
    A stream's queue grows by one when a call that launches an activity begins, and shrinks by one when that activity
    starts. A graph launch adds all its kernels at once. Activities whose launch is not in the trace are not counted.

    HTA counts only what the calls in HTA_LAUNCHES launched (no graphs), does not tell devices apart, and where a
    launch and a start share a microsecond it takes them in the order of an unstable sort. It fails if calls share a
    correlation; the queues are then the right ones.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NOTHING, exact_events, hta_events
from kineto_trace.arrays.id_sets import is_in
from kineto_trace.compat.hta.hta_frame import HtaError, hta_frame
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES
from kineto_trace.view_api.view import Compat

HTA_LAUNCHES = frozenset(
    (
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
)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Queues:
    """The queue length from each change (Unix ns) on, stream by stream.

    first: where each stream begins. origin_ns: where the trace begins; span_ns: how long it is. uncounted: activities
    without a launch. fault: why HTA has no queues, so that these are the right ones; "": it has, or was not asked.
    """

    time: Ints
    device: Ints
    stream: Ints
    length: Ints
    first: Ints
    origin_ns: int
    span_ns: int
    uncounted: int
    fault: str = ""

    def parts(self) -> list[slice]:
        """The rows of each stream."""
        ends = [*self.first.tolist(), len(self.time)][1:]
        return [slice(low, high) for low, high in zip(self.first.tolist(), ends, strict=True)]


def queues(context: Context, compat: Compat) -> Queues:
    """The queues of all streams; device is -1 in HTA's."""
    if compat is Compat.HTA:
        try:
            return context.get(hta_queues)
        except HtaError as exc:
            return replace(context.get(exact_queues), fault=exc.note)
    return context.get(exact_queues)


def exact_queues(context: Context) -> Queues:
    """By all launches; of an equal time a launch comes first."""
    events = context.get(exact_events)
    rows = np.flatnonzero(events.launch != NOTHING)
    change = np.repeat([1, -1], len(rows))
    time = np.concatenate([events.launch[rows], events.start[rows]])
    track = np.tile(events.track[rows], 2)
    order = np.lexsort((-change, time, track))
    rows = np.tile(rows, 2)[order]
    tables = [context.trace.table(kind) for kind in (*API_TABLES, *GPU_TABLES, *OP_TABLES)]
    tables = [table for table in tables if len(table)]
    low = min((int(table["start"].min()) for table in tables), default=0)
    high = max((int(table.end().max()) for table in tables), default=0)
    return _queues(
        (time[order], change[order], track[order]),
        (events.device[rows], events.stream[rows]),
        (low, high - low, len(events) - len(change) // 2),
    )


def hta_queues(context: Context) -> Queues:
    """HTA's. Raises HtaError."""
    frame, events, names = context.get(hta_frame), context.get(hta_events), context.trace.strings
    launches = np.array([text in HTA_LAUNCHES for text in names], np.bool_)
    is_launch = (
        launches[frame.name] & (frame.link != NOTHING) & ~frame.links_to_first()
        if len(launches)
        else np.zeros(0, np.bool_)
    )
    correlation = frame.correlation[events.row]
    known = (correlation >= 0) & is_in(correlation.astype(np.uint64), frame.correlation[is_launch].astype(np.uint64))
    rows = np.flatnonzero(known)
    keys, count = np.unique(correlation[rows], return_counts=True)
    of_call = frame.correlation[is_launch]
    at = np.minimum(np.searchsorted(keys, of_call), max(len(keys) - 1, 0))
    joined = np.where(keys[at] == of_call, count[at], 1).sum() if len(keys) else len(of_call)
    if joined != len(rows):
        raise HtaError("several launches have one correlation")
    called = frame.link[events.row[rows]]
    order = np.argsort(called, kind="stable")  # launches stand in the order of the calls
    time = np.concatenate([frame.start[called[order]], events.start[rows]])
    rows_ = np.concatenate([rows[order], rows])
    change = np.repeat([1, -1], len(rows))
    by_time = frame.order(time)
    by_time = by_time[np.argsort(events.track[rows_][by_time], kind="stable")]
    rows_ = rows_[by_time]
    span = int(np.ptp(frame.start)) if len(frame) else 0
    return _queues(
        (time[by_time], change[by_time], events.track[rows_]),
        (np.full(len(rows_), NOTHING, np.int64), events.stream[rows_]),
        (frame.origin_ns, span, int(np.count_nonzero(events.activity)) - len(rows)),
    )


def _queues(changes: tuple[Ints, Ints, Ints], where: tuple[Ints, Ints], about: tuple[int, int, int]) -> Queues:
    time, change, track = changes
    first = np.flatnonzero(np.diff(track, prepend=-1))
    length = np.cumsum(change)  # every stream's changes add up to nothing
    return Queues(time, *where, length, first, *about)
