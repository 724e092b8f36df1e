"""The bandwidth of copies and fills over time.

Theory of operation
    Each copy or fill adds its own bandwidth (bytes over duration) from its start to its end; what runs at once adds
    up, by device and kind of copy.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.model.context import Context
from kineto_trace.model.trace import COUNTER_TABLES, UNTIMED_TABLES

COPY_TABLES = ("gpu_memcpy", "gpu_memset")
_DIRECTION = len("Memcpy DtoH")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """The bandwidth (GB/s) from each change (Unix ns) on, series by series. kind: number into kinds.

    first: where each series begins. origin_ns: the beginning of the trace. by_device: devices are told apart.
    """

    time: Ints
    device: Ints
    kind: Ints
    kinds: list[str]
    bandwidth: Floats
    first: Ints
    origin_ns: int
    by_device: bool = True

    def parts(self) -> list[slice]:
        """The rows of each series."""
        ends = [*self.first.tolist(), len(self.time)][1:]
        return [slice(low, high) for low, high in zip(self.first.tolist(), ends, strict=True)]


def copy_kind(name: str) -> str:
    """Memset, Memcpy HtoD, Memcpy DtoH, …: the kind that the name tells."""
    if name.startswith("Memset"):
        return "Memset"
    return name[:_DIRECTION] if name.startswith("Memcpy") else "Memcpy Unknown"


def bandwidths(context: Context) -> Bandwidths:
    """By bytes and durations; what lasts 0 ns lasts 1 ns."""
    tables = [context.trace.table(kind) for kind in COPY_TABLES]
    start, duration, device, name = (
        np.concatenate([table[column] for table in tables]) for column in ("start", "duration", "device", "name")
    )
    bytes_ = np.concatenate([table["bytes"] for table in tables]).astype(np.float64)
    duration = np.maximum(duration, 1)
    kinds, kind = kinds_of(context, name)
    value = bytes_ / duration
    time = np.concatenate([start, start + duration])
    change = np.concatenate([value, -value])
    running = np.repeat([1, -1], len(start))
    device, kind = np.tile(device.astype(np.int64), 2), np.tile(kind, 2)
    order = np.lexsort((running, time, kind, device))  # of an equal time ends come first
    no_activities = (*UNTIMED_TABLES, *COUNTER_TABLES)
    timed = [table for kind, table in context.trace.tables.items() if len(table) and kind not in no_activities]
    origin = min((int(table["start"].min()) for table in timed), default=0)
    found = summed(time[order], device[order], kind[order], kinds, change[order], origin)
    found.bandwidth[np.cumsum(running[order]) == 0] = 0.0
    return found


def kinds_of(context: Context, name: npt.NDArray[np.int32]) -> tuple[list[str], Ints]:
    """The kinds of copies by name, and the number of each row's."""
    names, number = np.unique(name, return_inverse=True)
    texts = [copy_kind(context.trace.strings[value]) for value in names.tolist()]
    kinds = sorted(set(texts))
    of_name = np.array([kinds.index(text) for text in texts], np.int64)
    return kinds, of_name[number] if len(texts) else np.empty(0, np.int64)


def summed(time: Ints, device: Ints, kind: Ints, kinds: list[str], change: Floats, origin_ns: int) -> Bandwidths:
    """Sums from the beginning of each series on, in order, as HTA adds them."""
    first = np.flatnonzero((np.diff(device, prepend=-2) != 0) | (np.diff(kind, prepend=-1) != 0))
    bandwidth = np.empty(len(time))
    for part in np.split(np.arange(len(time)), first[1:]) if len(first) else []:
        bandwidth[part] = np.cumsum(change[part])
    return Bandwidths(time, device, kind, kinds, bandwidth, first, origin_ns)
