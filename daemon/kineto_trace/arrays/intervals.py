"""Interval algebra on arrays: unions of many intervals at once.

Theory of operation
    Intervals are half-open, [start, end), with start <= end (ns). A union is a pair of arrays: starts and ends of
    intervals that are sorted and neither overlap nor touch. To make one, no start has to be kept with its end: at
    the i-th start (from 0) a piece of the union begins exactly if i ends lie before it, thus if the i-th smallest
    end does; so two independent sorts do, which cost nothing where the values are in order already.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NOTHING = -1

Ints = npt.NDArray[np.int64]


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


def containing(start: Ints, end: Ints, time: Ints) -> Ints:
    """Returns for each time the place of the interval that it lies in; NOTHING: none.

    start: ascends. Of intervals that overlap only the one that began last is looked at.
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
    start, end = np.sort(start, kind="stable"), np.sort(end, kind="stable")  # stable: fast on what is nearly sorted
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
