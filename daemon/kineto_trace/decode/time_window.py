"""Removes rows outside the wanted window."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import is_in, unique_values
from kineto_trace.decode.activity_names import ACTIVITY_BUFFER_REQUEST
from kineto_trace.model.activity_table import ViewerRow
from kineto_trace.model.trace import (
    API_TABLES,
    COUNTER_TABLES,
    GPU_TABLES,
    NO_ROW,
    OP_TABLES,
    UNTIMED_TABLES,
    Table,
    own_tables,
)

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def apply_window(tables: Mapping[str, Table], start_ns: int, end_ns: int) -> tuple[dict[str, Table], int]:
    """Returns the rows that overlap the window, and the number of the other rows.

    A runtime or driver call outside the window stays if it caused a GPU activity that is kept, so that every flow has
    both ends; an op or annotation outside stays if such a call lies in it, so that every GPU activity has the op that
    caused it. Tensors stay with their op, other tables without times as they are.
    """
    timed = {kind: table for kind, table in tables.items() if kind not in UNTIMED_TABLES}
    kept = {kind: _overlapping(timed[kind], start_ns, end_ns) for kind in timed}
    correlations: npt.NDArray[np.uint32] | None = None
    for kind in API_TABLES:
        if kind in tables and not kept[kind].all():
            if correlations is None:
                correlations = _correlations(tables, kept)
            outside = np.flatnonzero(~kept[kind])
            kept[kind][outside] = is_in(tables[kind]["correlation"][outside], correlations)
    _keep_enclosing(tables, kept, start_ns)
    result = {kind: table if kept[kind].all() else _take(table, kept[kind]) for kind, table in timed.items()}
    outside_count = sum(int(np.count_nonzero(~mask)) for mask in kept.values())
    untimed = {kind: table for kind, table in tables.items() if kind in UNTIMED_TABLES}
    return {**result, **untimed, **_tensors(tables, result)}, outside_count


def _overlapping(table: Table, start_ns: int, end_ns: int) -> Mask:
    mask: Mask = (table["start"] < end_ns) & (table.end() >= start_ns) & (table["start"] > 0)
    return mask


def _correlations(tables: Mapping[str, Table], kept: Mapping[str, Mask]) -> npt.NDArray[np.uint32]:
    work = [kind for kind in (*GPU_TABLES, *own_tables(tables, ViewerRow.GPU)) if kind in tables]
    found = np.concatenate([np.empty(0, np.uint32), *(tables[kind]["correlation"][kept[kind]] for kind in work)])
    known: npt.NDArray[np.uint32] = found[found != 0]
    return known


def _keep_enclosing(tables: Mapping[str, Table], kept: Mapping[str, Mask], start_ns: int) -> None:
    """Keeps ops before the window in which a kept call began."""
    calls = [
        (table["thread"][early], table["start"][early])
        for table, early in (
            (tables[kind], kept[kind] & (tables[kind]["start"] < start_ns)) for kind in API_TABLES if kind in tables
        )
    ]
    threads = np.concatenate([thread for thread, _ in calls]) if calls else np.empty(0, np.uint32)
    starts = np.concatenate([start for _, start in calls]) if calls else np.empty(0, np.int64)
    for thread in unique_values(threads).tolist():
        times = np.sort(starts[threads == thread])
        for kind in OP_TABLES:
            if kind in tables:
                rows = np.flatnonzero(~kept[kind] & (tables[kind]["thread"] == thread))
                first = np.searchsorted(times, tables[kind]["start"][rows], "left")
                kept[kind][rows] = np.searchsorted(times, tables[kind].end()[rows], "right") > first


def _take(table: Table, kept: Mask) -> Table:
    """Selects rows and renumbers parents that are row numbers."""
    taken = table.take(kept)
    if "parent" not in taken.columns or table.declared is not None:
        return taken
    place = np.where(kept, np.cumsum(kept) - 1, NO_ROW)
    parent = taken["parent"]
    moved = np.where(parent >= 0, place[np.maximum(parent, 0)], NO_ROW)
    return taken.with_columns({"parent": moved.astype(parent.dtype)})


def _tensors(tables: Mapping[str, Table], kept: Mapping[str, Table]) -> dict[str, Table]:
    """Selects the tensors of the remaining ops."""
    table = tables.get("op_tensor")
    if table is None:
        return {}
    ops = [kept[kind]["id"] for kind in OP_TABLES if kind in kept]
    stay = (
        is_in(table["op"].view(np.uint64), np.concatenate(ops).view(np.uint64)) if ops else np.zeros(len(table), bool)
    )
    return {table.kind: table if stay.all() else table.take(stay)}


def whole_extent(tables: Mapping[str, Table]) -> tuple[int, int]:
    """Returns the first start and the last end of all activities (Unix ns); (0, 0) if there are none."""
    filled = [table for table in _activities(tables) if len(table)]
    if not filled:
        return 0, 0
    starts = [table["start"][table["start"] > 0] for table in filled]
    first = min((int(column.min()) for column in starts if len(column)), default=0)
    return first, max(int(table.end().max()) for table in filled) + 1


def drop_trailing_requests(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Removes CUPTI's last "Activity Buffer Request" if it began after everything else: our own flush caused it."""
    overhead = tables.get("overhead")
    if overhead is None or not len(overhead):
        return dict(tables)
    others = [int(table.end().max()) for table in _activities(tables) if table.kind != "overhead" and len(table)]
    trailing = (overhead["kind"] == ACTIVITY_BUFFER_REQUEST) & (overhead["start"] > max(others, default=0))
    return {**tables, "overhead": overhead.take(~trailing)}


def _activities(tables: Mapping[str, Table]) -> list[Table]:
    return [table for kind, table in tables.items() if kind not in (*UNTIMED_TABLES, *COUNTER_TABLES)]
