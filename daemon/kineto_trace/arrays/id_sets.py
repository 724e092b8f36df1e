"""Distinct values, look-ups of many ids at once, and searches in sorted ranges.

Also finds, for many queries at once, the last element before a place whose value is large enough.

Theory of operation
    Maxima of blocks of 1, 2, 4, … values form a tree. A query climbs from its place to larger blocks on the left until
    one has a value that is large enough, and then descends in it, to the right where possible. All queries are
    processed together, in as many rounds as the tree has levels.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Interner
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Ints, UInts64

_TABLE_LIMIT = 1 << 27  # ids: a table of one byte each
_BLOCK_ROWS = 1 << 20


def distinct(values: AnyArray) -> UInts64:
    """Returns the distinct values (as unsigned 64-bit numbers) in the order of their first appearance."""
    interner = Interner()
    interner.intern(values.astype(np.uint64))
    return interner.keys()


def unique_values(values: npt.ArrayLike) -> AnyArray:
    """Returns the values that occur, ascending, as np.unique(values) does.

    np.unique uses a hash table since NumPy 2.3, which takes 70 times as long for a million different numbers.
    """
    ordered: AnyArray = np.sort(values, axis=None)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    found: AnyArray = ordered[first]
    return found


def is_in(wanted: AnyArray, values: AnyArray) -> Flags:
    """Returns for each wanted id (unsigned) whether it is among the values (of the same type)."""
    if not len(values) or not len(wanted):
        return np.zeros(len(wanted), np.bool_)
    low, high = int(values.min()), int(values.max())
    if high - low >= _TABLE_LIMIT:
        return _is_in_sorted(wanted, np.sort(values))
    present = np.zeros(high - low + 2, np.bool_)
    present[values - values.dtype.type(low)] = True
    places = wanted - values.dtype.type(low)  # values below `low` wrap to a large number
    found: Flags = present.take(np.minimum(places, values.dtype.type(high - low + 1)))
    return found


def _is_in_sorted(wanted: AnyArray, values: AnyArray) -> Flags:
    """Searches block by block: numpy's own makes a hash table of all values, 30 bytes each, ignoring our
    memory limit.
    """
    found = np.empty(len(wanted), np.bool_)
    for begin in range(0, len(wanted), _BLOCK_ROWS):
        block = wanted[begin : begin + _BLOCK_ROWS]
        places = np.minimum(np.searchsorted(values, block), len(values) - 1)
        found[begin : begin + _BLOCK_ROWS] = values[places] == block
    return found


def lookup(wanted: AnyArray, keys: AnyArray, values: AnyArray, default: int) -> Any:
    """Returns for each wanted id (unsigned) the value of the equal key (of the same type), else the default.

    Of equal keys the last one counts.
    """
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), default, values.dtype)
    low, high = int(keys.min()), int(keys.max())
    if high - low < max(_TABLE_LIMIT // 64, 8 * len(keys)):
        table = np.full(high - low + 2, default, values.dtype)  # the last one is for all ids outside
        table[keys - keys.dtype.type(low)] = values
        table[-1] = default
        places = wanted - keys.dtype.type(low)  # values below `low` wrap to a large number
        return table.take(np.minimum(places, keys.dtype.type(high - low + 1)))
    order = np.argsort(keys, kind="stable")
    at = np.maximum(np.searchsorted(keys, wanted, side="right", sorter=order) - 1, 0)
    found = order[at]
    return np.where(keys[found] == wanted, values[found], default)


def last_reaching(values: Ints, before: AnyArray, needed: Ints) -> Ints:
    """Returns for each query the last place < before with values[place] >= needed, or NOTHING. Places are from 0 on."""
    levels = _maxima(values)
    node = before.astype(np.int64)
    found = np.full(len(node), NOTHING, np.int64)
    at_level = np.full(len(node), NOTHING, np.int64)
    open_ = np.arange(len(node))
    for number, level in enumerate(levels):
        left = node[open_] & 1 == 1  # the previous block is a left sibling that has not been searched
        rows = open_[left]
        rows = rows[level[node[rows] - 1] >= needed[rows]]
        found[rows], at_level[rows] = node[rows] - 1, number
        open_ = open_[at_level[open_] == NOTHING]
        node[open_] >>= 1
    for number in range(len(levels) - 1, 0, -1):
        rows = np.flatnonzero(at_level >= number)
        right = 2 * found[rows] + 1
        found[rows] = np.where(levels[number - 1][right] >= needed[rows], right, right - 1)
    return found


def _maxima(values: Ints) -> list[Ints]:
    """Returns maxima of blocks of 1, 2, 4, … values, padded to powers of two."""
    size = 1 << max(len(values).bit_length(), 1)
    level = np.full(size, np.iinfo(np.int64).min, np.int64)
    level[: len(values)] = values
    levels = [level]
    while len(level) > 1:
        level = np.maximum(level[::2], level[1::2])
        levels.append(level)
    return levels
