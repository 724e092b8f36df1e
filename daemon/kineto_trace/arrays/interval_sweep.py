"""Unions and overlaps of intervals as HTA makes them, which differ from those of sets where intervals end before
they begin or begin together: its rounding makes such ones. Times are integers of any unit.

The order of equal times is that of an unstable sort, numpy's quicksort, of the rows in HTA's order, as in HTA.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Merged(NamedTuple):
    """Intervals in order, none of which begins before the previous ones have ended."""

    start: Ints
    end: Ints

    def length(self) -> int:
        """Returns the sum of the ends minus the sum of the starts."""
        return int(self.end.sum() - self.start.sum())


class Sweep(NamedTuple):
    """What runs from `time` to `next_time`, as the sum of the values of the sets (powers of two)."""

    running: Ints
    time: Ints
    next_time: Ints

    def lengths(self) -> Ints:
        """Returns the length of each stretch."""
        return self.next_time - self.time


def merge(start: Ints, end: Ints, order: Ints) -> Merged:
    """Joins intervals that overlap or touch. order: of the starts (HtaFrame.order)."""
    if not len(start):
        return Merged(start, end)
    start, end = start[order], end[order]
    begins = np.concatenate([[True], start[1:] > np.maximum.accumulate(end)[:-1]])
    first = np.flatnonzero(begins)
    return Merged(start[first], np.maximum.reduceat(end, first))


def sweep(sets: list[tuple[int, Merged]], *, one_by_one: bool) -> Sweep:
    """Determines what runs when. one_by_one: sort again after adding each set."""
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
    return np.argsort(time.astype(np.float64), kind="quicksort")  # HTA's ends are floats where some rows have none
