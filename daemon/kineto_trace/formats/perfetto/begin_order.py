"""The order of events that nest with equal times, which the native reader of packets writes when they end.

Of two events of a thread with the same begin and end, the first row is around the second one. The inner one ends first,
so it is read first, and the order of such neighbours is turned around. Events without duration do not nest.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kineto_trace.model.activity_table import ViewerRow
from kineto_trace.model.activity_tables import tables_on
from kineto_trace.model.trace import OP_TABLES, Table, Trace

_NESTING = tables_on(ViewerRow.OPERATOR, ViewerRow.CALL, ViewerRow.PYTHON)

Ints = npt.NDArray[np.int64]


def outer_first(trace: Trace) -> Trace:
    """Returns the trace with events of equal times in the order of their begins."""
    tables = [table for kind, table in trace.tables.items() if kind in _NESTING and len(table)]
    if not tables:
        return trace
    place = np.concatenate([table.origin["place"] for table in tables])
    order = np.argsort(place, kind="stable")
    keys = (
        np.concatenate(columns)[order]
        for columns in (
            [table["start"] for table in tables],
            [table["duration"] for table in tables],
            [table.origin["pid"] for table in tables],
            [table.origin["tid"] for table in tables],
        )
    )
    same = np.ones(max(0, len(order) - 1), np.bool_)
    for number, key in enumerate(keys):
        same &= key[1:] == key[:-1]
        if number == 1:
            same &= key[1:] > 0
    if not same.any():
        return trace
    run = np.cumsum(np.append(True, ~same)) - 1
    first = np.flatnonzero(np.append(True, ~same))
    last = np.append(first[1:], len(order)) - 1
    turned = place.copy()
    turned[order] = place[order][first[run] + last[run] - np.arange(len(order))]
    parts = np.split(turned, np.cumsum([len(table) for table in tables])[:-1])
    changed = {table.kind: _placed(table, part) for table, part in zip(tables, parts, strict=True)}
    return replace(trace, tables={**trace.tables, **changed})


def _placed(table: Table, place: npt.NDArray[np.uint32]) -> Table:
    """The table with other places; rows of operators also in their order (calls of Python refer to rows)."""
    found = replace(table, origin={**table.origin, "place": place})
    if table.kind not in OP_TABLES or (place == table.origin["place"]).all():
        return found
    return found.take(np.argsort(place, kind="stable"))
