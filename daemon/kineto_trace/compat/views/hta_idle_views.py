"""HTA's idle times in the view idle_breakdown."""

from collections.abc import Sequence

from kineto_trace.analysis.idle.idle_views import (
    CATEGORIES,
    OTHER,
    categorized,
    idle_breakdown,
    idle_columns,
    idle_row,
    tracks,
)
from kineto_trace.compat.hta.hta_frame import hta_frame
from kineto_trace.compat.hta.hta_gpu_events import hta_events
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat


@idle_breakdown.variant(Compat.HTA)
def hta_idle_breakdown(
    context: Context, *, consecutive_kernel_delay: float = 30, streams: Sequence[int] = ()
) -> Answer:
    """compat=hta: the figures of get_idle_time_breakdown.

    A gap begins at the end of the activity that started before, so it is negative where activities overlap. The first
    activity of a stream counts as "other" without a gap, and categories without activities have no row. The share and
    the statistics have two digits. For MTIA, the events mtia_ccp_events count. (HTA documents the delay in ns, but
    takes it as us.)
    """
    events, order = context.get(hta_events), context.get(hta_frame).order
    parts = sorted(tracks(events, events.stream), key=lambda part: int(part[0]))  # by the streams' first rows
    rows = []
    for part in parts:
        by_start = part[order(events.start[part])]
        delay_ns = round(consecutive_kernel_delay * 1000)
        gaps, category = categorized(events, by_start, events.end[by_start][:-1], delay_ns)
        rows += [
            idle_row(None, int(events.stream[part[0]]), number, gaps, category, digits=2)
            for number in range(len(CATEGORIES))
            if number == OTHER or (category == number).any()
        ]
    return idle_columns(events, parts, rows, streams)
