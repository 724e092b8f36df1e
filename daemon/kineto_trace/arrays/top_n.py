"""Times by name, where names that take little are put together as "others".

Theory of operation
    If there are more than `limit` names, those are kept that take `ratio` of the time, the largest first, at most
    `limit`; the others are one row with the true statistics of all their events.

    HTA puts names together in the same case. The names that it keeps are those whose running sum
    is not above the `ratio`-quantile of all running sums (which is no share of time), and it then makes the
    statistics once more, of the sums instead of the events: mean, largest and smallest of a kept name are its sum.
    Names with a negative sum (its rounding makes them) are always kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OTHERS = "others"

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ByName:
    """One value per name. Times in the unit of the durations. count: events; HTA's others: names."""

    name: list[str]
    count: Ints
    sum: Floats
    max: Floats
    min: Floats
    mean: Floats
    std: Floats

    def __len__(self) -> int:
        return len(self.name)


def by_name(group: Ints, durations: Floats, names: Sequence[str]) -> ByName:
    """Statistics of each group. group: of each event, number into names; groups without events are left out."""
    order = np.argsort(group, kind="stable")
    group, durations = group[order], durations[order]
    first = np.flatnonzero(np.diff(group, prepend=-1))
    if not len(first):
        empty = np.empty(0)
        return ByName([], np.empty(0, np.int64), empty, empty, empty, empty, empty)
    count = np.diff(first, append=len(group))
    total = np.add.reduceat(durations, first)
    mean = total / count
    squares = np.add.reduceat((durations - np.repeat(mean, count)) ** 2, first)
    std = np.sqrt(squares / np.maximum(count - 1, 1))
    return ByName(
        name=[names[number] for number in group[first].tolist()],
        count=count,
        sum=total,
        max=np.maximum.reduceat(durations, first),
        min=np.minimum.reduceat(durations, first),
        mean=mean,
        std=np.where(count > 1, std, 0.0),
    )


def largest(
    events_group: Ints,
    durations: Floats,
    names: Sequence[str],
    *,
    ratio: float,
    limit: int,
    kept: frozenset[str] = frozenset(),
) -> ByName:
    """Returns the names that take most of the time, largest first, and all others as one.

    kept: names that are always listed.
    """
    every = by_name(events_group, durations, names)
    order = np.argsort(-every.sum, kind="stable")
    if len(order) <= limit:
        return _take(every, order)
    total = np.cumsum(every.sum[order])
    enough = int(np.searchsorted(total, ratio * total[-1] * (1 - 1e-12))) + 1
    few = min(max(enough, 1), limit)
    listed = [index for rank, index in enumerate(order.tolist()) if rank < few or every.name[index] in kept]
    place = {name: number for number, name in enumerate(names)}
    number = np.full(len(names), len(listed), np.int64)
    number[[place[every.name[index]] for index in listed]] = np.arange(len(listed))
    return by_name(number[events_group], durations, [*(every.name[index] for index in listed), OTHERS])


def as_hta(
    events_group: Ints,
    durations: Floats,
    names: Sequence[str],
    *,
    ratio: float,
    limit: int,
    kept: frozenset[str] = frozenset(),
) -> ByName:
    """Makes HTA's selection and statistics. kept: names that are never merged."""
    every = by_name(events_group, durations, names)
    every = _take(every, np.array(sorted(range(len(every)), key=lambda index: every.name[index]), np.int64))
    backwards = np.argsort(every.sum[::-1], kind="quicksort")  # pandas' descending order
    every = _take(every, (len(every) - 1 - backwards)[::-1])
    if len(every) <= limit:
        return every
    running = np.cumsum(every.sum)
    beyond = (running > np.quantile(running, ratio)) | (np.arange(len(every)) >= limit)
    if not kept:
        beyond &= every.sum >= 0
    final = [
        OTHERS if far and name not in kept else name for name, far in zip(every.name, beyond.tolist(), strict=True)
    ]
    again = sorted(set(final))
    number = {name: index for index, name in enumerate(again)}
    return by_name(np.array([number[name] for name in final], np.int64), every.sum, again)


def _take(every: ByName, order: Ints) -> ByName:
    return ByName(
        [every.name[index] for index in order.tolist()],
        *(getattr(every, field)[order] for field in ("count", "sum", "max", "min", "mean", "std")),
    )
