"""How the time of each GPU divides: idle, computing, kinds of kernels, and the bandwidth of copies."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Sweep, Union, intersection, union
from kineto_trace.arrays.row_groups import ByName, largest
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, Ints32, UInts8
from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION, HTA_MEMORY, HTA_TYPES
from kineto_trace.model.context import Context
from kineto_trace.model.trace import COUNTER_TABLES, UNTIMED_TABLES
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import describe, statistics_columns, texts
from kineto_trace.view_api.view import Answer, view

NO_GPU = "the trace has no GPU activity"
Row = list[float | None]
_NO_COPIES = "the trace has no copies or fills of known size"
_SERIES = columns(
    ("device", "int", "", "GPU index in the process; missing with compat=hta"),
    ("kind", "text", "", "Memcpy HtoD, Memcpy DtoH, Memcpy DtoD, Memset, …"),
)
COPY_TABLES = ("gpu_memcpy", "gpu_memset")
_DIRECTION = len("Memcpy DtoH")


@dataclass(frozen=True, slots=True)
class GpuEvents:
    """GPU events (Unix ns).

    type: number into HTA_TYPES.
    track: dense number of (device, stream).
    launch: start of the call that caused it; NOTHING if that is not in the trace (for HTA, only if the file does not
        begin with an event).
    activity: whether it is a kernel, copy or fill (HTA has other GPU events).
    row: in Gpu, or in HtaFrame.
    """

    row: Ints
    start: Ints
    end: Ints
    name: Ints32
    device: Ints
    stream: Ints
    track: Ints
    type: UInts8
    launch: Ints
    activity: Flags

    def __len__(self) -> int:
        return len(self.start)


# The bandwidth of copies and fills over time.
# Each copy or fill adds its own bandwidth (bytes over duration) from its start to its end; simultaneous ones add up, by
# device and kind of copy.
@dataclass(frozen=True, slots=True)
class Bandwidths:
    """The bandwidth (GB/s) from each change (Unix ns) on, series by series.

    kind: number into kinds.
    first: where each series begins.
    origin_ns: the beginning of the trace.
    by_device: whether each device has its own series.
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


def gpu_events(context: Context) -> GpuEvents:
    """Returns all kernels, copies and fills by start. Communication is recognised by name, in all spellings."""
    work, called = context.get(gpu), context.get(calls)
    type_ = np.where(work.communication, HTA_COMMUNICATION, HTA_COMPUTATION)
    launch = called.start[work.call] if len(called) else work.call
    return GpuEvents(
        row=np.arange(len(work)),
        start=work.start,
        end=work.end,
        name=work.name,
        device=work.device,
        stream=work.stream,
        track=work.track,
        type=np.where(work.kind == KERNEL, type_, HTA_MEMORY).astype(np.uint8),
        launch=np.where(work.call >= 0, launch, NOTHING),
        activity=np.ones(len(work), np.bool_),
    )


def unknown_without_gpu(context: Context, answer: Answer, names: Collection[str], note: str = NO_GPU) -> Answer:
    """Returns the answer; if the trace has no GPU activity, these columns are missing, not 0, and a note says so."""
    if len(context.get(gpu)):
        return answer
    values = {name: [None] * len(column) if name in names else column for name, column in answer.values.items()}
    return Answer(values, [*(known for known in answer.notes if known != note), note])


def union_of(events: GpuEvents, chosen: Flags) -> Union:
    """Returns the time in which any of the chosen events ran."""
    return union(events.start[chosen], events.end[chosen])


def devices_of(events: GpuEvents) -> list[tuple[int, Flags]]:
    """Returns which events ran on each device."""
    return [(device, events.device == device) for device in unique_values(events.device).tolist()]


