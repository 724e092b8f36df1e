"""Attributes calls, GPU activities and allocations to ops, by external ids.

Theory of operation
    A runtime or driver call belongs to the innermost op of its thread that runs when the call starts; only where
    no op runs, to the innermost annotation (Kineto's rule for ops: an annotation inside an op does not take the
    op's calls away). A GPU activity belongs to the op of the call with its correlation id, so that all kernels of one
    graph launch belong to one op. If the activity's own record contains when and on which thread it was submitted
    (Submissions), that moment counts instead of the call. An allocation is attributed by its thread and time.

    Nothing crosses threads: a kernel of a backward pass belongs to the backward op that launched it.

gpu_user_annotation: the span of an annotation's GPU work on each stream.
    Every GPU activity extends the span of the innermost annotation around its launch, on the activity's stream: from
    the first start to the last end. So an iteration's span does not cover work launched by the optimizer step inside
    it, as in Kineto's traces. The spans here are exact; the exporter begins them one ns earlier and ends them one ns
    later, as Kineto's writer does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from kineto_trace.arrays.id_sets import lookup
from kineto_trace.base.array_types import AnyArray, Ints, Ints32, UInts32
from kineto_trace.decode.decoded import Submissions
from kineto_trace.model.activity_tables import ViewerRow
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_ROW, OP_TABLES, Table, make_table, own_tables
from kineto_trace.structure.nesting import Nested, last_end, nest_tables

TIMED_TABLES = (*API_TABLES, "cpu_instant_event")  # rows that have a thread and a time
KIND = "gpu_user_annotation"


@dataclass(frozen=True, slots=True)
class _Searched:
    """One table of ops, ready to be searched."""

    nested: Nested
    ids: Ints  # by place in the tree

    def ids_at(self, thread: AnyArray, time: AnyArray) -> Ints:
        """Returns the id of the innermost op at each moment; 0 for none."""
        found = self.nested.innermost(thread, time)
        return np.where(found >= 0, self.ids[found], 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """Spans (Unix ns) of annotations on streams. place: of the annotation, in its tree."""

    place: Ints32
    device: UInts32
    stream: UInts32
    start: Ints
    end: Ints

    def take(self, rows: AnyArray) -> "_Spans":
        """Returns some of the spans."""
        return _Spans(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def merged(self) -> "_Spans":
        """Returns one span per annotation and stream, in that order."""
        if not len(self.place):
            return self
        queue = self.device.astype(np.uint64) << np.uint64(32) | self.stream
        order = np.lexsort((queue, self.place))
        place, queue = self.place[order], queue[order]
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (place[1:] != place[:-1]) | (queue[1:] != queue[:-1])
        first = np.flatnonzero(begins)
        start = np.minimum.reduceat(self.start[order], first)
        end = np.maximum.reduceat(self.end[order], first)
        return replace(self.take(order[first]), start=start, end=end)


def attribute(tables: Mapping[str, Table], submissions: Sequence[Submissions] = ()) -> dict[str, Table]:
    """Returns the tables with external ids on calls, GPU activities and allocations.

    Unchanged tables are the same objects. Existing ids stay where none is found.
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
    tables: Mapping[str, Table], kinds: Sequence[str], correlations: Sequence[AnyArray], ids: Sequence[Ints]
) -> dict[str, Table]:
    """Returns the GPU activities with the ids of their correlation ids; of several, the last."""
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


def _ids(searched: Sequence[_Searched], thread: AnyArray, time: AnyArray) -> Ints:
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


def gpu_annotations(tables: Mapping[str, Table]) -> Table:
    """Returns one row per annotation, device and stream with GPU work of it. Empty without annotations or GPU work."""
    annotations = tables.get("user_annotation")
    calls = [tables[kind] for kind in API_TABLES if kind in tables and len(tables[kind])]
    work = [tables[kind] for kind in GPU_TABLES if kind in tables and len(tables[kind])]
    if annotations is None or not len(annotations) or not calls or not work:
        return make_table(KIND, 0, {})
    nested = nest_tables([annotations], last_end([annotations, *calls]) + 1)
    thread, time, correlation = (
        np.concatenate([call[name] for call in calls]) for name in ("thread", "start", "correlation")
    )
    place = nested.innermost(thread, time)
    inside = np.flatnonzero((place >= 0) & (correlation != 0))
    launched = np.concatenate([table["correlation"] for table in work])
    spans = _Spans(
        place=lookup(launched, correlation[inside], place[inside], NO_ROW),
        device=np.concatenate([table["device"] for table in work]),
        stream=np.concatenate([table["stream"] for table in work]),
        start=np.concatenate([table["start"] for table in work]),
        end=np.concatenate([table.end() for table in work]),
    )
    merged = spans.take(spans.place >= 0).merged()
    row = nested.order[merged.place]
    columns = {
        "start": merged.start,
        "duration": merged.end - merged.start,
        "name": annotations["name"][row],
        "device": merged.device,
        "stream": merged.stream,
        "external_id": annotations["id"][row],
    }
    return make_table(KIND, len(row), columns)
