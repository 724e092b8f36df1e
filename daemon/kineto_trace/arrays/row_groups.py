"""Rows with equal keys, and sums over them. Keys are numbers (of names, shapes, stacks, devices, …)."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Interner

Ints = npt.NDArray[np.int64]


class Groups(NamedTuple):
    """number: of each row's group, from 0 on in the order of first appearance. first: the first row of each group."""

    number: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.first)

    def sums(self, values: npt.NDArray[Any]) -> Ints:
        """Returns for each group the sum of the rows' integer values (exact below 2**53)."""
        return sums(self.number, values, len(self.first))

    def sizes(self) -> Ints:
        """Returns the number of rows of each group."""
        return np.bincount(self.number, minlength=len(self.first))


def group(keys: Sequence[npt.NDArray[Any]]) -> Groups:
    """Groups rows that are equal in all keys. At least one key is required; all have one value per row."""
    number = _numbered(keys[0])
    for key in keys[1:]:
        further = _numbered(key)
        number = _numbered(number * (int(further.max(initial=0)) + 1) + further)
    first = np.empty(int(number.max(initial=-1)) + 1, np.int64)
    first[number[::-1]] = np.arange(len(number) - 1, -1, -1)
    return Groups(number, first)


def places_by_value(values: npt.NDArray[Any]) -> Iterator[tuple[int, Ints]]:
    """Yields each integer of the array, ascending, with the places at which it is, ascending."""
    order = np.argsort(values, kind="stable")
    found, first = np.unique(values[order], return_index=True)
    bounds = np.append(first, len(order)).tolist()
    for value, begin, end in zip(found.tolist(), bounds, bounds[1:], strict=False):
        yield value, order[begin:end]


def _numbered(key: npt.NDArray[Any]) -> Ints:
    """Returns the values as numbers counted from 0."""
    interner = Interner()
    numbers: Ints = interner.intern(key.astype(np.int64).view(np.uint64)).astype(np.int64)
    return numbers


def sums(group_number: Ints, values: npt.NDArray[Any], count: int) -> Ints:
    """Returns the sum of the integer values of each group 0 … count - 1 (exact below 2**53)."""
    total: Ints = np.bincount(group_number, weights=values, minlength=count).astype(np.int64)
    return total


def in_subtrees(chosen: npt.NDArray[np.bool_], stop: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tells for each node of a tree in preorder whether it, or one above it, is chosen. stop: as of subtree_sums."""
    change = np.zeros(len(stop) + 1, np.int64)
    places = np.flatnonzero(chosen)
    np.add.at(change, places, 1)
    np.add.at(change, stop[places], -1)
    found: npt.NDArray[np.bool_] = np.cumsum(change)[:-1] > 0
    return found


def below_equals(key: npt.NDArray[Any], stop: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tells for each node of a tree in preorder whether one above it has its key. stop: as of subtree_sums."""
    count = len(stop)
    order = np.argsort(key, kind="stable")
    part = np.zeros(count, np.int64)  # equal keys are one part, in preorder; the parts do not reach into each other
    np.cumsum(key[order][1:] != key[order][:-1], out=part[1:])
    reach = np.maximum.accumulate(stop[order] + part * (count + 1))
    found = np.zeros(count, np.bool_)
    found[order[1:]] = reach[:-1] > order[1:] + part[1:] * (count + 1)
    return found


def subtree_sums(values: npt.NDArray[Any], stop: npt.NDArray[Any]) -> Ints:
    """Returns for each node of a tree in preorder the sum over its subtree. stop: the node after the subtree."""
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    found: Ints = running[stop] - running[:-1]
    return found
