"""Which of several sets of intervals are active when, and intervals cut where something changes.

Theory of operation
    The boundaries of all sets, in order of time, divide time into stretches in which nothing changes. The n-th bit of a
    stretch's mask tells whether the n-th set is active in it. Intervals are half-open, times integers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.intervals import Union

Ints = npt.NDArray[np.int64]


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


def active_sets(sets: Sequence[Union]) -> ActiveSets:
    """Returns when which of these sets (63 at most) are active."""
    time = np.concatenate([side for each in sets for side in each] or [np.empty(0, np.int64)])
    change = [np.repeat([1 << number, -(1 << number)], len(each.start)) for number, each in enumerate(sets)]
    order = np.argsort(time, kind="stable")
    mask = np.cumsum(np.concatenate([np.empty(0, np.int64), *change])[order])
    return ActiveSets(time[order], mask)


def ascending(time: Ints) -> Ints:
    """Returns each of these times once, in order. Faster than numpy.unique on what is nearly sorted."""
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
