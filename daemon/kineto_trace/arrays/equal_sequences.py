"""Equal sequences among many: which instances have the same values in the same order.

Theory of operation
    Each sequence gets a 64-bit number that depends on its length and on each value and its place. Sequences with the
    same number are compared with one of them, value by value, so that the answer is exact; in the unlikely case that
    different ones share a number, another mixing is tried.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_TRIES = 8


class Grouped(NamedTuple):
    """number: of each sequence's group, from 0 on. example: one sequence of each group, the first. size: of each."""

    number: Ints
    example: Ints
    size: Ints


def group_sequences(values: Ints, first: Ints) -> Grouped:
    """Groups of equal sequences. Sequence i is values[first[i] : first[i + 1]], the last one goes to the end.

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
    raise RuntimeError("sequences could not be told apart")  # 2**-64 for each pair, eight times


def _mixed(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit numbers that spreads every bit over all (the finaliser of splitmix64)."""
    values = values + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) & (2**64 - 1))
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
