"""Interval algebra on arrays: unions of many intervals at once."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def covered(start: Ints, end: Ints, low: int, high: int) -> int:
    """The length (ns) of the union of the intervals inside [low, high)."""
    start, end = np.clip(start, low, high), np.clip(end, low, high)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    before = np.empty_like(reach)
    if not len(reach):
        return 0
    before[0], before[1:] = low, reach[:-1]
    return int(np.maximum(reach - np.maximum(start, before), 0).sum())
