"""Set operations on long arrays of ids that numpy's own do many times slower."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.codec import Interner

_TABLE_LIMIT = 1 << 27  # ids: a table of one byte each


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The different values (as unsigned 64-bit numbers) in the order of their first appearance."""
    interner = Interner()
    interner.intern(values.astype(np.uint64))
    return interner.keys()


def is_in(wanted: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For each wanted id (unsigned): whether it is among the values (of the same type)."""
    if not len(values) or not len(wanted):
        return np.zeros(len(wanted), np.bool_)
    low, high = int(values.min()), int(values.max())
    if high - low >= _TABLE_LIMIT:
        return np.isin(wanted, values)
    present = np.zeros(high - low + 2, np.bool_)
    present[values - values.dtype.type(low)] = True
    places = wanted - values.dtype.type(low)  # what is below `low` wraps to a large number
    found: npt.NDArray[np.bool_] = present.take(np.minimum(places, values.dtype.type(high - low + 1)))
    return found
