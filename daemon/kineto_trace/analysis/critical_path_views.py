"""The critical path of a step, edge by edge and in sum.

Also draws the critical path into a trace, for the exporters and viewers.

Theory of operation
    The path is a track of its own, "critical path": one slice per edge, without holes, named after what bounds the time
    and whose time it is ("cpu_bound: aten::mm"). In a capture these are annotations of a thread that the program does
    not have; in a trace that was read from a file they are events of the category "critical_path", so that other tools
    leave them alone.

    In a trace from a file the events on the path are marked as HTA marks them: an argument "critical": 1, and arrows
    (flows of the category "critical_path") for launches, synchronisations and dependencies between tracks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints, Ints32
from kineto_trace.base.quantities import format_duration
from kineto_trace.model import activity_tables as bits
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Table, Trace, make_table
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.dependency_graph import (
    DATA_LOADING,
    EDGE_TYPES,
    HOST_KINDS,
    KERNEL_DELAY,
    KINDS,
    LAUNCH_DELAY,
    OPERATOR,
    SYNC,
    DependencyGraph,
    Instance,
    Path,
    Window,
    build,
    critical_path,
    find_window,
)
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, view

STEP = "ProfilerStep"
BOUNDS = (
    "cpu_bound",
    "data_loading",
    "gpu_compute_bound",
    "gpu_memory_bound",
    "gpu_communication_bound",
    "gpu_kernel_kernel_overhead",
    "gpu_kernel_launch_overhead",
)
CPU, LOADING, COMPUTE, MEMORY, COMMUNICATION, BETWEEN_KERNELS, LAUNCHING = range(7)
TRACK = "critical path"
CATEGORY = "critical_path"
_MARK = '"critical": 1'
_EVENT = bits.PHASE | bits.CATEGORY | bits.NAME | bits.PID | bits.TID | bits.TS


class FoundPath(NamedTuple):
    """A path, the graph that it is in and the window that it explains."""

    graph: DependencyGraph
    path: Path
    window: Window
    notes: Sequence[str]


class _Strings:
    """The strings of a trace, and added ones. `strings` is the list for the new trace."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = list(strings)
        self._added: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._added:
            self._added[text] = len(self.strings)
            self.strings.append(text)
        return self._added[text]


def _default_graph(context: Context) -> DependencyGraph:
    return build(context)


