"""Times are milliseconds; samples come every 10 ms."""

from typing import Any

import numpy as np
import pytest
from kineto_trace.model.context import Context
from kineto_trace.structure.python_frames import MAX_SAMPLES, frames_in, python_frames
from support.trace_files.traces import START_NS, trace

MS = 1_000_000


def frame(name: str, start: float, end: float, samples: int = 0) -> dict[str, Any]:
    times = {"start": int(start * MS), "duration": int((end - start) * MS), "thread": 1}
    return {"name": name, **times, "samples": samples, "self_samples": samples, "running": samples}


def divided(
    rows: list[dict[str, Any]], intervals: list[tuple[float, float]], key: list[int] | None = None
) -> list[tuple[int, str | None, float]]:
    """Interval, function and length (ms) of each piece."""
    context = Context(trace({"python_function": rows}, length_ns=1000 * MS, sample_period_ns=10 * MS))
    frames = context.get(python_frames)
    start, end = (np.array([int(each[side] * MS) + START_NS for each in intervals]) for side in (0, 1))
    pieces, places = frames_in(frames, 1, start, end, np.array(key or [0] * len(intervals)))
    names = [context.trace.strings[int(frames.name[place])] if place >= 0 else None for place in places.tolist()]
    length = ((pieces.end - pieces.start) / MS).tolist()
    return list(zip(pieces.owner.tolist(), names, length, strict=True))


def test_recorded_calls_cut_where_frames_change() -> None:
    rows = [frame("a.py(1): a", 0, 50), frame("a.py(2): b", 10, 20)]
    assert divided(rows, [(5, 30), (60, 70)]) == [
        (0, "a.py(1): a", 5.0),
        (0, "a.py(2): b", 10.0),
        (0, "a.py(1): a", 10.0),
        (1, None, 10.0),
    ]


def test_samples_share_the_interval_that_they_are_in() -> None:
    rows = [frame("a.py(1): a", 0, 20, samples=2), frame("a.py(2): b", 20, 30, samples=1)]
    assert divided(rows, [(-1, 29)]) == [(0, "a.py(1): a", 10.0), (0, "a.py(1): a", 10.0), (0, "a.py(2): b", 10.0)]


def test_intervals_without_a_sample_are_like_those_of_the_same_key() -> None:
    rows = [frame("a.py(1): a", 100, 110, samples=1), frame("a.py(2): b", 200, 210, samples=1)]
    sampled, others = [(99, 101), (199, 201)], [(300, 302), (400, 402), (500, 502)]
    found = divided(rows, [*sampled, *others], key=[7, 7, 7, 7, 9])
    assert [name for _, name, _ in found] == ["a.py(1): a", "a.py(2): b", "a.py(1): a", "a.py(2): b", None]


def test_an_estimated_moment_close_to_an_edge_counts_on_neither_side() -> None:
    rows = [frame("a.py(1): a", 0, 20, samples=2)]
    assert divided(rows, [(9.5, 12)]) == [(0, None, 2.5)]
    assert divided(rows, [(8, 12)]) == [(0, "a.py(1): a", 4.0)]


@pytest.mark.slow
def test_a_file_with_a_tiny_period_has_no_more_samples_than_fit_into_memory() -> None:
    rows = [frame("a.py(1): a", 0, 900, samples=2)]
    context = Context(trace({"python_function": rows}, length_ns=1000 * MS, sample_period_ns=1))
    inside = np.array([START_NS + 10 * MS]), np.array([START_NS + 910 * MS])
    pieces, _ = frames_in(context.get(python_frames), 1, *inside, np.zeros(1, np.int64))
    assert len(pieces.owner) <= 2 * MAX_SAMPLES
    assert int((pieces.end - pieces.start).sum()) == 900 * MS
