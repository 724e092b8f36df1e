"""Groups of equal rows, sums over them and over subtrees, the largest of them, and sequences that are equal.

Also sums times by name, with short ones merged as "others".

Theory of operation
    If there are more than `limit` names, those that take `ratio` of the time are kept, largest first, at most `limit`;
    the others are one row with the true statistics of all their events.

    HTA merges names in the same case. It keeps the names whose running sum is not above the `ratio`-quantile of all
    running sums (which is not a share of time), and then computes the statistics again, of the sums instead of the
    events: mean, largest and smallest of a kept name are its sum. Names with a negative sum (its rounding makes them)
    are always kept.

Also finds equal sequences among many: instances with the same values in the same order.
    Each sequence gets a 64-bit number that depends on its length and on each value and its place. Sequences with the
    same number are compared with one of them, value by value, so that the answer is exact; in the unlikely case that
    different ones share a number, another mixing is tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.codec import Interner
from kineto_trace.base.array_types import AnyArray, Flags, Floats, Ints, UInts64

OTHERS = "others"
_TRIES = 8


class Groups(NamedTuple):
    """number: of each row's group, from 0 on in the order of first appearance. first: the first row of each group."""

    number: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.first)

    def sums(self, values: AnyArray) -> Ints:
        """Returns for each group the sum of the rows' integer values (exact below 2**53)."""
        return sums(self.number, values, len(self.first))

    def sizes(self) -> Ints:
        """Returns the number of rows of each group."""
        return np.bincount(self.number, minlength=len(self.first))


@dataclass(frozen=True, slots=True)
class ByName:
    """One value per name. Times in the unit of the durations. count: number of events; for HTA's others, of names."""

    name: list[str]
    count: Ints
    sum: Floats
    max: Floats
    min: Floats
    mean: Floats
    std: Floats

    def __len__(self) -> int:
        return len(self.name)


class Grouped(NamedTuple):
    """number: of each sequence's group, from 0 on. example: the first sequence of each group. size: of each."""

    number: Ints
    example: Ints
    size: Ints


def group(keys: Sequence[AnyArray]) -> Groups:
    """Groups rows that are equal in all keys. At least one key is required; all have one value per row."""
    number = _numbered(keys[0])
    for key in keys[1:]:
        further = _numbered(key)
        number = _numbered(number * (int(further.max(initial=0)) + 1) + further)
    first = np.empty(int(number.max(initial=-1)) + 1, np.int64)
    first[number[::-1]] = np.arange(len(number) - 1, -1, -1)
    return Groups(number, first)


def places_by_value(values: AnyArray) -> Iterator[tuple[int, Ints]]:
    """Yields each integer of the array, ascending, with its places, ascending."""
    order = np.argsort(values, kind="stable")
    found, first = np.unique(values[order], return_index=True)
    bounds = np.append(first, len(order)).tolist()
    for value, begin, end in zip(found.tolist(), bounds, bounds[1:], strict=False):
        yield value, order[begin:end]


def _numbered(key: AnyArray) -> Ints:
    """Returns the values as numbers counted from 0."""
    interner = Interner()
    numbers: Ints = interner.intern(key.astype(np.int64).view(np.uint64)).astype(np.int64)
    return numbers


def sums(group_number: Ints, values: AnyArray, count: int) -> Ints:
    """Returns the sum of the integer values of each group 0 … count - 1 (exact below 2**53)."""
    total: Ints = np.bincount(group_number, weights=values, minlength=count).astype(np.int64)
    return total


def in_subtrees(chosen: Flags, stop: AnyArray) -> Flags:
    """Returns for each node of a tree in preorder whether it, or one above it, is chosen. stop: as of subtree_sums."""
    change = np.zeros(len(stop) + 1, np.int64)
    places = np.flatnonzero(chosen)
    np.add.at(change, places, 1)
    np.add.at(change, stop[places], -1)
    found: Flags = np.cumsum(change)[:-1] > 0
    return found


def below_equals(key: AnyArray, stop: AnyArray) -> Flags:
    """Returns for each node of a tree in preorder whether one above it has its key. stop: as of subtree_sums."""
    count = len(stop)
    order = np.argsort(key, kind="stable")
    part = np.zeros(count, np.int64)  # equal keys are one part, in preorder; the parts do not extend into each other
    np.cumsum(key[order][1:] != key[order][:-1], out=part[1:])
    reach = np.maximum.accumulate(stop[order] + part * (count + 1))
    found = np.zeros(count, np.bool_)
    found[order[1:]] = reach[:-1] > order[1:] + part[1:] * (count + 1)
    return found


def subtree_sums(values: AnyArray, stop: AnyArray) -> Ints:
    """Returns for each node of a tree in preorder the sum over its subtree. stop: the node after the subtree."""
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    found: Ints = running[stop] - running[:-1]
    return found


def by_name(group: Ints, durations: Floats, names: Sequence[str]) -> ByName:
    """Returns the statistics of each group. group: of each event, number into names; empty groups are left out."""
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


def group_sequences(values: Ints, first: Ints) -> Grouped:
    """Groups equal sequences. Sequence i is values[first[i] : first[i + 1]], the last one extends to the end.

    No sequence may be empty.
    """
    count = len(first)
    if not count:
        empty = np.empty(0, np.int64)
        return Grouped(empty, empty, empty)
    length = np.diff(first, append=len(values))
    place = np.arange(len(values)) - np.repeat(first, length)
    for seed in range(_TRIES):
        keys = np.add.reduceat(
            _mixed(_mixed(values.astype(np.uint64), seed) + place.astype(np.uint64), seed + 1), first
        )
        keys += _mixed(length.astype(np.uint64), seed)
        _, example, number, sizes = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        like = example[number]
        if (length[like] == length).all():
            same = values == values[np.repeat(first[like], length) + place]
            if same.all():
                order = np.argsort(example)
                renumbered = np.empty(len(order), np.int64)
                renumbered[order] = np.arange(len(order))
                return Grouped(renumbered[number], example[order], sizes[order])
    raise RuntimeError("sequences could not be told apart")  # probability 2**-64 for each pair, eight times


def _mixed(values: UInts64, seed: int) -> UInts64:
    """A bijection of 64-bit numbers that spreads every bit over all (the finaliser of splitmix64)."""
    values = values + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) & (2**64 - 1))
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
