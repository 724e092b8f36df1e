"""Why streams are idle between two of their activities."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NOTHING, GpuEvents, gpu_events
from kineto_trace.compat.hta.hta_frame import hta_frame
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.value_statistics import describe, statistics_columns
from kineto_trace.view_api.view import Answer, Compat, view

CATEGORIES = ("host_wait", "kernel_wait", "other")
HOST_WAIT, KERNEL_WAIT, OTHER = range(3)

Ints = npt.NDArray[np.int64]


@view(
    "idle_breakdown",
    columns(
        ("device", "int", "", "GPU as the process numbers it; missing: HTA's figures"),
        ("stream", "int", "", "stream"),
        ("category", "text", "", "host_wait: the next activity was launched too late; kernel_wait; other"),
        ("idle_us", "float", "us", "sum of the gaps"),
        ("idle_pct", "float", "%", "of the stream's idle time"),
    )
    + statistics_columns("us", "gaps", "_us"),
    compat=(Compat.HTA,),
)
def idle_breakdown(
    context: Context,
    *,
    consecutive_kernel_delay: float = 30,
    streams: Sequence[int] = (),
    compat: Compat = Compat.NONE,
) -> Answer:
    """The gaps between the kernels, copies and fills of each stream, by their cause.

    A gap is the time from the end of all earlier activities of the stream to the start of the next one.
    - host_wait: the call that launched the next activity began only after the gap had begun;
    - kernel_wait: it was launched in time, and the gap is shorter than consecutive_kernel_delay (us): the overhead
      of starting kernels one after the other;
    - other: neither, for instance the stream waited for an event of another stream.

    Options: consecutive_kernel_delay (us); streams: only these (default: all).

    HTA's figures (get_idle_time_breakdown): a gap begins at the end of the activity that started before, so it is
    negative where activities overlap; the first activity of a stream counts as "other" without a gap, and categories
    without activities have no row; the share and the statistics have two digits; of MTIA the events
    mtia_ccp_events count (HTA documents the delay in ns, but takes it as us).
    """
    events = gpu_events(context, compat)
    keys = events.stream if compat is Compat.HTA else events.track
    rows = np.flatnonzero(events.activity)
    order = rows[np.argsort(keys[rows], kind="stable")]
    first = np.flatnonzero(np.diff(keys[order], prepend=-2))
    parts = np.split(order, first[1:]) if len(order) else []
    if compat is Compat.HTA:
        parts.sort(key=lambda part: int(part[0]))  # in the order of the streams' first rows
    values: dict[str, list[float | str | None]] = {column.name: [] for column in idle_breakdown.columns}
    missing = 0
    for part in parts:
        stream = int(events.stream[part[0]])
        if len(streams) and stream not in streams:
            continue
        missing += int(np.count_nonzero(events.launch[part] == NOTHING))
        gaps, category = _gaps(context, events, part, round(consecutive_kernel_delay * 1000), compat)
        total = int(gaps.sum())
        for number, name in enumerate(CATEGORIES):
            chosen = gaps[category == number]
            if compat is Compat.HTA and not len(chosen) and number != OTHER:
                continue
            ratio = int(chosen.sum()) / total if total else float("nan")
            share = 100 * (float(np.round(ratio, 2)) if compat is Compat.HTA else ratio)
            statistics = describe(chosen / 1000, "_us")
            if compat is Compat.HTA:
                statistics = {key: float(np.round(value, 2)) for key, value in statistics.items()}
            row = {
                "device": None if compat is Compat.HTA else int(events.device[part[0]]),
                "stream": stream,
                "category": name,
                "idle_us": int(chosen.sum()) / 1000,
                "idle_pct": share,
                **statistics,
            }
            for column, value in row.items():
                values[column].append(value)
    notes = []
    if missing:
        notes.append(f"{missing:,} activities have no launch in the trace; their gaps count as kernel_wait or other")
    return Answer(values, notes)


def _gaps(context: Context, events: GpuEvents, part: Ints, delay_ns: int, compat: Compat) -> tuple[Ints, Ints]:
    """The gaps (ns) before the activities of one stream, without the first, and their categories."""
    if compat is Compat.HTA:
        part = part[context.get(hta_frame).order(events.start[part])]
        before = events.end[part][:-1]
    else:
        before = np.maximum.accumulate(events.end[part])[:-1]
    next_ = part[1:]
    gap = events.start[next_] - before
    launch = events.launch[next_]
    late = (launch != NOTHING) & (launch > before)
    category = np.where(late, HOST_WAIT, np.where(gap < delay_ns, KERNEL_WAIT, OTHER))
    if compat is Compat.HTA:
        return gap, category
    return gap[gap > 0], category[gap > 0]