@view(
    "temporal_breakdown",
    columns(
        ("device", "int", "", "GPU index in the process; missing with compat=hta, which adds up all GPUs"),
        ("idle_us", "float", "us", "time in which no event ran"),
        ("compute_us", "float", "us", "time in which at least one computing kernel ran"),
        ("non_compute_us", "float", "us", "time in which only communication, copies and fills ran"),
        ("kernel_time_us", "float", "us", "from the first start to the last end: the sum of the three columns above"),
        ("idle_pct", "float", "%", "share of kernel_time_us"),
        ("compute_pct", "float", "%", "share of kernel_time_us"),
        ("non_compute_pct", "float", "%", "share of kernel_time_us"),
    ),
)
def temporal_breakdown(context: Context) -> Answer:
    """Idle, computing and other time of each GPU between its first and its last event.

    Computing time is the union of all kernels other than communication kernels, which are recognized by their names
    (such as nccl or rccl). Idle time is the time outside the union of all kernels, copies and fills.
    """
    events = context.get(gpu_events)
    rows: list[Row] = []
    for device, chosen in devices_of(events):
        computing = chosen & (events.type == HTA_COMPUTATION)
        ran = union_of(events, chosen)
        whole = int(ran.end[-1] - ran.start[0])
        rows.append(temporal_row(device, whole, ran.length(), union_of(events, computing).length()))
    return temporal_columns(rows)


def temporal_row(device: int | None, whole: int, busy: int, compute: int, digits: int | None = None) -> Row:
    """Returns one row of the view temporal_breakdown, from times in ns. digits: rounding of shares."""
    parts = [whole - busy, compute, busy - compute]
    shares = [100 * part / whole if whole else float("nan") for part in parts]
    if digits is not None:
        shares = [float(np.round(share, digits)) for share in shares]
    return [device, *(part / 1000 for part in (*parts, whole)), *shares]


def temporal_columns(rows: Sequence[Row]) -> Answer:
    """The columns of the view temporal_breakdown."""
    return temporal_breakdown.answer(rows, () if rows else (NO_GPU,))


@view(
    "comm_comp_overlap",
    columns(
        ("device", "int", "", "GPU index in the process; missing with compat=hta, which adds up all GPUs"),
        ("communication_us", "float", "us", "time in which at least one communication kernel ran"),
        ("overlapped_us", "float", "us", "part of communication_us in which a computing kernel also ran"),
        ("overlap_pct", "float", "%", "share of the communication time; missing without communication"),
    ),
)
def comm_comp_overlap(context: Context) -> Answer:
    """How much of the communication time of each GPU overlaps with computing kernels.

    Communication kernels are recognized by their names (such as nccl or rccl).
    """
    events = context.get(gpu_events)
    rows: list[Row] = []
    for device, chosen in devices_of(events):
        communicating = chosen & (events.type == HTA_COMMUNICATION)
        computing = chosen & (events.type == HTA_COMPUTATION)
        communication = union_of(events, communicating)
        length, both = communication.length(), intersection(communication, union_of(events, computing)).length()
        rows.append([device, length / 1000, both / 1000, 100 * both / length if length else None])
    return comm_comp_overlap.answer(rows, () if rows else (NO_GPU,))


def _all_ranks(partials: Sequence[tuple[int, dict[str, int]]]) -> Answer:
    """Returns the rows of each rank and, if there are several, those of all together."""
    return type_columns([*partials, *([(None, total_times(partials))] if len(partials) > 1 else [])])


def total_times(partials: Sequence[tuple[int, dict[str, int]]]) -> dict[str, int]:
    """Returns the times (ns) of all ranks."""
    found: dict[str, int] = {}
    for _, times in partials:
        for name, time in times.items():
            found[name] = found.get(name, 0) + time
    return found


def type_columns(tables: Sequence[tuple[int | None, dict[str, int]]], digits: int | None = None) -> Answer:
    """Returns the columns of the view. tables: ranks and the times (ns) of their types; digits: rounding of shares."""
    rows: list[tuple[int | None, str, float, float | None]] = []
    for rank, times in tables:
        total = sum(times.values())
        for name, time in sorted(times.items(), key=lambda item: (-item[1], item[0])):
            share = 100 * time / total if total else None
            if share is not None and digits is not None:
                share = float(np.round(share, digits))
            rows.append((rank, name, time / 1000, share))
    return kernel_type_breakdown.answer(rows)


