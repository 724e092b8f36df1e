"""Launches: their calls and delays, by operator, and what waits in the queues of streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.gpu_time_views import NO_GPU, gpu_events
from kineto_trace.arrays.row_groups import group_sequences
from kineto_trace.base.array_types import NOTHING, Flags, Ints, Ints32
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import describe, statistics_columns, texts
from kineto_trace.view_api.view import Answer, view

NO_LAUNCHES = "no GPU activity has its launching call in the trace"
ATEN = "aten::"
ARROW = " -> "
MAX_QUEUE_LENGTH = 1024  # from about here on CUDA blocks the launching call
_STREAM = columns(
    ("device", "int", "", "GPU index in the process; missing with compat=hta"),
    ("stream", "int", "", "stream"),
)


@dataclass(frozen=True, slots=True)
class Launches:
    """One value per launched GPU activity. Durations are in ns."""

    correlation: Ints
    call: Ints32
    activity: Ints32
    cpu: Ints
    gpu: Ints
    delay: Ints

    def flags(self, runtime_cutoff: float, launch_delay_cutoff: float) -> tuple[Flags, Flags, Flags]:
        """Returns flags for short activities, long calls and long delays."""
        cpu = self.cpu / 1000
        short = (cpu <= runtime_cutoff) & (self.gpu < self.cpu)
        return short, cpu > runtime_cutoff, self.delay / 1000 > launch_delay_cutoff


class OpLaunches(NamedTuple):
    """Kernels by the operator that launched them (ns), in the order of launches."""

    op: Ints  # dense number of the operator's run
    op_name: Ints32
    op_start: Ints
    launch: Ints
    start: Ints
    kernel: Ints32


# How much launched work waits in the queue of each stream.
# A stream's queue grows by one when a call that launches an activity begins, and shrinks by one when that activity
# starts. A graph launch adds all its kernels at once. Activities whose launch is not in the trace are not counted. If
# the clocks of host and GPU differ, an activity may start before its launch: then its wait is 0.
@dataclass(frozen=True, slots=True)
class Queues:
    """The queue length from each change (Unix ns) on, stream by stream.

    first: where each stream begins.
    origin_ns: where the trace begins.
    span_ns: how long it is.
    uncounted: activities without a launch, for the reason `because`.
    by_device: whether each device has its own series.
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


@view(
    "launch_stats",
    columns(
        ("correlation", "int", "", "correlation id, which links the call to the activity"),
        ("call", "text", "", "name of the call"),
        ("activity", "text", "", "name of the kernel, copy or fill"),
        ("cpu_us", "float", "us", "duration of the call"),
        ("gpu_us", "float", "us", "duration of the activity"),
        (
            "launch_delay_us",
            "float",
            "us",
            "from the end of the call to the start of the activity; 0 if the activity started earlier",
        ),
        ("short_activity", "bool", "", "whether the call took longer than the activity, but at most runtime_cutoff"),
        ("long_call", "bool", "", "whether the call took longer than runtime_cutoff"),
        ("long_delay", "bool", "", "whether the delay is longer than launch_delay_cutoff"),
    ),
    nothing=NO_LAUNCHES,
)
def launch_stats(
    context: Context,
    *,
    runtime_cutoff: float = 50,
    launch_delay_cutoff: float = 100,
    include_memory: bool = True,
) -> Answer:
    """The call, the activity and the delay of every launch whose call and activity are both in the trace.

    A graph launch has one row for each of its kernels.

    Options:
    - runtime_cutoff: calls longer than this (us) are long.
    - launch_delay_cutoff: delays longer than this (us) are long.
    - include_memory: include copies and fills.
    """
    return launch_columns(context, _exact_launches(context, include_memory), runtime_cutoff, launch_delay_cutoff)


def launch_columns(context: Context, found: Launches, runtime_cutoff: float, launch_delay_cutoff: float) -> Answer:
    """The columns of the view launch_stats."""
    short, long_call, long_delay = found.flags(runtime_cutoff, launch_delay_cutoff)
    names = context.trace.strings
    return Answer(
        {
            "correlation": found.correlation,
            "call": texts(names, found.call),
            "activity": texts(names, found.activity),
            "cpu_us": found.cpu / 1000,
            "gpu_us": found.gpu / 1000,
            "launch_delay_us": found.delay / 1000,
            "short_activity": short,
            "long_call": long_call,
            "long_delay": long_delay,
        }
    )


