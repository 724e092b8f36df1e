"""Times of sampled Python slices that nest with the exact events of their threads: viewers drop what overlaps in part.

Theory of operation
    Sampled slices begin and end with samples, somewhere inside ops, annotations, calls and exact Python calls.

    - A slice that begins inside an event and outlives it was running before that event, as its caller: it begins
      where the event begins. Unless another slice was seen inside the event before it: then it has the longer one of
      the parts before and after the event's end.
    - A slice that began before an event and ends inside it ends where the event begins: the thread's next sample no
      longer found it. When its thread has no next sample because the recording ends, and it was seen inside the event,
      it called the event and ends with it.

    So slices cut no event, none begins before the one before it was gone, and none outlasts its thread's next sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.model.trace import NO_ROW
from kineto_trace.structure.nesting import Ints, Nested

_LONG_AGO = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Slices:
    """Sampled slices. parent: place among these of the calling frame's slice, NO_ROW: none. depth: as recorded."""

    thread: npt.NDArray[np.uint32]
    start: Ints
    end: Ints
    parent: npt.NDArray[Any]
    depth: npt.NDArray[Any]


def snapped(slices: Slices, nested: Nested, period_ns: int) -> tuple[Ints, Ints]:
    """Starts and ends of the slices that overlap none of the nested events in part, as far as samples can tell."""
    begins, stops = nested.events.start, nested.tree.end
    floor = _seen_before(slices)
    inside = _outermost(
        nested,
        slices.thread,
        slices.start,
        lambda rows, place: (stops[place] < slices.end[rows]) & (floor[rows] < begins[place]),
    )
    start = np.where(inside >= 0, begins[inside], slices.start)
    end = slices.end.copy()
    inside = _outermost(
        nested, slices.thread, start, lambda rows, place: (stops[place] < end[rows]) & (begins[place] < start[rows])
    )
    cut = np.flatnonzero(inside >= 0)
    after = stops[inside[cut]]
    later = cut[end[cut] - after > after - start[cut]]
    start[later] = stops[inside[later]]  # the other ones stay inside: the tree ends them with the event
    inside = _outermost(nested, slices.thread, end, lambda rows, place: begins[place] > slices.start[rows])
    last_seen = np.maximum(slices.start, slices.end - period_ns)
    called = _is_last(slices, period_ns) & (begins[inside] <= last_seen)
    moved = np.where(called, stops[inside], begins[inside])
    return start, np.where(inside >= 0, moved, end)


def _seen_before(slices: Slices) -> Ints:
    """For each slice where the last slice began that is over when it begins, its caller's included.

    Whatever that one was seen inside of, this slice did not call.
    """
    floor = np.full(len(slices.start), _LONG_AGO)
    order = np.lexsort((slices.start, slices.depth, slices.thread))
    same = (slices.thread[order[1:]] == slices.thread[order[:-1]]) & (
        slices.depth[order[1:]] == slices.depth[order[:-1]]
    )
    before = np.full(len(slices.start), NO_ROW)
    before[order[1:][same]] = order[:-1][same]
    by_depth = np.argsort(slices.depth, kind="stable")
    bounds = np.searchsorted(slices.depth[by_depth], unique_values(slices.depth), "left")
    for rows in np.split(by_depth, bounds[1:]):
        above = np.where(slices.parent[rows] >= 0, floor[slices.parent[rows]], _LONG_AGO)
        own = np.where(before[rows] >= 0, slices.start[before[rows]], _LONG_AGO)
        floor[rows] = np.maximum(above, own)
    return floor


def _is_last(slices: Slices, period_ns: int) -> npt.NDArray[np.bool_]:
    """Which slices end with the recording, and not since their thread was seen elsewhere or vanished."""
    threads, place = np.unique(slices.thread, return_inverse=True)
    last = np.full(len(threads), _LONG_AGO)
    np.maximum.at(last, place.reshape(-1), slices.end)
    recorded = slices.end >= slices.end.max(initial=_LONG_AGO) - 2 * period_ns
    found: npt.NDArray[np.bool_] = recorded & (slices.end == last[place.reshape(-1)])
    return found


def _outermost(
    nested: Nested,
    thread: npt.NDArray[Any],
    time: Ints,
    wanted: Callable[[npt.NDArray[Any], npt.NDArray[np.int32]], npt.NDArray[np.bool_]],
) -> npt.NDArray[np.int32]:
    """For each moment the outermost event around it that is wanted, -1: none.

    `wanted` says it for rows and places; it must be false for all that is around an event for which it is false.
    """
    found = np.full(len(time), -1, np.int32)
    above = nested.innermost(thread, time)
    rows = np.arange(len(time))
    while len(rows):
        rows = rows[above[rows] >= 0]
        rows = rows[wanted(rows, above[rows])]
        found[rows] = above[rows]
        above[rows] = nested.tree.parent[above[rows]]
    return found
