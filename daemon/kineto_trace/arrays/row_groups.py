"""Rows with equal keys, and sums over them. Keys are numbers (of names, shapes, stacks, devices, …)."""

from collections.abc import Sequence
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
        """For each group the sum of the rows' integer values (exact below 2**53)."""
        return sums(self.number, values, len(self.first))

    def sizes(self) -> Ints:
        """For each group the number of its rows."""
        return np.bincount(self.number, minlength=len(self.first))


def group(keys: Sequence[npt.NDArray[Any]]) -> Groups:
    """The groups of rows that are equal in all keys. There must be a key; rows are as many as its values."""
    number = _numbered(keys[0])
    for key in keys[1:]:
        further = _numbered(key)
        number = _numbered(number * (int(further.max(initial=0)) + 1) + further)
    first = np.empty(int(number.max(initial=-1)) + 1, np.int64)
    first[number[::-1]] = np.arange(len(number) - 1, -1, -1)
    return Groups(number, first)


def _numbered(key: npt.NDArray[Any]) -> Ints:
    """The values as numbers from 0 on."""
    interner = Interner()
    numbers: Ints = interner.intern(key.astype(np.int64).view(np.uint64)).astype(np.int64)
    return numbers


def sums(group_number: Ints, values: npt.NDArray[Any], count: int) -> Ints:
    """The sum of the integer values of each group 0 … count - 1 (exact below 2**53)."""
    total: Ints = np.bincount(group_number, weights=values, minlength=count).astype(np.int64)
    return total


def subtree_sums(values: npt.NDArray[Any], stop: npt.NDArray[Any]) -> Ints:
    """For each node of a tree in preorder: the sum over it and all below it. stop: the node after the last of these."""
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    found: Ints = running[stop] - running[:-1]
    return found
