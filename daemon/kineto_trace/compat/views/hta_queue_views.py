"""HTA's queues in the views queue_length, queue_length_summary and blocked_on_full_queue.

HTA does not tell devices apart, and where a launch and a start share a microsecond it takes them in the order of an
unstable sort. It fails if calls share a correlation; the queues are then the exact ones.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kineto_trace.analysis.gpu_time.gpu_events import NOTHING
from kineto_trace.analysis.launches.queue_lengths import Queues, queues, queues_of
from kineto_trace.analysis.launches.queue_views import (
    MAX_QUEUE_LENGTH,
    blocked_columns,
    blocked_on_full_queue,
    length_columns,
    queue_length,
    queue_length_summary,
    summary_columns,
)
from kineto_trace.arrays.id_sets import is_in
from kineto_trace.compat.hta.hta_critical_path_gpu import launches
from kineto_trace.compat.hta.hta_frame import HtaError, hta_frame
from kineto_trace.compat.hta.hta_gpu_events import hta_events
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat


@queue_length.variant(Compat.HTA)
def hta_queue_length(context: Context) -> Answer:
    """compat=hta: the figures of get_queue_length_time_series: only calls that HTA knows as launches (no graphs)."""
    return _or_exact(context, length_columns, length_columns)


@queue_length_summary.variant(Compat.HTA)
def hta_queue_length_summary(context: Context) -> Answer:
    """compat=hta: the figures of get_queue_length_summary."""
    return _or_exact(context, summary_columns, summary_columns)


@blocked_on_full_queue.variant(Compat.HTA)
def hta_blocked_on_full_queue(context: Context, *, max_queue_length: int = MAX_QUEUE_LENGTH) -> Answer:
    """compat=hta: the figures of get_time_spent_blocked_on_full_queue: only the last such stream of each rank."""
    return _or_exact(
        context,
        lambda found: blocked_columns(found, max_queue_length, last_only=True),
        lambda found: blocked_columns(found, max_queue_length),
    )


def _or_exact(context: Context, hta: Callable[[Queues], Answer], exact: Callable[[Queues], Answer]) -> Answer:
    """HTA's figures, or where HTA fails the exact ones."""
    try:
        return hta(context.get(hta_queues))
    except HtaError as exc:
        answer = exact(context.get(queues))
        return Answer(answer.values, [exc.note, *answer.notes])


def hta_queues(context: Context) -> Queues:
    """HTA's queues. Raises HtaError."""
    frame, events = context.get(hta_frame), context.get(hta_events)
    is_launch = launches(context.trace.strings, frame)
    correlation = frame.correlation[events.row]
    known = (correlation >= 0) & is_in(correlation.astype(np.uint64), frame.correlation[is_launch].astype(np.uint64))
    rows = np.flatnonzero(known)
    keys, count = np.unique(correlation[rows], return_counts=True)
    of_call = frame.correlation[is_launch]
    at = np.minimum(np.searchsorted(keys, of_call), max(len(keys) - 1, 0))
    joined = np.where(keys[at] == of_call, count[at], 1).sum() if len(keys) else len(of_call)
    if joined != len(rows):
        raise HtaError("several launches have one correlation")
    called = frame.link[events.row[rows]]
    order = np.argsort(called, kind="stable")  # launches stand in the order of the calls
    time = np.concatenate([frame.start[called[order]], events.start[rows]])
    rows_ = np.concatenate([rows[order], rows])
    change = np.repeat([1, -1], len(rows))
    by_time = frame.order(time)
    by_time = by_time[np.argsort(events.track[rows_][by_time], kind="stable")]
    rows_ = rows_[by_time]
    span = int(np.ptp(frame.start)) if len(frame) else 0
    found = queues_of(
        (time[by_time], change[by_time], events.track[rows_]),
        (np.full(len(rows_), NOTHING, np.int64), events.stream[rows_]),
        (frame.origin_ns, span, int(np.count_nonzero(events.activity)) - len(rows)),
    )
    return replace(found, because="were not launched by a call that HTA knows", by_device=False)
