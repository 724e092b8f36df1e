"""Sets of disjoint intervals: union, difference, length, sweeps, overlaps and active sets.

Theory of operation
    Intervals are half-open, [start, end), with start <= end (ns). A union is a pair of arrays: starts and ends of
    intervals that are sorted and neither overlap nor touch. To make one, starts need not be kept with their ends: at
    the i-th start (from 0) a piece of the union begins exactly if i ends lie before it, that is, if the i-th smallest
    end does; so two independent sorts suffice, which cost nothing if the values are already in order.

Unions and overlaps of intervals as HTA makes them, which differ from those of sets where intervals end before
they begin or begin together: its rounding makes such ones. Times are integers of any unit.

Equal times are in the order of an unstable sort, numpy's quicksort, of the rows in HTA's order, as in HTA.

Finds which of many overlapping spans counts at each of many intervals: the one that is painted last.
    The intervals of a track are dealt out to lanes on which they do not overlap (as Kineto's streams mostly are
    anyway). On a lane, sorted by start, the intervals that a span overlaps are neighbours. So a span paints a range of
    places, and the range with the highest priority at each place is wanted. Ranges are cut into two overlapping blocks
    whose length is a power of two; the blocks' priorities are then passed from each length to the next shorter one,
    down to single places: all ranges and places at once, in as many rounds as the largest power has bits.

Finds which of several sets of intervals are active when, and cuts intervals where something changes.
    The boundaries of all sets, in order of time, divide time into spans in which nothing changes. The n-th bit of a
    span's mask says whether the n-th set is active in it. Intervals are half-open, times integers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.codec import lanes
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import NOTHING, Ints

_LANES = 255


class Union(NamedTuple):
    """Disjoint intervals in order."""

    start: Ints
    end: Ints

    def length(self) -> int:
        """Returns the total length of the union, in ns."""
        return int((self.end - self.start).sum())

    def before(self, time: Ints) -> Ints:
        """Returns for each time how much of the union (ns) lies before it."""
        if not len(self.start):
            return np.zeros(len(time), np.int64)
        total = np.concatenate([[0], np.cumsum(self.end - self.start)])
        at = np.searchsorted(self.start, time, side="right") - 1
        inside = np.minimum(time, self.end[at]) - self.start[at]
        found: Ints = np.where(at >= 0, total[at] + inside, 0)
        return found

    def within(self, low: Ints, high: Ints) -> Ints:
        """Returns for each [low, high) how much of it (ns) the union covers."""
        return self.before(high) - self.before(low)


class Merged(NamedTuple):
    """Intervals in order, none of which begins before the previous ones have ended."""

    start: Ints
    end: Ints

    def length(self) -> int:
        """Returns the sum of the ends minus the sum of the starts."""
        return int(self.end.sum() - self.start.sum())


class Sweep(NamedTuple):
    """What runs from `time` to `next_time`: the sum of the values of the active sets (powers of two)."""

    running: Ints
    time: Ints
    next_time: Ints

    def lengths(self) -> Ints:
        """Returns the length of each span."""
        return self.next_time - self.time


class Cut(NamedTuple):
    """Pieces of intervals, in the order of the intervals and of time. owner: number of the interval."""

    owner: Ints
    start: Ints
    end: Ints


class ActiveSets(NamedTuple):
    """From each time to the next one, the sets of the mask are active; before the first time none is."""

    time: Ints
    mask: Ints

    def at(self, moment: Ints) -> Ints:
        """Returns the mask at each moment."""
        if not len(self.time):
            return np.zeros(len(moment), np.int64)
        place = np.searchsorted(self.time, moment, side="right") - 1
        return np.where(place >= 0, self.mask[place], 0)


def containing(start: Ints, end: Ints, time: Ints) -> Ints:
    """Returns for each time the place of the interval that contains it, or NOTHING.

    start: ascends. If intervals overlap, only the one that began last counts.
    """
    if not len(start):
        return np.full(len(time), NOTHING)
    at = np.searchsorted(start, time, side="right") - 1
    found: Ints = np.where((at >= 0) & (time < end[at]), at, NOTHING)
    return found


def union(start: Ints, end: Ints) -> Union:
    """Returns the union of any intervals."""
    if not len(start):
        return Union(np.empty(0, np.int64), np.empty(0, np.int64))
    start, end = np.sort(start, kind="stable"), np.sort(end, kind="stable")  # stable: fast on nearly sorted values
    apart = end[:-1] < start[1:]
    return Union(
        start[np.concatenate([[True], apart])].astype(np.int64), end[np.concatenate([apart, [True]])].astype(np.int64)
    )


def intersection(first: Union, second: Union) -> Union:
    """Returns the time in both unions."""
    start = np.sort(np.concatenate([first.start, second.start]), kind="stable")
    end = np.sort(np.concatenate([first.end, second.end]), kind="stable")
    running_at_start = np.arange(len(start)) - np.searchsorted(end, start, side="right")
    running_at_end = np.searchsorted(start, end, side="left") - np.arange(len(end))
    return Union(start[running_at_start == 1], end[running_at_end == 2])


def difference(first: Union, second: Union) -> Union:
    """Returns the time in the first union but not in the second."""
    if not len(first.start):
        return first
    low, high = int(first.start[0]), int(first.end[-1])
    start = np.concatenate([[low], second.end.clip(low, high)])
    end = np.concatenate([second.start.clip(low, high), [high]])
    gaps = end > start
    return intersection(first, Union(start[gaps], end[gaps]))


def covered(start: Ints, end: Ints, low: int, high: int) -> int:
    """Returns the length (ns) of the union of the intervals inside [low, high)."""
    return union(np.clip(start, low, high), np.clip(end, low, high)).length()


def merge(start: Ints, end: Ints, order: Ints) -> Merged:
    """Joins intervals that overlap or touch. order: of the starts (HtaFrame.order)."""
    if not len(start):
        return Merged(start, end)
    start, end = start[order], end[order]
    begins = np.concatenate([[True], start[1:] > np.maximum.accumulate(end)[:-1]])
    first = np.flatnonzero(begins)
    return Merged(start[first], np.maximum.reduceat(end, first))


def sweep(sets: list[tuple[int, Merged]], *, one_by_one: bool) -> Sweep:
    """Returns which sets are active when. one_by_one: sort again after adding each set."""
    status, time = np.empty(0, np.int64), np.empty(0, np.int64)
    for value, merged in sets:
        count = len(merged.start)
        status = np.concatenate([status, np.repeat([value, -value], count)])
        time = np.concatenate([time, merged.start, merged.end])
        if one_by_one:
            order = _order(time)
            status, time = status[order], time[order]
    if not one_by_one:
        order = _order(time)
        status, time = status[order], time[order]
    return Sweep(np.cumsum(status)[:-1], time[:-1], time[1:])


def _order(time: Ints) -> Ints:
    return np.argsort(time.astype(np.float64), kind="quicksort")  # HTA's ends are floats if some rows have none


def innermost_spans(
    tracks: Ints, intervals: tuple[Ints, Ints], span_tracks: Ints, spans: tuple[Ints, Ints], priority: Ints
) -> Ints:
    """Returns for each interval the place of the highest-priority span of its track that overlaps it, or NOTHING.

    Intervals and spans are (starts, ends). They overlap if each starts before the other one ends.

    priority: of each span, different numbers from 0 on.
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
    """Does the same for intervals of one lane that are sorted by track and start."""
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
    """Returns for each place the highest value of the ranges [low, high) around it, or NOTHING."""
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


