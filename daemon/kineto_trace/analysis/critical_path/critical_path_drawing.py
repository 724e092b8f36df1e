"""A trace with its critical path drawn into it, for the exporters and viewers.

Theory of operation
    The path is a track of its own, "critical path": one slice per edge, called by what the time is bound by and whose
    time it is ("cpu_bound: aten::mm"), one after the other without holes. In a capture these are annotations of a
    thread that the program does not have; in a trace that was read from a file they are events of the category
    "critical_path", so that other tools leave them alone.

    In a trace from a file the events on the path are marked as HTA marks them: an argument "critical": 1, and arrows
    (flows of the category "critical_path") for launches, synchronisations and dependencies between tracks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.critical_path.critical_path_views import BOUNDS, STEP, FoundPath, bounds, find_path
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.model import event_kinds as bits
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Table, Trace, make_table
from kineto_trace.structure.annotation_window import Instance
from kineto_trace.structure.dependency_graph import EDGE_TYPES, KINDS, OPERATOR

TRACK = "critical path"
CATEGORY = "critical_path"
_MARK = '"critical": 1'

Ints = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


class _Strings:
    """The strings of a trace, and more. `strings` is the list to put into the new trace."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = list(strings)
        self._added: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._added:
            self._added[text] = len(self.strings)
            self.strings.append(text)
        return self._added[text]


def overlay(
    context: Context, *, annotation: str = STEP, instance: Instance = None, only_critical: bool = False
) -> Trace:
    """Returns the trace with the critical path of a window drawn into it. The window is that of the view critical_path.

    only_critical: leave out operators, calls and GPU activities that are not on the path. Raises ViewError.
    """
    found = find_path(context, annotation=annotation, instance=instance)
    return _drawn(context.trace, found, only_critical=only_critical)


def _rows_on_path(found: FoundPath) -> dict[str, Ints]:
    """For each kind the rows on the path."""
    events = found.graph.events
    nodes = np.concatenate([found.path.first, found.path.last])
    on_path = unique_values(nodes[nodes >= 0] >> 1)
    return {kind: events.row[on_path[events.kind[on_path] == number]] for number, kind in enumerate(KINDS)}


def _drawn(trace: Trace, found: FoundPath, *, only_critical: bool) -> Trace:
    path, strings, on_path = found.path, _Strings(trace.strings), _rows_on_path(found)
    lasting = np.flatnonzero(path.end > path.start)
    names = _names(trace, found, strings, lasting)
    thread = _free_thread(trace)
    tables = dict(trace.tables)
    for kind, rows in on_path.items():
        if kind in tables and trace.head is not None and len(rows):
            tables[kind] = _marked(tables[kind], rows, strings)
        if kind in tables and only_critical and kind != "user_annotation":
            tables[kind] = tables[kind].take(np.sort(rows))
    columns = {
        "start": path.start[lasting],
        "duration": (path.end - path.start)[lasting],
        "name": names,
        "thread": np.full(len(lasting), thread, np.uint32),
    }
    if trace.head is None:
        _append(tables, _annotations(columns, trace))
        target = replace(trace.target, threads={**trace.target.threads, thread: TRACK})
        return replace(trace, tables=tables, strings=strings.strings, target=target)
    place = 1 + max(
        (int(t.origin["place"].max()) for t in tables.values() if len(t) and "place" in t.origin), default=0
    )
    _append(tables, _slices(trace, columns, strings, place, thread))
    _append(tables, _track_name(trace, strings, place + len(lasting), thread))
    _append(tables, _flows(trace, found, strings, place + len(lasting) + 1))
    return replace(trace, tables=tables, strings=strings.strings)


def _names(trace: Trace, found: FoundPath, strings: _Strings, rows: Ints) -> npt.NDArray[np.int32]:
    """Returns the names of edges; each distinct name is made once."""
    events, path = found.graph.events, found.path
    name = np.where(path.event[rows] >= 0, events.name[path.event[rows]], NO_STRING)
    keys = name.astype(np.int64) * len(BOUNDS) + bounds(found)[rows]
    distinct, number = np.unique(keys, return_inverse=True)
    texts = []
    for key in distinct.tolist():
        at, bound = divmod(key, len(BOUNDS))
        texts.append(strings.add(f"{BOUNDS[bound]}: {trace.strings[at]}" if at >= 0 else BOUNDS[bound]))
    return np.array(texts, np.int32)[number] if texts else np.empty(0, np.int32)


def _free_thread(trace: Trace) -> int:
    """A number that is no thread of the trace, so large that the track stands below the others."""
    columns = [table["thread"] for table in trace.tables.values() if "thread" in table.columns]
    columns += [table.origin["tid"] for table in trace.tables.values() if "tid" in table.origin]
    used = {int(number) for column in columns for number in unique_values(column)}
    number = 9_999_999
    while number in used:
        number -= 1
    return number


def _annotations(columns: Mapping[str, AnyArray], trace: Trace) -> Table:
    count = len(columns["start"])
    first = 1 + max(
        (int(trace.table(k)["id"].max()) for k in ("cpu_op", "user_annotation") if len(trace.table(k))), default=0
    )
    more = {
        "id": np.arange(first, first + count),
        "sequence": np.full(count, -1),
        "scope": np.full(count, 7),
        "finished": np.ones(count),
        "inputs": np.full(count, NO_STRING),
    }
    return make_table("user_annotation", count, {**columns, **more})


