"""The valid samples of each hardware counter of each GPU, in order.

Theory of operation
    Values are those of the whole GPU over the time of their sample. Invalid values are left out and counted: NaN,
    infinity and values beyond a float32, percentages below 0 or more than 5 points above 100 (the edges of a sample may
    make it 100.3, which counts as 100), other values below 0, except for temperatures. So are samples without duration,
    and those that begin before the previous one has ended.

    In a merged file the ranks' GPUs may share a number. Then nobody knows whose kernels ran during a sample, so the
    counters of such a number have no samples at all, and a note says so.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kineto_trace.arrays.intervals import Union
from kineto_trace.arrays.row_groups import group, places_by_value
from kineto_trace.base.array_types import Flags, Floats, Ints
from kineto_trace.formats.chrome.chrome_reader import MERGED
from kineto_trace.model.context import Context
from kineto_trace.model.trace import COUNTER_TABLES, GPU_TABLES, Trace

PERCENT, CELSIUS = "%", "°C"
ABOVE = 105.0  # %: a larger value is invalid
_LARGEST = float(np.finfo(np.float32).max)  # samples are as precise as a float32
NO_COUNTERS = "no counters were recorded; record them with kinetoctl trace --counters"

GPU_BUSY, SM_BUSY, TENSOR, DRAM, OCCUPANCY = "GPU busy", "SM busy", "Tensor pipe", "DRAM", "Occupancy"
INSTRUCTIONS, FMA = "Instructions", "FMA pipe"
DRAM_BYTES = ("DRAM bytes read", "DRAM bytes written")
PCIE = ("PCIe read", "PCIe write")
NVLINK = ("NVLink received", "NVLink sent")
POWER, POWER_LIMIT, TEMPERATURE = "Power", "Power limit", "Temperature"
SM_CLOCK, GPC_CLOCK, MEMORY_CLOCK = "SM clock", "GPC clock", "Memory clock"
THROTTLED = ("Throttled by power", "Throttled by heat", "Throttled by hardware")


@dataclass(frozen=True, slots=True)
class SampledCounter:
    """One counter of one GPU: valid samples in order (Unix ns, [start, end)), which do not overlap.

    label: what is measured, in the same words for every vendor.
    left_out: number of samples without a valid value.
    mixed: it has no samples because several ranks' GPUs share its device number.
    """

    device: int
    label: str
    metric: str
    unit: str
    start: Ints
    end: Ints
    value: Floats
    left_out: int = 0
    mixed: bool = False

    def __len__(self) -> int:
        return len(self.start)

    @property
    def covered(self) -> Union:
        """Returns the time of the samples; intervals may touch."""
        return Union(self.start, self.end)

    def before(self, time: Ints) -> Floats:
        """Returns for each time the integral of the sampled values (value times ns) up to it."""
        if not len(self.start):
            return np.zeros(len(time))
        total = np.concatenate([[0.0], np.cumsum(self.value * (self.end - self.start))])
        at = np.searchsorted(self.start, time, side="right") - 1
        inside = (np.minimum(time, self.end[at]) - self.start[at]) * self.value[at]
        found: Floats = np.where(at >= 0, total[at] + inside, 0.0)
        return found


def sampled_counters(context: Context) -> tuple[SampledCounter, ...]:
    """Returns all hardware counters of the trace that have samples, by GPU and in the order of the table."""
    return tuple(sorted(_tracks(context), key=lambda track: track.device))


def _tracks(context: Context) -> Iterator[SampledCounter]:
    table, strings = context.trace.table("counter"), context.trace.strings
    if not len(table):
        return
    shared = _shared_devices(context.trace)
    groups = group([table["device"], table["name"], table["metric"]])
    for number, places in places_by_value(groups.number):
        first = int(groups.first[number])
        metric, label, unit = (_text(strings, int(table[name][first])) for name in ("metric", "name", "unit"))
        mixed = int(table["device"][first]) in shared
        rows = places[np.argsort(table["start"][places], kind="stable")][: 0 if mixed else None]
        start, value = table["start"][rows], table["value"][rows]
        end = start + table["duration"][rows]
        kept = _possible(value, unit) & (end > start)
        kept[1:] &= start[1:] >= np.maximum.accumulate(end)[:-1]
        value = np.minimum(value[kept], 100.0) if unit == PERCENT else value[kept]
        yield SampledCounter(
            device=int(table["device"][first]),
            label=label or metric,
            metric=metric,
            unit=unit,
            start=start[kept],
            end=end[kept],
            value=value,
            left_out=int(np.count_nonzero(~kept)),
            mixed=mixed,
        )


def _shared_devices(trace: Trace) -> set[int]:
    """Returns the device numbers that several ranks share in a merged file: their rows are in several processes."""
    if MERGED not in (trace.head or {}):
        return set()
    tables = [table for kind in (*COUNTER_TABLES, *GPU_TABLES) if (table := trace.table(kind)).origin]
    device, pid = (
        np.concatenate([np.empty(0, np.int64), *columns])
        for columns in ([table["device"] for table in tables], [table.origin["pid"] for table in tables])
    )
    own = device[group([device, pid]).first] if len(device) else device
    return {number for number, count in Counter(own.tolist()).items() if count > 1}


def _text(strings: Any, number: int) -> str:
    return str(strings[number]) if number >= 0 else ""


def _possible(value: Floats, unit: str) -> Flags:
    found: Flags = np.abs(value) <= _LARGEST
    if unit != CELSIUS:
        found &= value >= 0
    return found & (value <= ABOVE) if unit == PERCENT else found


def tracks_of(context: Context, device: int) -> dict[str, SampledCounter]:
    """Returns the counters of a GPU by their labels; if several have one label, the one with the most samples."""
    found: dict[str, SampledCounter] = {}
    for track in context.get(sampled_counters):
        if track.device == device and len(track) > (len(found[track.label]) if track.label in found else 0):
            found[track.label] = track
    return found


@dataclass(frozen=True, slots=True)
class IntervalMeans:
    """Means over groups of intervals.

    mean: over the sampled time of each group; NaN if there is none.
    covered_ns: that time.
    """

    mean: Floats
    covered_ns: Ints


def interval_means(track: SampledCounter, start: Ints, end: Ints, number: Ints, count: int) -> IntervalMeans:
    """Returns the mean of a counter over intervals (Unix ns), weighted by how much of each sample lies in them.

    number: the group of each interval, 0 to count - 1; below 0 for none.

    Overlapping intervals of one group each count in full. The mean assumes that a sample's value holds in each part of
    it, which is inexact where an interval ends inside a sample, so intervals should be several samples long.
    """
    chosen = number >= 0
    start, end, number = start[chosen], np.maximum(end, start)[chosen], number[chosen]
    covered = np.bincount(number, track.covered.within(start, end), count) if len(number) else np.zeros(count)
    total = np.bincount(number, track.before(end) - track.before(start), count) if len(number) else np.zeros(count)
    mean = np.divide(total, covered, out=np.full(count, np.nan), where=covered > 0)
    return IntervalMeans(mean, covered.astype(np.int64))


def left_out_note(context: Context) -> list[str]:
    """Returns a note on samples without a valid value; empty if all have one."""
    found = context.get(sampled_counters)
    devices = sorted({track.device for track in found if track.mixed})
    mixed = [
        f"samples of GPU {', '.join(map(str, devices))} are left out: in the merged file, GPUs of several ranks have "
        "this number; run the view on each rank's own trace"
    ] * bool(devices)
    count, every = sum(track.left_out for track in found), sum(len(track) + track.left_out for track in found)
    if not count:
        return mixed
    labels = ", ".join(dict.fromkeys(track.label for track in found if track.left_out))
    return [*mixed, f"{count:,} of {every:,} samples are left out: their value is missing or impossible ({labels})"]