@view(
    "kernel_type_breakdown",
    columns(
        ("rank", "int", "", "rank of the process in its job; missing: all ranks together"),
        (
            "kernel_type",
            "text",
            "",
            'COMPUTATION, COMMUNICATION or MEMORY; "A overlapping B" for types that ran at the same time',
        ),
        ("sum_us", "float", "us", "time in which exactly these types ran"),
        ("share_pct", "float", "%", "share of the time in which any type ran"),
    ),
    reduce=_all_ranks,
    nothing=NO_GPU,
)
def kernel_type_breakdown(context: Context, *, include_memory: bool = True) -> dict[str, int]:
    """The GPU's busy time by the types of work that ran. Each moment counts once.

    Options:
    - include_memory: count copies and fills as a type.
    """
    events = context.get(gpu_events)
    changes, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for place, number in enumerate(kernel_types(include_memory)):
        ran = union_of(events, events.type == number)
        changes.append(np.repeat([1 << place, -(1 << place)], len(ran.start)))
        times += [ran.start, ran.end]
    change, time = np.concatenate(changes), np.concatenate(times)
    order = np.argsort(time, kind="stable")
    running = Sweep(np.cumsum(change[order])[:-1], time[order][:-1], time[order][1:])
    return {name: length for name, length in lengths_by_types(running).items() if length}


def kernel_types(include_memory: bool) -> tuple[int, ...]:
    """Returns the types that count; the n-th has the value 2**n in a sweep."""
    return (HTA_COMPUTATION, HTA_COMMUNICATION, *((HTA_MEMORY,) if include_memory else ()))


def lengths_by_types(running: Sweep) -> dict[str, int]:
    """Returns the length (ns) of each combination of types that appears."""
    lengths, types = running.lengths(), kernel_types(include_memory=True)
    found: dict[str, int] = {}
    for value in unique_values(running.running).tolist():
        if value > 0:
            name = " overlapping ".join(HTA_TYPES[number] for place, number in enumerate(types) if value & 1 << place)
            found[name] = found.get(name, 0) + int(lengths[running.running == value].sum())
    return found


@view(
    "kernel_breakdown",
    columns(
        ("kernel_type", "text", "", "COMPUTATION, COMMUNICATION or MEMORY"),
        ("name", "text", "", 'name; "others" sums up everything that is not listed'),
        ("count", "int", "", "number of events; with compat=hta, a row of several names counts the names"),
        ("sum_us", "float", "us", "sum of their durations"),
        ("max_us", "float", "us", "longest duration"),
        ("min_us", "float", "us", "shortest duration"),
        ("mean_us", "float", "us", "mean"),
        ("std_us", "float", "us", "sample standard deviation; 0 for one event"),
    ),
    nothing=NO_GPU,
)
def kernel_breakdown(
    context: Context,
    *,
    duration_ratio: float = 0.8,
    num_kernels: int = 10,
    include_memory: bool = True,
) -> Answer:
    """The kernels that take the most time, for each type of work; all others of a type share one row.

    Options:
    - num_kernels: the maximum number of kernels to list per type. If a type has more, kernels are listed only until
      they make up duration_ratio of its time.
    - duration_ratio: see num_kernels.
    - include_memory: include copies and fills.
    """
    events = context.get(gpu_events)
    names = context.trace.strings
    duration = (events.end - events.start) / 1000
    rows: list[dict[str, Any]] = []
    for number in kernel_types(include_memory):
        chosen = events.type == number
        group = events.name[chosen].astype(np.int64)
        table = largest(group, duration[chosen], names, ratio=duration_ratio, limit=num_kernels)
        rows += [{"kernel_type": HTA_TYPES[number], **row} for row in statistics_rows(table)]
    return kernel_breakdown.answer(rows)


def statistics_rows(table: ByName) -> list[dict[str, Any]]:
    """Returns one dictionary per name, with the statistics in us."""
    return [
        {
            "name": name,
            "count": int(table.count[place]),
            **{f"{field}_us": float(getattr(table, field)[place]) for field in ("sum", "max", "min", "mean", "std")},
        }
        for place, name in enumerate(table.name)
    ]


