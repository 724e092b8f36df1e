"""The bandwidth of copies and fills over time.

Theory of operation
    Each copy or fill adds its own bandwidth (bytes over duration) from its start to its end; what runs at once adds
    up, by device and kind of copy. HTA does not tell devices apart, takes the bandwidth that the file states, lets
    copies of 0 us last 1 us, and keeps what the sums of floats leave behind when nothing runs any more.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import hta_events
from kineto_trace.compat.hta.hta_frame import KINDS, hta_frame
from kineto_trace.kernel_traits.kernel_types import HTA_MEMORY
from kineto_trace.model.context import Context
from kineto_trace.structure.event_arguments import argument
from kineto_trace.view_api.view import Compat

COPY_TABLES = ("gpu_memcpy", "gpu_memset")
_STATED = "memory bandwidth (GB/s)"
_DIRECTION = len("Memcpy DtoH")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """The bandwidth (GB/s) from each change (Unix ns) on, series by series. kind: number into kinds.

    first: where each series begins. origin_ns: the beginning of the trace. device: -1 in HTA's.
    """

    time: Ints
    device: Ints
    kind: Ints
    kinds: list[str]
    bandwidth: Floats
    first: Ints
    origin_ns: int

    def parts(self) -> list[slice]:
        """The rows of each series."""
        ends = [*self.first.tolist(), len(self.time)][1:]
        return [slice(low, high) for low, high in zip(self.first.tolist(), ends, strict=True)]


def bandwidths(context: Context, compat: Compat) -> Bandwidths:
    """All series."""
    return context.get(hta_bandwidths if compat is Compat.HTA else exact_bandwidths)


def copy_kind(name: str) -> str:
    """Memset, Memcpy HtoD, Memcpy DtoH, …: the kind that the name tells."""
    if name.startswith("Memset"):
        return "Memset"
    return name[:_DIRECTION] if name.startswith("Memcpy") else "Memcpy Unknown"


def exact_bandwidths(context: Context) -> Bandwidths:
    """By bytes and durations; what lasts 0 ns lasts 1 ns."""
    tables = [context.trace.table(kind) for kind in COPY_TABLES]
    start, duration, device, name = (
        np.concatenate([table[column] for table in tables]) for column in ("start", "duration", "device", "name")
    )
    bytes_ = np.concatenate([table["bytes"] for table in tables]).astype(np.float64)
    duration = np.maximum(duration, 1)
    kinds, kind = _kinds(context, name)
    value = bytes_ / duration
    time = np.concatenate([start, start + duration])
    change = np.concatenate([value, -value])
    running = np.repeat([1, -1], len(start))
    device, kind = np.tile(device.astype(np.int64), 2), np.tile(kind, 2)
    order = np.lexsort((running, time, kind, device))  # of an equal time ends come first
    timed = [table for table in context.trace.tables.values() if len(table) and "start" in table.columns]
    origin = min((int(table["start"].min()) for table in timed), default=0)
    found = _summed(time[order], device[order], kind[order], kinds, change[order], origin)
    found.bandwidth[np.cumsum(running[order]) == 0] = 0.0
    return found


def hta_bandwidths(context: Context) -> Bandwidths:
    """HTA's."""
    frame, events = context.get(hta_frame), context.get(hta_events)
    rows = np.flatnonzero(events.type == HTA_MEMORY)
    kinds, kind = _kinds(context, events.name[rows])
    value = np.zeros(len(rows))
    for table_kind in COPY_TABLES:
        chosen = np.flatnonzero(frame.kind[events.row[rows]] == KINDS.index(table_kind))
        value[chosen] = _stated(context, table_kind)[frame.row[events.row[rows[chosen]]]]
    start, end = events.start[rows], events.end[rows]
    end = np.where(end == start, start + 1000, end)
    time = np.concatenate([start, end])
    order = np.argsort((time - frame.origin_ns).astype(np.float64), kind="quicksort")
    kind = np.tile(kind, 2)[order]
    order, kind = order[by_kind := np.argsort(kind, kind="stable")], kind[by_kind]
    device = np.full(len(order), -1, np.int64)
    return _summed(time[order], device, kind, kinds, np.concatenate([value, -value])[order], frame.origin_ns)


def _stated(context: Context, kind: str) -> Floats:
    """The bandwidths that the rows of a file state; of captures what the exporter would state."""
    table = context.trace.table(kind)
    computed: Floats = table["bytes"] / np.maximum(table["duration"], 1)
    if not table.origin:
        return computed
    stated: Floats = np.nan_to_num(argument(context, kind, _STATED))
    return stated


def _kinds(context: Context, name: npt.NDArray[np.int32]) -> tuple[list[str], Ints]:
    """The kinds of copies by name, and the number of each row's."""
    names, number = np.unique(name, return_inverse=True)
    texts = [copy_kind(context.trace.strings[value]) for value in names.tolist()]
    kinds = sorted(set(texts))
    of_name = np.array([kinds.index(text) for text in texts], np.int64)
    return kinds, of_name[number] if len(texts) else np.empty(0, np.int64)


def _summed(time: Ints, device: Ints, kind: Ints, kinds: list[str], change: Floats, origin_ns: int) -> Bandwidths:
    """Sums from the beginning of each series on, in order, as HTA adds them."""
    first = np.flatnonzero((np.diff(device, prepend=-2) != 0) | (np.diff(kind, prepend=-1) != 0))
    bandwidth = np.empty(len(time))
    for part in np.split(np.arange(len(time)), first[1:]) if len(first) else []:
        bandwidth[part] = np.cumsum(change[part])
    return Bandwidths(time, device, kind, kinds, bandwidth, first, origin_ns)