@view(
    "launch_summary",
    columns(
        ("launches", "int", "", "number of launched activities"),
        ("short_activities", "int", "", "activities shorter than their call, if the call took at most runtime_cutoff"),
        ("long_calls", "int", "", "activities whose call took longer than runtime_cutoff"),
        ("long_delays", "int", "", "activities that waited longer than launch_delay_cutoff"),
        ("cpu_us", "float", "us", "sum of the calls' durations"),
        ("gpu_us", "float", "us", "sum of the activities' durations"),
        ("mean_delay_us", "float", "us", "mean delay"),
        ("median_delay_us", "float", "us", "median delay"),
        ("max_delay_us", "float", "us", "longest delay"),
    ),
)
def launch_summary(
    context: Context,
    *,
    runtime_cutoff: float = 50,
    launch_delay_cutoff: float = 100,
    include_memory: bool = True,
) -> Answer:
    """How many launches look inefficient: activities shorter than their call, long calls, long delays.

    The options are those of launch_stats. A graph launch counts its call once for each kernel. If no
    launch has both its call and its activity in the trace, all figures are missing, not zero.
    """
    answer = launch_summary_columns(_exact_launches(context, include_memory), runtime_cutoff, launch_delay_cutoff)
    work = context.get(gpu)
    if (work.call >= 0).any():
        return answer
    return Answer({name: [None] for name in answer.values}, [NO_LAUNCHES if len(work) else NO_GPU])


def launch_summary_columns(found: Launches, runtime_cutoff: float, launch_delay_cutoff: float) -> Answer:
    """The columns of the view launch_summary."""
    short, long_call, long_delay = found.flags(runtime_cutoff, launch_delay_cutoff)
    delay = found.delay / 1000
    some = len(delay) > 0
    return Answer(
        {
            "launches": [len(delay)],
            "short_activities": [int(short.sum())],
            "long_calls": [int(long_call.sum())],
            "long_delays": [int(long_delay.sum())],
            "cpu_us": [float(found.cpu.sum()) / 1000],
            "gpu_us": [float(found.gpu.sum()) / 1000],
            "mean_delay_us": [float(delay.mean()) if some else None],
            "median_delay_us": [float(np.median(delay)) if some else None],
            "max_delay_us": [float(delay.max()) if some else None],
        }
    )


def _exact_launches(context: Context, include_memory: bool) -> Launches:
    """Returns the launches by the start of the call."""
    work, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero((work.call >= 0) & (include_memory | (work.kind == 0)))
    call = work.call[rows]
    rows = rows[np.argsort(called.start[call], kind="stable")] if len(rows) else rows
    call = work.call[rows]
    return launches_of(
        work.correlation[rows].astype(np.int64),
        (called.name[call], called.start[call], called.end[call]),
        (work.name[rows], work.start[rows], work.end[rows]),
    )


def launches_of(
    correlation: Ints,
    call: tuple[Ints32, Ints, Ints],
    work: tuple[Ints32, Ints, Ints],
) -> Launches:
    """Returns launches from the name, start and end of their calls and of their activities."""
    delay = np.maximum(work[1] - call[2], 0)
    return Launches(correlation, call[0], work[0], call[2] - call[1], work[2] - work[1], delay)


@view(
    "op_kernel_delay",
    columns(
        ("op", "text", "", "operator"),
        ("kernels", "text", "", "kernels that it launched, in order"),
        ("kernel_count", "int", "", "number of these kernels"),
        ("count", "int", "", "runs of the operator with these kernels"),
        ("launch_delay_us", "float", "us", "mean time from the start of the operator to its first launch"),
        (
            "runtime_delay_us",
            "float",
            "us",
            "mean time from that launch to the start of its kernel; 0 if the kernel started earlier",
        ),
    ),
    nothing="no aten::… operator launched a kernel in the trace",
)
def op_kernel_delay(context: Context) -> Answer:
    """The sequences of kernels that ATen operators launch themselves, and the delays of the first kernel of each.

    A launch belongs to the innermost "aten::…" operator that is running on its thread when the call begins.
    """
    return delay_columns(context, _exact_op_launches(context))


def delay_columns(context: Context, found: OpLaunches, digits: int | None = None, notes: Sequence[str] = ()) -> Answer:
    """Returns the columns of the view. digits: rounding of delays."""
    first = np.flatnonzero(np.diff(found.op, prepend=-1))
    op_name, op_start = found.op_name[first], found.op_start[first]
    values = np.insert(found.kernel.astype(np.int64), first, op_name)
    sequences = group_sequences(values, first + np.arange(len(first)))
    launch_delay = np.bincount(sequences.number, found.launch[first] - op_start, len(sequences.size))
    runtime_delay = np.bincount(sequences.number, found.start[first] - found.launch[first], len(sequences.size))
    strings = context.trace.strings
    stops = [*first[1:].tolist(), len(found.op)]
    rows = []
    for place, example in enumerate(sequences.example.tolist()):
        kernels = [strings[name] for name in found.kernel[first[example] : stops[example]].tolist()]
        size = int(sequences.size[place])
        delays = [float(total[place]) / size / 1000 for total in (launch_delay, runtime_delay)]
        if digits is not None:
            delays = [float(np.round(delay, digits)) for delay in delays]
        rows.append((strings[op_name[example]], ARROW.join(kernels), len(kernels), size, *delays))
    rows.sort(key=lambda row: (-int(row[3]), row[0], row[1]))
    return op_kernel_delay.answer(rows, notes)


