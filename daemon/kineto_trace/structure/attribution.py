"""Which op caused what: the external ids of calls, GPU activities and allocations.

Theory of operation
    A runtime or driver call belongs to the innermost op of its thread that runs when the call starts; only where
    no op runs, to the innermost annotation (Kineto's rule for ops: an annotation inside an op does not take the
    op's calls away). A GPU activity belongs to whatever the call with its correlation id belongs to, so that all
    kernels of one graph launch belong to one op. Where the activity's own record says when and on which thread it was
    submitted (Submissions), that moment counts instead of the call. An allocation belongs by its thread and time.

    Nothing crosses threads: a kernel of a backward pass belongs to the backward op that launched it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import lookup
from kineto_trace.decode.decoded import Submissions
from kineto_trace.model.activity_table import ViewerRow
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES, Table, own_tables
from kineto_trace.structure.nesting import Nested, last_end, nest_tables

Ints = npt.NDArray[np.int64]
TIMED_TABLES = (*API_TABLES, "cpu_instant_event")  # rows that have a thread and a time


@dataclass(frozen=True, slots=True)
class _Searched:
    """One table of ops, ready to be searched."""

    nested: Nested
    ids: Ints  # by place in the tree

    def ids_at(self, thread: npt.NDArray[Any], time: npt.NDArray[Any]) -> Ints:
        """The id of the innermost op at each moment; 0: none."""
        found = self.nested.innermost(thread, time)
        return np.where(found >= 0, self.ids[found], 0)


def attribute(tables: Mapping[str, Table], submissions: Sequence[Submissions] = ()) -> dict[str, Table]:
    """The same tables with external ids on calls, GPU activities and allocations.

    Tables to which nothing changes are the same values. Ids that are there already stay where nothing is found.
    """
    result = dict(tables)
    searched = _searched(tables)
    if not searched:
        return result
    own_calls, own_work = (own_tables(tables, row) for row in (ViewerRow.CALL, ViewerRow.GPU))
    for kind in (*TIMED_TABLES, *own_calls):
        table = tables.get(kind)
        if table is not None and len(table):
            result[kind] = with_external_ids(table, _ids(searched, table["thread"], table["start"]))
    calls = [result[kind] for kind in (*own_calls, *API_TABLES) if kind in result and len(result[kind])]
    correlations = [call["correlation"] for call in calls] + [each.correlation for each in submissions]
    ids = [call["external_id"] for call in calls] + [_ids(searched, each.thread, each.time) for each in submissions]
    return result | _with_launched(tables, (*GPU_TABLES, *own_work), correlations, ids)


def _with_launched(
    tables: Mapping[str, Table], kinds: Sequence[str], correlations: Sequence[npt.NDArray[Any]], ids: Sequence[Ints]
) -> dict[str, Table]:
    """Returns the GPU activities with the ids that belong to their correlation ids; of several, the last."""
    if not correlations:
        return {}
    known, id_of = np.concatenate(correlations), np.concatenate(ids)
    attributed = np.flatnonzero((id_of != 0) & (known != 0))
    return {
        kind: with_external_ids(table, lookup(table["correlation"], known[attributed], id_of[attributed], 0))
        for kind in kinds
        if (table := tables.get(kind)) is not None and len(table)
    }


def _searched(tables: Mapping[str, Table]) -> list[_Searched]:
    """Returns the ops, and then the annotations."""
    present = [tables[kind] for kind in OP_TABLES if kind in tables and len(tables[kind])]
    window_end = last_end([table for table in tables.values() if "thread" in table.columns])
    searched = []
    for table in present:
        nested = nest_tables([table], window_end + 1)
        searched.append(_Searched(nested, table["id"][nested.order]))
    return searched


def _ids(searched: Sequence[_Searched], thread: npt.NDArray[Any], time: npt.NDArray[Any]) -> Ints:
    """Returns the id for each moment of a thread."""
    ids = searched[0].ids_at(thread, time)
    for further in searched[1:]:
        missing = np.flatnonzero(ids == 0)
        if len(missing):
            ids[missing] = further.ids_at(thread[missing], time[missing])
    return ids


def with_external_ids(table: Table, ids: Ints) -> Table:
    """Returns the table with these ids (0 keeps the old id); the same object if nothing changes."""
    if not ids.any():
        return table
    kept = np.where(ids != 0, ids, table["external_id"])
    return table.with_columns({"external_id": kept})
