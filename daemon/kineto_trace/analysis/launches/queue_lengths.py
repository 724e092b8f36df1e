"""How much launched work waits in the queue of each stream.

Theory of operation
    A stream's queue grows by one when a call that launches an activity begins, and shrinks by one when that activity
    starts. A graph launch adds all its kernels at once. Activities whose launch is not in the trace are not counted.
    Where the clocks of host and GPU differ, an activity may start before its launch: then it waited for no time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NOTHING, gpu_events
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Queues:
    """The queue length from each change (Unix ns) on, stream by stream.

    first: where each stream begins. origin_ns: where the trace begins; span_ns: how long it is. uncounted: activities
    without a launch, for the reason `because`. by_device: devices are told apart.
    """

    time: Ints
    device: Ints
    stream: Ints
    length: Ints
    first: Ints
    origin_ns: int
    span_ns: int
    uncounted: int
    because: str = "have no launch in the trace"
    by_device: bool = True

    def parts(self) -> list[slice]:
        """The rows of each stream."""
        ends = [*self.first.tolist(), len(self.time)][1:]
        return [slice(low, high) for low, high in zip(self.first.tolist(), ends, strict=True)]


def queues(context: Context) -> Queues:
    """Returns the queues of all streams. At equal times a launch comes before a start."""
    events = context.get(gpu_events)
    rows = np.flatnonzero(events.launch != NOTHING)
    change = np.repeat([1, -1], len(rows))
    time = np.concatenate([np.minimum(events.launch[rows], events.start[rows]), events.start[rows]])
    track = np.tile(events.track[rows], 2)
    order = np.lexsort((-change, time, track))
    rows = np.tile(rows, 2)[order]
    tables = [context.trace.table(kind) for kind in (*API_TABLES, *GPU_TABLES, *OP_TABLES)]
    tables = [table for table in tables if len(table)]
    low = min((int(table["start"].min()) for table in tables), default=0)
    high = max((int(table.end().max()) for table in tables), default=0)
    return queues_of(
        (time[order], change[order], track[order]),
        (events.device[rows], events.stream[rows]),
        (low, high - low, len(events) - len(change) // 2),
    )


def queues_of(changes: tuple[Ints, Ints, Ints], where: tuple[Ints, Ints], about: tuple[int, int, int]) -> Queues:
    """changes: time, change and track; where: device and stream; about: origin_ns, span_ns, uncounted."""
    time, change, track = changes
    first = np.flatnonzero(np.diff(track, prepend=-1))
    length = np.cumsum(change)  # every stream's changes add up to nothing
    return Queues(time, *where, length, first, *about)