def copy_kind(name: str) -> str:
    """Returns the kind of copy in the name: Memset, Memcpy HtoD, Memcpy DtoH, …"""
    if name.startswith("Memset"):
        return "Memset"
    return name[:_DIRECTION] if name.startswith("Memcpy") else "Memcpy Unknown"


def bandwidths(context: Context) -> Bandwidths:
    """Computes bandwidths from bytes and durations; a duration of 0 ns counts as 1 ns."""
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
    order = np.lexsort((running, time, kind, device))  # at equal times, ends come first
    no_activities = (*UNTIMED_TABLES, *COUNTER_TABLES)
    timed = [table for kind, table in context.trace.tables.items() if len(table) and kind not in no_activities]
    origin = min((int(table["start"].min()) for table in timed), default=0)
    found = summed_bandwidths(time[order], device[order], kind[order], kinds, change[order], origin)
    found.bandwidth[np.cumsum(running[order]) == 0] = 0.0
    return found


def kinds_of(context: Context, name: Ints32) -> tuple[list[str], Ints]:
    """The kinds of copies by name, and the number of each row's."""
    names, number = np.unique(name, return_inverse=True)
    texts = [copy_kind(context.trace.strings[value]) for value in names.tolist()]
    kinds = sorted(set(texts))
    of_name = np.array([kinds.index(text) for text in texts], np.int64)
    return kinds, of_name[number] if len(texts) else np.empty(0, np.int64)


def summed_bandwidths(
    time: Ints, device: Ints, kind: Ints, kinds: list[str], change: Floats, origin_ns: int
) -> Bandwidths:
    """Returns running sums from the beginning of each series, in HTA's order of addition."""
    first = np.flatnonzero((np.diff(device, prepend=-2) != 0) | (np.diff(kind, prepend=-1) != 0))
    bandwidth = np.empty(len(time))
    for part in np.split(np.arange(len(time)), first[1:]) if len(first) else []:
        bandwidth[part] = np.cumsum(change[part])
    return Bandwidths(time, device, kind, kinds, bandwidth, first, origin_ns)


@view(
    "memory_bandwidth",
    _SERIES
    + columns(
        ("time_ns", "int", "ns", "Unix time of the change"),
        ("time_us", "float", "us", "time of the change, relative to the beginning of the trace"),
        ("bandwidth", "float", "GB/s", "sum over all running copies and fills, from this time on"),
    ),
    nothing=_NO_COPIES,
)
def memory_bandwidth(context: Context) -> Answer:
    """The bandwidth of copies and fills by kind, at every change. Memory traffic of kernels is not included.

    A running copy counts with its bytes divided by its duration; simultaneous copies add up.
    """
    return bandwidth_columns(context.get(bandwidths))


def bandwidth_columns(found: Bandwidths) -> Answer:
    """The columns of the view memory_bandwidth."""
    return Answer(
        {
            "device": found.device if found.by_device else [None] * len(found.time),
            "kind": texts(found.kinds, found.kind),
            "time_ns": found.time,
            "time_us": (found.time - found.origin_ns) / 1000,
            "bandwidth": found.bandwidth,
        }
    )


@view(
    "memory_bandwidth_summary",
    _SERIES + statistics_columns("GB/s", "bandwidths above 0, one per change"),
    nothing=_NO_COPIES,
)
def memory_bandwidth_summary(context: Context) -> Answer:
    """Statistics of the values of memory_bandwidth above 0. Each value counts once, no matter how long it lasted."""
    return summary_columns(context.get(bandwidths))


def summary_columns(found: Bandwidths) -> Answer:
    """The columns of the view memory_bandwidth_summary."""
    rows = []
    for part in found.parts():
        values = found.bandwidth[part]
        values = values[values > 0]
        if len(values):
            device = int(found.device[part.start]) if found.by_device else None
            rows.append({"device": device, "kind": found.kinds[int(found.kind[part.start])], **describe(values)})
    return memory_bandwidth_summary.answer(rows)
