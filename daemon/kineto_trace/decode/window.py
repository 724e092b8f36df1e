"""Leaves out what lies outside the wanted window."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays import is_in
from kineto_trace.decode.names import ACTIVITY_BUFFER_REQUEST
from kineto_trace.model import API_TABLES, GPU_TABLES, Table


def apply_window(tables: Mapping[str, Table], start_ns: int, end_ns: int) -> tuple[dict[str, Table], int]:
    """The rows that overlap the window, and how many others there were.

    A runtime or driver call outside the window stays if a kept GPU activity came from it, so that every
    flow has both ends.
    """
    kept = {kind: _overlapping(tables[kind], start_ns, end_ns) for kind in tables}
    correlations: npt.NDArray[np.uint32] | None = None
    for kind in API_TABLES:
        if kind in tables and not kept[kind].all():
            if correlations is None:
                correlations = _correlations(tables, kept)
            outside = np.flatnonzero(~kept[kind])
            kept[kind][outside] = is_in(tables[kind]["correlation"][outside], correlations)
    result = {kind: table if kept[kind].all() else table.take(kept[kind]) for kind, table in tables.items()}
    return result, sum(int(np.count_nonzero(~mask)) for mask in kept.values())


def _overlapping(table: Table, start_ns: int, end_ns: int) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = (table["start"] < end_ns) & (table.end() >= start_ns) & (table["start"] > 0)
    return mask


def _correlations(tables: Mapping[str, Table], kept: Mapping[str, npt.NDArray[np.bool_]]) -> npt.NDArray[np.uint32]:
    parts = [tables[kind]["correlation"][kept[kind]] for kind in GPU_TABLES if kind in tables]
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def whole_extent(tables: Mapping[str, Table]) -> tuple[int, int]:
    """First start and last end of all activities (Unix ns); (0, 0) without any."""
    filled = [table for table in tables.values() if len(table)]
    if not filled:
        return 0, 0
    starts = [table["start"][table["start"] > 0] for table in filled]
    first = min((int(column.min()) for column in starts if len(column)), default=0)
    return first, max(int(table.end().max()) for table in filled) + 1


def drop_trailing_requests(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Without CUPTI's last "Activity Buffer Request", if it began after everything else: it is our own flush."""
    overhead = tables.get("overhead")
    if overhead is None or not len(overhead):
        return dict(tables)
    others = [int(table.end().max()) for kind, table in tables.items() if kind != "overhead" and len(table)]
    trailing = (overhead["kind"] == ACTIVITY_BUFFER_REQUEST) & (overhead["start"] > max(others, default=0))
    return {**tables, "overhead": overhead.take(~trailing)}