def find_path(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> FoundPath:
    """Returns the path that both views show. Raises ViewError."""
    window = find_window(context, annotation, instance, optional=annotation == STEP and instance is None)
    usual = tuple(data_loading) == DATA_LOADING and infer
    graph = context.get(_default_graph) if usual else build(context, data_loading=data_loading, infer=infer)
    path = critical_path(graph, window.start_ns, window.end_ns)
    return FoundPath(graph, path, window, [*window.notes, *_notes(context, graph, path)])


def _notes(context: Context, graph: DependencyGraph, path: Path) -> list[str]:
    notes = []
    if not len(context.trace.table("cuda_sync")):
        inferred = int(path.inferred.sum())
        notes.append(
            "the trace has no CUDA synchronisation records (cuda_sync): what synchronising calls and streams waited "
            f"for is inferred from times ({inferred} of {len(path)} edges of the path)"
        )
    if not len(path):
        notes.append("no operator, call or GPU activity lies in the window, so nothing is known about its time")
    if len(path) and path.first[0] < 0 and path.last[0] >> 1 >= graph.events.host:
        before = format_duration(float(path.end[0] - path.start[0]))
        notes.append(
            f"the call that launched the path's first GPU activity is not in the trace: the {before} before that "
            "activity are unexplained"
        )
    return notes


def _us(ns: Any) -> Floats:
    found: Floats = np.asarray(ns) / 1000.0
    return found


def edge_bounds(found: FoundPath) -> Ints:
    """Returns for each edge of the path its number in BOUNDS."""
    graph, path = found.graph, found.path
    events = graph.events
    on_gpu = path.on_gpu(events.host)
    activity = (path.last >> 1) - events.host
    communication = np.zeros(len(path), np.bool_)
    communication[on_gpu] = graph.activities.communication[activity[on_gpu]]
    copies = on_gpu & (events.kind[path.last >> 1] > len(HOST_KINDS))
    work = np.select([communication, copies, on_gpu], [COMMUNICATION, MEMORY, COMPUTE], CPU)
    loading = ~on_gpu & (path.event >= 0) & events.data_loading[path.event]
    work[loading] = LOADING
    waits = [path.edge == LAUNCH_DELAY, (path.edge == KERNEL_DELAY) | (on_gpu & (path.edge == SYNC))]
    bound: Ints = np.select(waits, [LAUNCHING, BETWEEN_KERNELS], work)
    return bound


def _ops(graph: DependencyGraph, event: Ints) -> Ints:
    """Returns the innermost operator of each event (row of cpu_op): itself, the one around it, or the one that launched
    it.
    """
    events = graph.events
    op = np.full(len(event), NOTHING)
    gpu = event >= events.host
    op[gpu] = graph.activities.op[event[gpu] - events.host]
    above, rows = event.copy(), np.flatnonzero((event >= 0) & ~gpu)
    while len(rows):
        is_op = events.kind[above[rows]] == HOST_KINDS.index("cpu_op")
        op[rows[is_op]] = events.row[above[rows[is_op]]]
        rows = rows[~is_op]
        above[rows] = events.owner[above[rows]]
        rows = rows[above[rows] >= 0]
    return op


def _annotations(context: Context, found: FoundPath, gaps: Ints) -> Ints:
    """Returns for edges outside all operators the name (string number) of the innermost annotation around
    their middle.
    """
    table = context.trace.table("user_annotation")
    if not len(table) or not len(gaps):
        return np.full(len(gaps), NO_STRING)
    threads = _threads(found)[gaps]
    middle = (found.path.start[gaps] + found.path.end[gaps]) // 2
    nested = nest_tables([table], context.trace.window_end_ns)
    place = nested.innermost(threads, middle)
    return np.where(place >= 0, table["name"][nested.order[place]], NO_STRING).astype(np.int64)


def _threads(found: FoundPath) -> Ints:
    """Returns the thread of each edge: 0 on the GPU; after the last GPU activity, the thread of the steps."""
    graph, path = found.graph, found.path
    threads: Ints = graph.events.thread[path.last >> 1].astype(np.int64)
    after_gpu = (path.last >> 1 >= graph.events.host) & (path.first == path.last)
    threads[after_gpu] = graph.main[0] if graph.main else 0
    return threads


def _rows(context: Context, found: FoundPath) -> dict[str, Any]:
    graph, path, window = found.graph, found.path, found.window
    events, strings = graph.events, context.trace.strings
    owned = path.event >= 0
    name = np.where(owned, events.name[path.event], NO_STRING).astype(np.int64) if len(path) else path.event
    gaps = np.flatnonzero(~owned)
    name[gaps] = _annotations(context, found, gaps)
    last = path.last >> 1
    on_gpu = path.on_gpu(events.host)
    device, stream = np.zeros(len(path), np.int64), np.zeros(len(path), np.int64)
    device[on_gpu] = graph.activities.device[last[on_gpu] - events.host]
    stream[on_gpu] = graph.activities.stream[last[on_gpu] - events.host]
    op = _ops(graph, path.event)
    of_op = np.full(len(path), NO_STRING, np.int64)
    of_op[op >= 0] = context.trace.table("cpu_op")["name"][op[op >= 0]]
    category = np.full(len(path), NOTHING)
    category[owned] = events.kind[path.event[owned]]
    return {
        "position": np.arange(len(path)),
        "start_us": _us(path.start - window.start_ns),
        "duration_us": _us(path.end - path.start),
        "edge": texts(EDGE_TYPES, path.edge.astype(np.int64)),
        "bound_by": texts(BOUNDS, edge_bounds(found)),
        "name": texts(strings, name),
        "category": texts(KINDS, category),
        "op": texts(strings, of_op),
        "thread": pa.array(_threads(found), mask=on_gpu),
        "device": pa.array(device, mask=~on_gpu),
        "stream": pa.array(stream, mask=~on_gpu),
        "inferred": path.inferred,
    }


@view(
    "critical_path",
    columns(
        ("position", "int", "", "position of the edge on the path"),
        ("start_us", "float", "us", "start of the edge, relative to the start of the window"),
        ("duration_us", "float", "us", "length of the edge"),
        ("edge", "text", "", "operator, dependency, kernel_launch_delay, kernel_kernel_delay or sync_dependency"),
        ("bound_by", "text", "", "what bounds this time: see critical_path_breakdown"),
        (
            "name",
            "text",
            "",
            "operator, call or GPU activity that this time belongs to; between operators, the annotation",
        ),
        ("category", "text", "", "kind of that activity"),
        (
            "op",
            "text",
            "",
            "innermost operator: the event itself, the one around the call, or the one that launched the activity",
        ),
        ("thread", "int", "", "system thread id; missing on the GPU"),
        ("device", "int", "", "GPU; empty for host activities"),
        ("stream", "int", "", "CUDA stream; empty for host activities"),
        ("inferred", "bool", "", "whether this dependency was inferred from times, because no record shows it"),
    ),
)
def critical_path_edges(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> Answer:
    """The chain of events that determined the length of a window, edge by edge in order of time.

    The path is traced backwards from the end of the window. Each event was held up by the last of the things that it
    had to wait for: the event before it on its thread or stream, its launch, a synchronisation, the thread of the
    backward pass, the runtime's lock. The durations therefore add up to the length of the window. Shortening an event
    that is not on the path does not shorten the window.

    Options:
    - annotation: the window spans all annotations whose names contain this text; "" means the whole trace. It ends with
      the annotation, or with the last GPU activity launched in it if that is later.
    - instance: only the n-th of these annotations, counted from 0, or a range such as "2:4" (both ends included).
    - data_loading: patterns (regular expressions) for the names of annotations and operators that load data.
    - infer: without cuda_sync records, infer from times what each call waited for.
    """
    found = find_path(
        context, annotation=annotation, instance=instance, data_loading=patterns_of(data_loading), infer=infer
    )
    return Answer(_rows(context, found), found.notes)


def patterns_of(given: Sequence[str]) -> Sequence[str]:
    """The option data_loading: one pattern or several."""
    return (given,) if isinstance(given, str) else tuple(given)


@view(
    "critical_path_breakdown",
    columns(
        (
            "bound_by",
            "text",
            "",
            "cpu_bound, data_loading, gpu_compute_bound, gpu_memory_bound (copies and fills), "
            "gpu_communication_bound, gpu_kernel_kernel_overhead (gaps and waits between GPU activities) or "
            "gpu_kernel_launch_overhead (from launch to start)",
        ),
        ("time_us", "float", "us", "time of the critical path"),
        ("share_pct", "float", "%", "share of the whole path"),
        ("edges", "int", "", "number of edges"),
    ),
)
def critical_path_breakdown(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> Answer:
    """The time of the critical path by what bounds it. Same options and rules as the view critical_path.

    If the trace has no GPU activity, the contribution of GPUs is missing, not zero.
    """
    found = find_path(
        context, annotation=annotation, instance=instance, data_loading=patterns_of(data_loading), infer=infer
    )
    bound = edge_bounds(found)
    time = np.bincount(bound, found.path.end - found.path.start, minlength=len(BOUNDS))
    edges = np.bincount(bound, minlength=len(BOUNDS))
    order = np.argsort(-time, kind="stable")
    total = float(time.sum()) or 1.0
    values: Mapping[str, Any] = {
        "bound_by": texts(BOUNDS, order),
        "time_us": _us(time[order]),
        "share_pct": 100 * time[order] / total,
        "edges": edges[order],
    }
    if len(context.get(gpu)):
        return Answer(values, found.notes)
    on_host = order <= LOADING
    known = {name: _only(values[name], on_host) for name in ("time_us", "share_pct", "edges")}
    return Answer({**values, **known}, [*found.notes, NO_GPU])


def _only(values: AnyArray, known: Flags) -> list[Any]:
    """Returns the values that are known; None for the others."""
    return [value if told else None for value, told in zip(values.tolist(), known.tolist(), strict=True)]


def overlay(
    context: Context, *, annotation: str = STEP, instance: Instance = None, only_critical: bool = False
) -> Trace:
    """Returns the trace with the critical path of a window drawn into it. The window is that of the view critical_path.

    only_critical: leave out operators, calls and GPU activities that are not on the path. Raises ViewError.
    """
    found = find_path(context, annotation=annotation, instance=instance)
    return _drawn(context.trace, found, only_critical=only_critical)


def _rows_on_path(found: FoundPath) -> dict[str, Ints]:
    """Returns for each kind the rows on the path."""
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
        _append(tables, _annotation_table(columns, trace))
        target = replace(trace.target, threads={**trace.target.threads, thread: TRACK})
        return replace(trace, tables=tables, strings=strings.strings, target=target)
    place = 1 + max(
        (int(t.origin["place"].max()) for t in tables.values() if len(t) and "place" in t.origin), default=0
    )
    _append(tables, _slices(trace, columns, strings, place, thread))
    _append(tables, _track_name(trace, strings, place + len(lasting), thread))
    _append(tables, _flows(trace, found, strings, place + len(lasting) + 1))
    return replace(trace, tables=tables, strings=strings.strings)


def _names(trace: Trace, found: FoundPath, strings: _Strings, rows: Ints) -> Ints32:
    """Returns the names of edges; each distinct name is made once."""
    events, path = found.graph.events, found.path
    name = np.where(path.event[rows] >= 0, events.name[path.event[rows]], NO_STRING)
    keys = name.astype(np.int64) * len(BOUNDS) + edge_bounds(found)[rows]
    distinct, number = np.unique(keys, return_inverse=True)
    texts = []
    for key in distinct.tolist():
        at, bound = divmod(key, len(BOUNDS))
        texts.append(strings.add(f"{BOUNDS[bound]}: {trace.strings[at]}" if at >= 0 else BOUNDS[bound]))
    return np.array(texts, np.int32)[number] if texts else np.empty(0, np.int32)


def _free_thread(trace: Trace) -> int:
    """Returns a number that no thread of the trace has, so large that the track is below the others."""
    columns = [table["thread"] for table in trace.tables.values() if "thread" in table.columns]
    columns += [table.origin["tid"] for table in trace.tables.values() if "tid" in table.origin]
    used = {int(number) for column in columns for number in unique_values(column)}
    number = 9_999_999
    while number in used:
        number -= 1
    return number


def _annotation_table(columns: Mapping[str, AnyArray], trace: Trace) -> Table:
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
    """Appends rows to those of their kind; origin columns that they lack are zero."""
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
    """Returns the rows with the argument "critical". Each distinct text is made once."""
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
    """Returns an arrow for each edge of the path between two different events."""
    path, events = found.path, found.graph.events
    chosen = np.flatnonzero((path.first >= 0) & (path.edge != OPERATOR) & (path.first != path.last))
    first, last = path.first[chosen], path.last[chosen]
    pid, tid = _tracks(trace, found)
    both = np.concatenate([first, last])
    count, free_id = len(chosen), int(trace.table("flow")["id"].max(initial=0)) + 1
    phase = np.repeat(np.array([ord("s"), ord("f")]), count)
    columns = {
        "start": events.times(both),
        "name": np.full(2 * count, strings.add(CATEGORY)),
        "thread": events.thread[both >> 1],
        "category": np.full(2 * count, strings.add(CATEGORY)),
        "phase": phase,
        "id": np.tile(np.arange(count) + free_id, 2),
    }
    present = np.where(phase == ord("f"), _EVENT | bits.ID | bits.BP_E | bits.ARGS, _EVENT | bits.ID | bits.ARGS)
    types = np.array([strings.add(f'"type": "{CATEGORY}_{name}", {_MARK}') for name in EDGE_TYPES])
    category = int(columns["category"][0]) if count else NO_STRING
    origin = _origin(2 * count, pid[both >> 1], tid[both >> 1], category, 0, NO_STRING, place)
    origin["present"] = present.astype(np.uint64)
    origin["args"] = np.tile(types[path.edge[chosen]], 2).astype(np.int32)
    return Table("flow", make_table("flow", 2 * count, columns).columns, origin)


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