def active_sets(sets: Sequence[Union]) -> ActiveSets:
    """Returns when which of these sets (63 at most) are active."""
    time = np.concatenate([side for each in sets for side in each] or [np.empty(0, np.int64)])
    change = [np.repeat([1 << number, -(1 << number)], len(each.start)) for number, each in enumerate(sets)]
    order = np.argsort(time, kind="stable")
    mask = np.cumsum(np.concatenate([np.empty(0, np.int64), *change])[order])
    return ActiveSets(time[order], mask)


def ascending(time: Ints) -> Ints:
    """Returns each of these times once, in order. Faster than numpy.unique on nearly sorted values."""
    time = np.sort(time, kind="stable")
    return time[np.flatnonzero(np.diff(time, prepend=time[:1] - 1))]


def cut(start: Ints, end: Ints, time: Ints) -> Cut:
    """Cuts intervals at all of these times, which ascend. Pieces without length are left out."""
    first, last = np.searchsorted(time, start, side="right"), np.searchsorted(time, end, side="left")
    count = np.maximum(last - first, 0) + 1
    owner = np.repeat(np.arange(len(start)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    padded = np.append(time, 0)
    low = np.where(within == 0, start[owner], padded[np.minimum(first[owner] + within - 1, len(time))])
    high = np.where(within == count[owner] - 1, end[owner], padded[np.minimum(first[owner] + within, len(time))])
    lasting = high > low
    return Cut(owner[lasting], low[lasting], high[lasting])
