"""When the activities of a table were not recorded: what a source did not cover is unknown, not empty."""

from collections.abc import Sequence

import numpy as np

from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.model.trace import Trace


def unrecorded(trace: Trace, kinds: Sequence[str]) -> Union:
    """Returns the part of the window that a source of one of these tables does not cover."""
    parts = [part for each in trace.coverage if not set(kinds).isdisjoint(each.kinds) for part in each.missing]
    start, end = np.array(parts, np.int64).reshape(-1, 2).clip(trace.window_start_ns, trace.window_end_ns).T
    lasting = start < end
    return union(start[lasting], end[lasting])


def recorded(trace: Trace, kinds: Sequence[str]) -> Union:
    """Returns the rest of the window."""
    window = union(np.array([trace.window_start_ns]), np.array([trace.window_end_ns]))
    return difference(window, unrecorded(trace, kinds))
