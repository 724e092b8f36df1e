"""Which of many overlapping spans counts at each of many intervals: the one that is painted last.

Theory of operation
    The intervals of a track are dealt out to lanes on which they do not overlap (as Kineto's streams mostly are
    anyway). On a lane, sorted by start, the intervals that a span overlaps are neighbours. So a span paints a range
    of places, and the question is which range with the highest priority covers each place. Ranges are cut into two
    overlapping blocks whose length is a power of two; the blocks' priorities are then handed down from each length
    to the next shorter one, down to single places: all ranges and places at once, in as many rounds as the largest
    power has bits.
"""

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import lanes
from kineto_trace.arrays.id_sets import unique_values

NOTHING = -1
_LANES = 255

Ints = npt.NDArray[np.int64]


def innermost_spans(
    tracks: Ints, intervals: tuple[Ints, Ints], span_tracks: Ints, spans: tuple[Ints, Ints], priority: Ints
) -> Ints:
    """For each interval the place of the span of its track with the highest priority that overlaps it; NOTHING: none.

    Intervals and spans are (starts, ends). They overlap if each starts before the other one ends. priority: of each
    span, different numbers from 0 on.
    """
    known, track = np.unique(tracks, return_inverse=True)
    start, end = intervals
    order = np.lexsort((start, track))
    lane = np.zeros(len(order), np.int64)
    lane[order] = lanes(track[order].astype(np.uint32), start[order], np.maximum(end, start)[order], _LANES)
    found = np.full(len(tracks), NOTHING, np.int64)
    for number in unique_values(lane).tolist():
        rows = order[lane[order] == number]
        found[rows] = _painted(known[track[rows]], start[rows], end[rows], span_tracks, spans, priority)
    return found


def _painted(track: Ints, start: Ints, end: Ints, span_tracks: Ints, spans: tuple[Ints, Ints], priority: Ints) -> Ints:
    """The same for intervals of one lane that are sorted by track and start."""
    low = np.empty(len(span_tracks), np.int64)
    high = np.empty(len(span_tracks), np.int64)
    for number in unique_values(span_tracks).tolist():
        chosen = np.flatnonzero(span_tracks == number)
        first, stop = np.searchsorted(track, [number, number + 1])
        low[chosen] = first + np.searchsorted(np.maximum.accumulate(end[first:stop]), spans[0][chosen], side="right")
        high[chosen] = first + np.searchsorted(start[first:stop], spans[1][chosen], side="left")
    painting = np.flatnonzero(low < high)
    best = _highest(len(track), low[painting], high[painting], priority[painting])
    at = np.full(int(priority.max(initial=-1)) + 2, NOTHING, np.int64)  # the last one is for none
    at[priority] = np.arange(len(priority))
    return at[best]


def _highest(count: int, low: Ints, high: Ints, value: Ints) -> Ints:
    """For each place the highest value of the ranges [low, high) around it; NOTHING: none."""
    length = high - low
    level = np.frexp(length.astype(np.float64))[1] - 1  # 2**level <= length
    best = np.full(count, NOTHING, np.int64)
    for power in range(int(level.max(initial=0)), -1, -1):
        half = 1 << power
        if power < int(level.max(initial=0)):  # blocks of twice the length are two of this one
            wider = best.copy()
            np.maximum(best[half:], wider[: count - half], out=best[half:])
        chosen = level == power
        np.maximum.at(best, low[chosen], value[chosen])
        np.maximum.at(best, high[chosen] - half, value[chosen])
    return best