def _append(tables: dict[str, Table], added: Table) -> None:
    """Puts rows behind those of their kind; origin columns that they lack are zero."""
    there = tables.get(added.kind)
    if there is None or not len(there):
        tables[added.kind] = added
        return
    columns = {name: np.concatenate([there[name], added[name]]) for name in there.columns}
    origin = {
        name: np.concatenate([column, added.origin.get(name, np.zeros(len(added), column.dtype)).astype(column.dtype)])
        for name, column in there.origin.items()
    }
    tables[added.kind] = Table(added.kind, columns, origin)


def _origin(
    count: int, pid: AnyArray | int, tid: AnyArray | int, category: int, present: int, args: int, place: int
) -> dict[str, AnyArray]:
    return {
        "pid": np.zeros(count, np.int64) + pid,
        "tid": np.zeros(count, np.int64) + tid,
        "category": np.full(count, category, np.int32),
        "present": np.full(count, present, np.uint64),
        "args": np.full(count, args, np.int32),
        "members": np.full(count, NO_STRING, np.int32),
        "place": np.arange(place, place + count, dtype=np.uint32),
    }


_EVENT = bits.PHASE | bits.CATEGORY | bits.NAME | bits.PID | bits.TID | bits.TS


def _slices(trace: Trace, columns: Mapping[str, AnyArray], strings: _Strings, place: int, thread: int) -> Table:
    count, category = len(columns["start"]), strings.add(CATEGORY)
    more = {"category": np.full(count, category), "phase": np.full(count, ord("X"))}
    origin = _origin(count, trace.target.pid, thread, category, _EVENT | bits.DUR, NO_STRING, place)
    return Table("other", make_table("other", count, {**columns, **more}).columns, origin)


def _track_name(trace: Trace, strings: _Strings, place: int, thread: int) -> Table:
    columns = {
        "start": np.array([trace.window_start_ns]),
        "name": np.array([strings.add("thread_name")]),
        "thread": np.array([thread]),
        "category": np.array([NO_STRING]),
        "phase": np.array([ord("M")]),
    }
    present = _EVENT & ~bits.CATEGORY | bits.ARGS
    args = strings.add(f'"name": {json.dumps(TRACK)}')
    origin = _origin(1, trace.target.pid, thread, NO_STRING, present, args, place)
    return Table("other", make_table("other", 1, columns).columns, origin)


def _marked(table: Table, rows: Ints, strings: _Strings) -> Table:
    """The rows with the argument "critical". Each distinct text is made once."""
    if not table.origin:
        return table
    name = "inputs" if "inputs" in table.columns else "args"
    texts = (table.columns if name == "inputs" else table.origin)[name].copy()
    for number in unique_values(texts[rows]).tolist():
        text = strings.strings[number] if number >= 0 else ""
        chosen = rows[texts[rows] == number]
        texts[chosen] = strings.add(f"{text}, {_MARK}" if text else _MARK)
    present = table.origin["present"].copy()
    present[rows] |= np.uint64(bits.ARGS)
    columns = {**table.columns, name: texts} if name == "inputs" else table.columns
    origin = {**table.origin, "present": present}
    return Table(table.kind, columns, origin if name == "inputs" else {**origin, "args": texts})


def _flows(trace: Trace, found: FoundPath, strings: _Strings, place: int) -> Table:
    """An arrow for each edge of the path between two events, but for those along one event."""
    path, events = found.path, found.graph.events
    chosen = np.flatnonzero((path.first >= 0) & (path.edge != OPERATOR) & (path.first != path.last))
    first, last = path.first[chosen], path.last[chosen]
    pid, tid = _tracks(trace, found)
    both = np.concatenate([first, last])
    count = len(chosen)
    phase = np.repeat(np.array([ord("s"), ord("f")]), count)
    columns = {
        "start": events.times(both),
        "name": np.full(2 * count, strings.add(CATEGORY)),
        "thread": events.thread[both >> 1],
        "category": np.full(2 * count, strings.add(CATEGORY)),
        "phase": phase,
        "id": np.tile(np.arange(count) + _free_id(trace), 2),
    }
    present = np.where(phase == ord("f"), _EVENT | bits.ID | bits.BP_E | bits.ARGS, _EVENT | bits.ID | bits.ARGS)
    types = np.array([strings.add(f'"type": "{CATEGORY}_{name}", {_MARK}') for name in EDGE_TYPES])
    category = int(columns["category"][0]) if count else NO_STRING
    origin = _origin(2 * count, pid[both >> 1], tid[both >> 1], category, 0, NO_STRING, place)
    origin["present"] = present.astype(np.uint64)
    origin["args"] = np.tile(types[path.edge[chosen]], 2).astype(np.int32)
    return Table("flow", make_table("flow", 2 * count, columns).columns, origin)


def _free_id(trace: Trace) -> int:
    flows = trace.table("flow")
    return int(flows["id"].max(initial=0)) + 1 if len(flows) else 1


def _tracks(trace: Trace, found: FoundPath) -> tuple[Ints, Ints]:
    """Returns pid and tid of each event as in the file."""
    events = found.graph.events
    pid, tid = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)
    for number, kind in enumerate(KINDS):
        own = np.flatnonzero(events.kind == number)
        table = trace.table(kind)
        if len(own) and table.origin:
            pid[own], tid[own] = table.origin["pid"][events.row[own]], table.origin["tid"][events.row[own]]
    return pid, tid
