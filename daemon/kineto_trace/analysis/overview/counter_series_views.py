"""Every counter of a trace over time: of the hardware, the file, the allocator and the kernel."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS as NO_HARDWARE
from kineto_trace.analysis.counters.sampled_counters import PERCENT, SampledCounter, left_out_note, sampled_counters
from kineto_trace.analysis.host_time.thread_views import counters_of
from kineto_trace.base.array_types import Floats, Ints
from kineto_trace.errors import ViewError
from kineto_trace.formats.chrome.counter_tracks import gap_rows
from kineto_trace.model.activity_tables import KINDS
from kineto_trace.model.context import Context
from kineto_trace.model.trace import TEXT_ID
from kineto_trace.structure.allocations import largest_triangles, levels, memory_records
from kineto_trace.structure.event_arguments import argument, arguments, has_column
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

COUNTER = ord("C")  # the phase of a counter in a Chrome trace
_NS_PER_S = 1e9
_LARGEST = sys.float_info.max  # JSON has larger integers
# Kernel counters of an interval -> title, unit of the value per second, and divisor.
_RATES = {
    "cpu_ns": ("process: CPU time", "cores", 1e9),
    "host_busy_ns": ("host: CPU time of all processes", "cores", 1e9),
    "minor_faults": ("process: minor page faults", "1/s", 1),
    "major_faults": ("process: major page faults (from storage)", "1/s", 1),
    "read_bytes": ("process: read from storage", "B/s", 1),
    "written_bytes": ("process: written to storage", "B/s", 1),
    "read_chars": ("process: bytes read", "B/s", 1),
    "written_chars": ("process: bytes written", "B/s", 1),
    "throttled_ns": ("process: throttled by its CPU quota", "s/s", 1e9),
}
NO_COUNTERS = (
    "the trace has no counters: kinetod records the Linux kernel's counters with every trace, the allocator's with "
    "kinetoctl trace --memory, and the hardware's with kinetoctl trace --counters"
)
NO_PERCENTAGES = "the trace has no percentage counters; the view 'counters' lists all counters"


class CounterValues(NamedTuple):
    """One counter. time: Unix ns, ascending. value: valid from its time on; NaN if unknown from then on."""

    name: str
    unit: str
    time: Ints
    value: Floats


def counter_series(context: Context) -> list[CounterValues]:
    """Returns all counters of a trace that have values."""
    of_hardware = map(_samples_of, context.get(sampled_counters))
    found = [*of_hardware, *_of_kernel(context), *_of_allocator(context), *_of_file(context)]
    return [series for series in found if np.isfinite(series.value).any()]


def _samples_of(track: SampledCounter) -> CounterValues:
    """Returns the samples of a counter of the hardware; the series ends where no sample follows at once."""
    ends = np.append(track.end[:-1] < track.start[1:], True)[: len(track)]
    time = np.concatenate([track.start, track.end[ends]])
    value = np.concatenate([track.value, np.full(int(np.count_nonzero(ends)), np.nan)])
    order = np.argsort(time, kind="stable")
    return CounterValues(f"GPU{track.device}: {track.label}", track.unit, time[order], value[order])


def _of_kernel(context: Context) -> Iterator[CounterValues]:
    counters = counters_of(context)
    if counters is None:
        return
    seconds = np.diff(counters.times) / _NS_PER_S
    for name, (title, unit, scale) in _RATES.items():
        values = counters.process[name]
        if values.any() and (values >= 0).any():  # events that never happened, or could not be read, are not a series
            known = values >= 0
            yield CounterValues(title, unit, counters.times[:-1][known], (values / seconds / scale)[known])


def _of_allocator(context: Context) -> Iterator[CounterValues]:
    records = context.get(memory_records)
    for device, label in enumerate(records.devices):
        time, allocated, reserved, relative = levels(records, device)
        title = f"{label}: allocated" + (" since the recording began" if relative else "")
        yield CounterValues(title, "bytes", time, allocated.astype(np.float64))
        if (reserved >= 0).any():
            yield CounterValues(f"{label}: reserved", "bytes", time, reserved.astype(np.float64))


def _of_file(context: Context) -> Iterator[CounterValues]:
    """Yields each counter of a file and each member of its arguments. A file states no units.

    A counter belongs to a process (of a GPU): its name has the process where several have a counter of this name.
    """
    table, strings = context.trace.table("other"), context.trace.strings
    if not len(table) or not table.origin:
        return
    rows = np.flatnonzero((table["phase"] == COUNTER) & ~gap_rows(table, strings))  # gaps are of the table `counter`
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    names = table["name"].tolist()
    found: dict[tuple[int, str], dict[int, tuple[list[int], list[float]]]] = {}
    for row, member, value in _members(context, rows):
        processes = found.setdefault((names[row], member), {})
        places, values = processes.setdefault(int(table.origin["pid"][row]), ([], []))
        places.append(row)
        values.append(value)
    for (name, member), processes in found.items():
        title = strings[name] if name >= 0 else "counter"
        shown = title if member in ("", "value", title) else f"{title}: {member}"
        for pid, (places, values) in processes.items():
            process = strings[TEXT_ID - pid] if pid <= TEXT_ID else f"process {pid}"
            order = np.argsort(table["start"][places], kind="stable")
            yield CounterValues(
                f"{process}: {shown}" if len(processes) > 1 else shown,
                "",
                table["start"][places][order],
                np.array(values)[order],
            )


def _members(context: Context, rows: Ints) -> Iterator[tuple[int, str, float]]:
    """Yields row, name and value of all numbers among the arguments of rows of the table `other`."""
    table, parsed = context.trace.table("other"), arguments(context, "other")
    for row, text in zip(rows.tolist(), parsed.text[rows].tolist(), strict=True):
        for member, value in parsed.objects[text].items() if text >= 0 else ():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST:
                yield row, member, float(value)
    for member in dict.fromkeys(arg.key for arg in KINDS["other"]):  # those that have a column
        own = rows[has_column(table, member)[rows]]
        values = argument(context, "other", member)[own] if len(own) else own
        yield from ((row, member, value) for row, value in zip(own.tolist(), values.tolist(), strict=True))


def _check(name: str, max_points: int) -> None:
    """Raises ViewError for an invalid number of points."""
    if max_points < 0 or 0 < max_points < 3:
        raise ViewError(f"view {name}: max_points={max_points} cannot show a curve; use 3 or more, or 0 for all")


def _shown(series: CounterValues, since_ns: int, max_points: int) -> Ints:
    """Returns the places that show the shape of the curve best; all of them if they are few, or if max_points is 0.

    Spans of unknown value stay if they are as long as the time between two points; if there are many, the longest.
    """
    if not max_points or len(series.time) <= max_points:
        return np.arange(len(series.time))
    is_known = np.isfinite(series.value)
    known = np.flatnonzero(is_known)
    length = np.where(is_known, 0, np.append(np.diff(series.time), 0))
    gaps = np.argsort(-length, kind="stable")[: max_points // 8]
    gaps = gaps[length[gaps] * max_points >= max(int(series.time[-1] - series.time[0]), 1)]
    points = np.stack([(series.time[known] - since_ns) / 1000, series.value[known]], axis=1)
    shape = known[largest_triangles(points, max_points - 2 * len(gaps))]
    return np.flatnonzero(np.bincount(np.concatenate([shape, gaps, gaps + 1])))


@view(
    "counters",
    columns(
        ("counter", "text", "", "name of the counter"),
        ("unit", "text", "", "unit of the value; missing if the trace does not state it"),
        ("time_ns", "int", "ns", "Unix time from which the value holds"),
        ("time_us", "float", "us", "time since the recording window began; negative if sampled before it"),
        ("value", "float", "", "value"),
    ),
    nothing=NO_COUNTERS,
)
def counters(context: Context, *, max_points: int = 0) -> Answer:
    """Every counter in the trace over time: hardware, Linux kernel, allocator, and any others in a trace file.

    The value of a hardware counter is the mean of the sample that begins at the time of the row; a missing value means
    that no sample followed. The Linux kernel's counters are rates per second over the interval that begins at the time
    of the row. In a file, hardware counters may extend beyond the recording window. Those samples have rows, too; the
    last one before the window holds at its beginning.

    Options:
    - max_points: the maximum number of rows per counter; the rows that show the shape of the curve best are kept
      (largest triangle three buckets). 0 keeps all.
    """
    _check("counters", max_points)
    values: dict[str, list[Any]] = {column.name: [] for column in counters.columns}
    for series in counter_series(context):
        since = (series.time - context.trace.window_start_ns) / 1000
        rows = _shown(series, context.trace.window_start_ns, max_points)
        values["counter"] += [series.name] * len(rows)
        values["unit"] += [series.unit or None] * len(rows)
        values["time_ns"] += series.time[rows].tolist()
        values["time_us"] += since[rows].tolist()
        values["value"] += series.value[rows].tolist()
    return Answer(values, left_out_note(context))


@view(
    "counter_summary",
    columns(
        ("counter", "text", "", "name of the counter"),
        ("unit", "text", "", "unit of the values; missing if the trace does not state it"),
        ("samples", "int", "", "number of values"),
        ("mean", "float", "", "mean over the recording, each value weighted by how long it holds"),
        ("min", "float", "", "smallest value"),
        ("max", "float", "", "largest value"),
        ("last", "float", "", "value at the end"),
    ),
    nothing=NO_COUNTERS,
)
def counter_summary(context: Context) -> Answer:
    """Each counter of the trace in one row: its mean over time, its extremes and its last value.

    A value holds until the next one, and the last one until the end of the recording. Samples from before the recording
    window count from its beginning.
    """
    low, high = context.trace.window_start_ns, context.trace.window_end_ns
    found: list[tuple[Any, ...]] = []
    for series in counter_series(context):
        held = np.diff(np.clip(np.append(series.time, max(high, int(series.time[-1]))), low, None)).astype(np.float64)
        known = np.isfinite(series.value)
        value, weights = series.value[known], held[known]
        weights = weights / 2.0 ** np.frexp(weights.sum())[1]  # below 1, so that sums of large values do not overflow
        mean = float(np.average(value, weights=weights if weights.any() else None))
        extremes = float(value.min()), float(value.max())
        found.append((series.name, series.unit or None, len(value), mean, *extremes, float(value[-1])))
    return counter_summary.answer(found, left_out_note(context))


@view(
    "counter_curves",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("counter", "text", "", "name of the counter"),
        ("time_ns", "int", "ns", "Unix time at which a sample begins, or at which the samples end"),
        ("value_pct", "float", "%", "value of the sample; missing if no sample follows"),
    ),
    nothing=NO_HARDWARE,
)
def counter_curves(context: Context, *, max_points: int = 1000) -> Answer:
    """The hardware counters measured in percent, over time: one curve for each GPU and counter.

    Options:
    - max_points: the maximum number of rows per curve, as in the view counters. 0 keeps all.
    """
    _check("counter_curves", max_points)
    values: dict[str, list[Any]] = {column.name: [] for column in counter_curves.columns}
    for track in context.get(sampled_counters):
        if track.unit != PERCENT or not len(track):
            continue
        series = _samples_of(track)
        rows = _shown(series, context.trace.window_start_ns, max_points)
        values["device"] += [track.device] * len(rows)
        values["counter"] += [track.label] * len(rows)
        values["time_ns"] += series.time[rows].tolist()
        values["value_pct"] += series.value[rows].tolist()
    told = left_out_note(context)
    if context.get(sampled_counters) and not told and not values["device"]:
        told = [NO_PERCENTAGES]
    return Answer(values, told)
