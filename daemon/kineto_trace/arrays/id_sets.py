"""Set operations on long arrays of ids that numpy's own do many times slower."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Interner

_TABLE_LIMIT = 1 << 27  # ids: a table of one byte each
_BLOCK_ROWS = 1 << 20


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Returns the distinct values (as unsigned 64-bit numbers) in the order of their first appearance."""
    interner = Interner()
    interner.intern(values.astype(np.uint64))
    return interner.keys()


def unique_values(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Returns the values that occur, ascending, as np.unique(values) does.

    That one makes a hash table since NumPy 2.3, which takes 70 times as long for a million different numbers.
    """
    ordered: npt.NDArray[Any] = np.sort(values, axis=None)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    found: npt.NDArray[Any] = ordered[first]
    return found


def is_in(wanted: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tells for each wanted id (unsigned) whether it is among the values (of the same type)."""
    if not len(values) or not len(wanted):
        return np.zeros(len(wanted), np.bool_)
    low, high = int(values.min()), int(values.max())
    if high - low >= _TABLE_LIMIT:
        return _is_in_sorted(wanted, np.sort(values))
    present = np.zeros(high - low + 2, np.bool_)
    present[values - values.dtype.type(low)] = True
    places = wanted - values.dtype.type(low)  # what is below `low` wraps to a large number
    found: npt.NDArray[np.bool_] = present.take(np.minimum(places, values.dtype.type(high - low + 1)))
    return found


def _is_in_sorted(wanted: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Block by block; numpy's own makes a hash table of all values, of 30 bytes each, which no limit of ours sees."""
    found = np.empty(len(wanted), np.bool_)
    for begin in range(0, len(wanted), _BLOCK_ROWS):
        block = wanted[begin : begin + _BLOCK_ROWS]
        places = np.minimum(np.searchsorted(values, block), len(values) - 1)
        found[begin : begin + _BLOCK_ROWS] = values[places] == block
    return found


def lookup(wanted: npt.NDArray[Any], keys: npt.NDArray[Any], values: npt.NDArray[Any], default: int) -> Any:
    """For each wanted id (unsigned): the value that belongs to the equal key (of the same type), else the default.

    Of equal keys the last one counts.
    """
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), default, values.dtype)
    low, high = int(keys.min()), int(keys.max())
    if high - low < max(_TABLE_LIMIT // 64, 8 * len(keys)):
        table = np.full(high - low + 2, default, values.dtype)  # the last one is for all that is outside
        table[keys - keys.dtype.type(low)] = values
        table[-1] = default
        places = wanted - keys.dtype.type(low)  # what is below `low` wraps to a large number
        return table.take(np.minimum(places, keys.dtype.type(high - low + 1)))
    order = np.argsort(keys, kind="stable")
    at = np.maximum(np.searchsorted(keys, wanted, side="right", sorter=order) - 1, 0)
    found = order[at]
    return np.where(keys[found] == wanted, values[found], default)
