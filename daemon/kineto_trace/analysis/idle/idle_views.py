"""Why streams are idle between two of their activities."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU, NOTHING, GpuEvents, gpu_events
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.value_statistics import describe, statistics_columns
from kineto_trace.view_api.view import Answer, view

CATEGORIES = ("host_wait", "kernel_wait", "other")
HOST_WAIT, KERNEL_WAIT, OTHER = range(3)

Ints = npt.NDArray[np.int64]
Row = dict[str, float | str | None]


@view(
    "idle_breakdown",
    columns(
        ("device", "int", "", "GPU index in the process; missing with compat=hta"),
        ("stream", "int", "", "stream"),
        ("category", "text", "", "host_wait, kernel_wait or other: see above"),
        ("idle_us", "float", "us", "sum of the gaps"),
        ("idle_pct", "float", "%", "share of the stream's idle time"),
    )
    + statistics_columns("us", "gaps", "_us"),
)
def idle_breakdown(
    context: Context,
    *,
    consecutive_kernel_delay: float = 30,
    streams: Sequence[int] = (),
) -> Answer:
    """The gaps between the kernels, copies and fills of each stream, by cause.

    A gap is the time from the end of all earlier activities of the stream to the start of the next one. Its categories:
    - host_wait: the call that launched the next activity began only after the gap had begun.
    - kernel_wait: the activity was launched in time, and the gap is shorter than consecutive_kernel_delay: the overhead
      of starting kernels one after the other.
    - other: neither; for example, the stream waited for an event of another stream.

    Options:
    - consecutive_kernel_delay: in us.
    - streams: only these streams; all if not given.
    """
    events = context.get(gpu_events)
    parts = tracks(events, events.track)
    gaps = [_gaps(events, part, round(consecutive_kernel_delay * 1000)) for part in parts]
    rows = [
        idle_row(int(events.device[part[0]]), int(events.stream[part[0]]), number, *found)
        for part, found in zip(parts, gaps, strict=True)
        for number in range(len(CATEGORIES))
    ]
    return idle_columns(events, parts, rows, streams)


def tracks(events: GpuEvents, keys: Ints) -> list[Ints]:
    """The activities with equal keys, each part in the order of events."""
    rows = np.flatnonzero(events.activity)
    order = rows[np.argsort(keys[rows], kind="stable")]
    first = np.flatnonzero(np.diff(keys[order], prepend=-2))
    return np.split(order, first[1:]) if len(order) else []


def idle_row(
    device: int | None, stream: int, number: int, gaps: Ints, category: Ints, digits: int | None = None
) -> Row:
    """The row of one stream and one category. gaps: of the stream, in ns; digits: what figures are rounded to."""
    chosen, total = gaps[category == number], int(gaps.sum())
    ratio = int(chosen.sum()) / total if total else float("nan")
    statistics = describe(chosen / 1000, "_us")
    if digits is not None:
        ratio = float(np.round(ratio, digits))
        statistics = {key: float(np.round(value, digits)) for key, value in statistics.items()}
    return {
        "device": device,
        "stream": stream,
        "category": CATEGORIES[number],
        "idle_us": int(chosen.sum()) / 1000,
        "idle_pct": 100 * ratio,
        **statistics,
    }


def idle_columns(events: GpuEvents, parts: Sequence[Ints], rows: Sequence[Row], streams: Sequence[int]) -> Answer:
    """The columns of the view: those of these streams; (): of all."""
    shown = [row for row in rows if not len(streams) or row["stream"] in streams]
    counted = [part for part in parts if not len(streams) or int(events.stream[part[0]]) in streams]
    missing = sum(int(np.count_nonzero(events.launch[part] == NOTHING)) for part in counted)
    notes = [] if parts else [NO_GPU]
    if parts and not shown:
        known = sorted({int(events.stream[part[0]]) for part in parts})
        notes.append(f"no GPU activity ran on these streams; the trace has {', '.join(map(str, known))}")
    if missing:
        notes.append(f"{missing:,} activities have no launch in the trace; their gaps count as kernel_wait or other")
    return Answer({column.name: [row[column.name] for row in shown] for column in idle_breakdown.columns}, notes)


def _gaps(events: GpuEvents, part: Ints, delay_ns: int) -> tuple[Ints, Ints]:
    """The gaps (ns) before the activities of one stream, without the first, and their categories."""
    gap, category = categorized(events, part, np.maximum.accumulate(events.end[part])[:-1], delay_ns)
    return gap[gap > 0], category[gap > 0]


def categorized(events: GpuEvents, part: Ints, before: Ints, delay_ns: int) -> tuple[Ints, Ints]:
    """The gaps (ns) from `before` to the next activity, and their categories."""
    next_ = part[1:]
    gap = events.start[next_] - before
    launch = events.launch[next_]
    late = (launch != NOTHING) & (launch > before)
    return gap, np.where(late, HOST_WAIT, np.where(gap < delay_ns, KERNEL_WAIT, OTHER))
