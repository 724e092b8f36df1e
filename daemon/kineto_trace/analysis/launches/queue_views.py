"""Launched work that waits in the queues of streams."""

from typing import Any

import numpy as np

from kineto_trace.analysis.launches.launch_views import NO_LAUNCHES
from kineto_trace.analysis.launches.queue_lengths import Queues, queues
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.value_statistics import describe, statistics_columns
from kineto_trace.view_api.view import Answer, view

MAX_QUEUE_LENGTH = 1024  # from about here on CUDA blocks the launching call

_STREAM = columns(
    ("device", "int", "", "GPU index in the process; missing with compat=hta"),
    ("stream", "int", "", "stream"),
)


@view(
    "queue_length",
    _STREAM
    + columns(
        ("time_ns", "int", "ns", "Unix time of the change"),
        ("time_us", "float", "us", "the same, relative to the beginning of the trace"),
        ("queue_length", "int", "", "from this time on: number of activities that are launched but not started"),
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
    + statistics_columns("", "queue lengths, one per change")
    + columns(("time_mean", "float", "", "mean over time, from the first to the last change")),
    nothing=NO_LAUNCHES,
)
def queue_length_summary(context: Context) -> Answer:
    """Statistics of the values of queue_length for each stream. Each change counts once, however long it lasts.

    time_mean weights each value by the time that it lasted.
    """
    return summary_columns(context.get(queues))


def summary_columns(found: Queues) -> Answer:
    """The columns of the view queue_length_summary."""
    rows = []
    for part in found.parts():
        weights = np.diff(found.time[part])
        total = int(weights.sum())
        mean = float((found.length[part][:-1] * weights).sum() / total) if total else None
        rows.append({**_stream(found, part), **describe(found.length[part]), "time_mean": mean})
    names = [column.name for column in queue_length_summary.columns]
    return Answer({name: [row[name] for row in rows] for name in names}, _notes(found))


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
    """The columns of the view blocked_on_full_queue. last_only: of the last such stream."""
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
    names = [column.name for column in blocked_on_full_queue.columns]
    return Answer({name: [row[name] for row in rows] for name in names}, _notes(found))


def _stream(found: Queues, part: slice) -> dict[str, Any]:
    device = int(found.device[part.start]) if found.by_device else None
    return {"device": device, "stream": int(found.stream[part.start])}


def _notes(found: Queues) -> list[str]:
    return [f"{found.uncounted:,} GPU activities {found.because} and are not counted"] if found.uncounted else []