def _exact_op_launches(context: Context) -> OpLaunches:
    strings, table = context.trace.strings, context.trace.table("cpu_op")
    is_aten = np.array([text.startswith(ATEN) for text in strings], np.bool_)
    ops = table.take(np.flatnonzero(is_aten[table["name"]])) if len(strings) else table
    work, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero((work.kind == KERNEL) & (work.call >= 0))
    nested = nest_tables([ops], context.trace.window_end_ns)
    place = nested.innermost(called.thread, called.start)[work.call[rows]] if len(rows) else rows
    rows, place = rows[place >= 0], place[place >= 0]
    launch = called.start[work.call[rows]] if len(rows) else rows
    order = np.lexsort((work.start[rows], launch, place))
    rows, place, launch = rows[order], place[order], launch[order]
    row = nested.order[place]
    return OpLaunches(
        np.cumsum(np.diff(place, prepend=-1) != 0) - 1,
        ops["name"][row],
        ops["start"][row],
        launch,
        np.maximum(work.start[rows], launch),
        work.name[rows],
    )


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
    """Returns the queues of these changes.

    changes: time, change and track.
    where: device and stream.
    about: origin_ns, span_ns, uncounted.
    """
    time, change, track = changes
    first = np.flatnonzero(np.diff(track, prepend=-1))
    length = np.cumsum(change)  # every stream's changes sum to zero
    return Queues(time, *where, length, first, *about)


@view(
    "queue_length",
    _STREAM
    + columns(
        ("time_ns", "int", "ns", "Unix time of the change"),
        ("time_us", "float", "us", "time of the change, relative to the beginning of the trace"),
        ("queue_length", "int", "", "number of activities launched but not yet started, from this time on"),
    ),
    nothing=NO_LAUNCHES,
)
def queue_length(context: Context) -> Answer:
    """The number of launched activities that have not started yet, for each stream, at every change.

    The number grows when the launching call begins and shrinks when the activity starts. A graph launch adds all its
    kernels at once.
    """
    return length_columns(context.get(queues))


def length_columns(found: Queues) -> Answer:
    """The columns of the view queue_length."""
    return Answer(
        {
            "device": found.device if found.by_device else [None] * len(found.time),
            "stream": found.stream,
            "time_ns": found.time,
            "time_us": (found.time - found.origin_ns) / 1000,
            "queue_length": found.length,
        },
        _notes(found),
    )


@view(
    "queue_length_summary",
    _STREAM
    + statistics_columns("", "queue lengths after each change")
    + columns(("time_mean", "float", "", "mean weighted by time, from the first to the last change")),
    nothing=NO_LAUNCHES,
)
def queue_length_summary(context: Context) -> Answer:
    """Statistics of the values of queue_length for each stream. Each value counts once, no matter how long it lasted.

    Only time_mean weights each value by the time for which it lasted.
    """
    return queue_summary_columns(context.get(queues))


def queue_summary_columns(found: Queues) -> Answer:
    """The columns of the view queue_length_summary."""
    rows = []
    for part in found.parts():
        weights = np.diff(found.time[part])
        total = int(weights.sum())
        mean = float((found.length[part][:-1] * weights).sum() / total) if total else None
        rows.append({**_stream(found, part), **describe(found.length[part]), "time_mean": mean})
    return queue_length_summary.answer(rows, _notes(found))


@view(
    "blocked_on_full_queue",
    _STREAM
    + columns(
        ("blocked_us", "float", "us", "time in which the queue held at least max_queue_length activities"),
        ("blocked_pct", "float", "%", "share of the time from the first to the last event of the trace"),
    ),
    nothing="no queue was ever full",
)
def blocked_on_full_queue(context: Context, *, max_queue_length: int = MAX_QUEUE_LENGTH) -> Answer:
    """How long the queue of each stream was full, so that the next launch would have blocked.

    Streams whose queue was never full have no row.

    Options:
    - max_queue_length: the length at which a queue counts as full.
    """
    return blocked_columns(context.get(queues), max_queue_length)


def blocked_columns(found: Queues, max_queue_length: int, *, last_only: bool = False) -> Answer:
    """Returns the columns of the view blocked_on_full_queue. last_only: only of the last such stream."""
    rows: list[dict[str, Any]] = []
    for part in found.parts():
        full = found.length[part] >= max_queue_length
        if not full.any():
            continue
        blocked = int(np.diff(found.time[part])[full[:-1]].sum())
        share = 100 * blocked / found.span_ns if found.span_ns else None
        rows.append({**_stream(found, part), "blocked_us": blocked / 1000, "blocked_pct": share})
    if last_only:
        rows = rows[-1:]
    return blocked_on_full_queue.answer(rows, _notes(found))


def _stream(found: Queues, part: slice) -> dict[str, Any]:
    device = int(found.device[part.start]) if found.by_device else None
    return {"device": device, "stream": int(found.stream[part.start])}


def _notes(found: Queues) -> list[str]:
    return [f"GPU activities that {found.because} are not counted: {found.uncounted:,}"] if found.uncounted else []
