"""Nesting of intervals, the innermost interval around another one, the recorded time, and the tree of all events.

Theory of operation
    `Nested` has some rows of one or several tables in the order thread, start, longest first. The rules of nesting are
    those of the profiler's own tree building, with one difference that is marked:

    - An event's parent is the innermost event of its thread that runs when it starts.
    - An event that outlives its parent (overlapping, not nested) ends with its parent.
    - An event that was still running when the recording ended ends with its parent, or with the window.
    - Intervals are half-open: an event that starts when another one ends comes after it (PyTorch nests it into the
      other event; adjacent rows from samples or with rounded times would then nest).
    - Events with the same interval nest by rank, then by order of record.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from kineto_trace.arrays.codec import NEVER, Events, Interner, Nest
from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Ints, Ints32, UInts8, UInts32
from kineto_trace.decode.decoded import Submissions
from kineto_trace.model.activity_tables import ViewerRow
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_ROW, OP_TABLES, Table, Trace, make_table, own_tables

KINDS = ("python_function", "user_annotation", "cpu_op")  # by number; of equal intervals the first is outside
PYTHON = KINDS.index("python_function")
_LONG_AGO = np.iinfo(np.int64).min
TIMED_TABLES = (*API_TABLES, "cpu_instant_event")  # rows that have a thread and a time
ANNOTATION_SPANS = "gpu_user_annotation"


@dataclass(frozen=True, slots=True)
class Nested:
    """Sorted events and their tree. order: for each place, the number of the event in the input."""

    events: Events  # with the ends in the tree
    tree: Nest
    order: UInts32

    def innermost(self, thread: AnyArray, time: AnyArray) -> Ints32:
        """Returns for each moment (ns) of a thread the place of the innermost running event; -1 if there is none."""
        return self.events.enclosing(self.tree.parent, Events(thread, time))

    def of_thread(self, thread: int) -> "Nested":
        """Returns the events of one thread, with their tree."""
        first, stop = np.searchsorted(self.events.track, [thread, thread + 1]).tolist()
        own, tree = np.arange(first, stop), self.tree
        parent = np.where(tree.parent[own] >= 0, tree.parent[own] - first, -1).astype(np.int32)
        rest = tree.depth[own], tree.children[own], tree.stop[own] - first, tree.end[own], tree.self_time[own]
        return Nested(self.events.take(own), Nest(parent, *rest), self.order[own])


def nest(events: Events, window_end_ns: int) -> Nested:
    """Builds the tree of events given in any order."""
    order = events.order()
    in_order = events.take(order)
    tree = in_order.nest(window_end_ns)
    return Nested(Events(in_order.track, in_order.start, tree.end), tree, order)


def ends(table: Table) -> Ints:
    """Returns the ends (Unix ns) of the rows; NEVER for ops that were still running."""
    if "finished" not in table.columns:
        return table.end()
    return np.where(table["finished"] == 0, NEVER, table.end())


def nest_tables(tables: Sequence[Table], window_end_ns: int) -> Nested:
    """Returns the tree of all rows of these tables, which have threads; for equal intervals the first table's is
    outside.
    """
    rank = np.repeat(np.arange(len(tables), dtype=np.uint8), [len(table) for table in tables])
    return nest(
        Events(
            np.concatenate([table["thread"] for table in tables]),
            np.concatenate([table["start"] for table in tables]),
            np.concatenate([ends(table) for table in tables]),
            rank,
        ),
        window_end_ns,
    )


def last_end(tables: Sequence[Table]) -> int:
    """Returns the latest end (Unix ns) of any row; 0 without rows."""
    return max((int(table.end().max()) for table in tables if len(table)), default=0)


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


def levels(depth: AnyArray) -> Iterator[Ints]:
    """Yields the places of the nodes of each depth, ascending: outermost ones first."""
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max(initial=-1)) + 2)).tolist()
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        yield order[first:last]


def stack_numbers(parent: AnyArray, frame: AnyArray, depth: AnyArray) -> tuple[Ints, Ints, Ints]:
    """Returns the stack of each node of a forest, and for each stack the stack of its caller and its frame."""
    known, stack = Interner(), np.empty(len(parent), np.int64)
    for at in levels(depth):
        above = np.where(parent[at] >= 0, stack[parent[at]], NOTHING)
        stack[at] = known.intern((above + 1).astype(np.uint64) << np.uint64(32) | frame[at].astype(np.uint64))
    keys = known.keys()
    return stack, (keys >> np.uint64(32)).astype(np.int64) - 1, (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


# The event tree of a trace: ops, annotations and Python frames of every thread, one inside the other.
# Theory of operation
# Nodes are in preorder: thread by thread, by start, the enclosing event first, by the rules above. A node's
# subtree is therefore the range from the node to its `stop`.
# Events with the same interval nest Python frame, annotation, op from outside to inside, and within one kind by
# order of record.
# Sampled Python slices (rows with samples) begin and end with samples, somewhere inside ops; `snapped` moves
# their ends so that they do not cut ops.


@dataclass(frozen=True)
class EventTree:
    """One value per node, in preorder. Times in Unix ns, durations in ns.

    kind: number into KINDS.
    row: in that kind's table.
    parent: node, or NO_ROW.
    depth: 0 for outermost nodes.
    end: not after the parent's.
    self_ns: time in which no child ran.
    children: number of direct ones.
    stop: the node after the last descendant.
    """

    kind: UInts8
    row: UInts32
    thread: UInts32
    start: Ints
    end: Ints
    parent: Ints32
    depth: Ints32
    self_ns: Ints
    children: Ints32
    stop: Ints32

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def event_index(self) -> UInts32:
        """For each node its place among the nodes of all threads by start: Kineto's "Ev Idx"."""
        index = np.empty(len(self), np.uint32)
        index[np.argsort(self.start, kind="stable")] = np.arange(len(self), dtype=np.uint32)
        return index

    def nodes_of(self, kind: str, rows: int) -> Ints32:
        """Returns the node of each of the table's `rows` rows; NO_ROW for rows that are not in the tree."""
        nodes = np.full(rows, NO_ROW, np.int32)
        own = np.flatnonzero(self.kind == KINDS.index(kind))
        nodes[self.row[own]] = own
        return nodes

    def innermost(self, thread: AnyArray, time: AnyArray) -> Ints32:
        """Returns for each moment (Unix ns) of a thread the innermost running node; NO_ROW if there is none."""
        return Events(self.thread, self.start, self.end).enclosing(self.parent, Events(thread, time))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Events of one kind."""

    kind: int
    row: UInts32
    thread: UInts32
    start: Ints
    end: Ints


def build(tables: Mapping[str, Table], window_end_ns: int, *, sample_period_ns: int = 0) -> EventTree:
    """Builds the tree of all ops, annotations and exact Python calls of a trace.

    Sampled Python slices are included if `sample_period_ns` (as in the Trace) is given.
    """
    parts = []
    python = tables.get("python_function")
    if python is not None and len(python):
        parts.append(_whole(PYTHON, python, np.flatnonzero(python["samples"] == 0)))
        sampled = np.flatnonzero(python["samples"] > 0)
        if sample_period_ns and len(sampled):
            parts.append(_snapped(python, sampled, tables, window_end_ns, sample_period_ns))
    for number, kind in enumerate(KINDS):
        table = tables.get(kind)
        if number != PYTHON and table is not None and len(table):
            parts.append(_whole(number, table, None))
    return _tree(parts, window_end_ns)


def _whole(kind: int, table: Table, rows: AnyArray | None) -> _Rows:
    """Returns these rows of a table (None: all of them)."""
    chosen = slice(None) if rows is None else rows
    numbers = np.arange(len(table), dtype=np.uint32)[chosen]
    return _Rows(kind, numbers, table["thread"][chosen], table["start"][chosen], ends(table)[chosen])


def _tree(parts: list[_Rows], window_end_ns: int) -> EventTree:
    empty = np.empty(0, np.int64)
    parts = [_Rows(0, empty.astype(np.uint32), empty.astype(np.uint32), empty, empty), *parts]
    kind = np.repeat(np.array([part.kind for part in parts], np.uint8), [len(part.row) for part in parts])
    row, thread, start, end = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("row", "thread", "start", "end")
    )
    nested = nest(Events(thread, start, end, kind), window_end_ns)
    tree = nested.tree
    return EventTree(
        kind=kind[nested.order],
        row=row[nested.order],
        thread=nested.events.track,
        start=nested.events.start,
        end=tree.end,
        parent=tree.parent,
        depth=tree.depth,
        self_ns=tree.self_time,
        children=tree.children,
        stop=tree.stop,
    )


def _snapped(table: Table, rows: Ints, tables: Mapping[str, Table], window_end_ns: int, period_ns: int) -> _Rows:
    """Returns sampled slices that overlap no op, annotation, call or exact Python call in part."""
    slices = _whole(PYTHON, table, rows)
    others = [tables[kind] for kind in (*OP_TABLES, *API_TABLES) if kind in tables and len(tables[kind])]
    exact = np.flatnonzero(table["samples"] == 0)
    others += [table.take(exact)] if len(exact) else []
    if not others:
        return slices
    nested = nest_tables(others, max(window_end_ns, last_end(others)))
    place = np.full(len(table) + 1, NO_ROW)  # the last one is for "no caller"
    place[rows] = np.arange(len(rows))
    callers = Slices(slices.thread, slices.start, slices.end, place[table["parent"][rows]], table["depth"][rows])
    start, end = snapped(callers, nested, period_ns)
    return _Rows(slices.kind, slices.row, slices.thread, start, end)


# Times of sampled Python slices that nest with the exact events of their threads: viewers drop partial overlaps.
# Theory of operation
# Sampled slices begin and end with samples, somewhere inside ops, annotations, calls and exact Python calls.
# - A slice that begins inside an event and outlives it was running before that event, as its caller: it begins where
# the event begins. If another slice was seen inside the event before it, it instead gets the longer one of the parts
# before and after the event's end.
# - A slice that began before an event and ends inside it ends where the event begins: the thread's next sample no
# longer found it. If its thread has no next sample because the recording ends, and it was seen inside the event, it
# called the event and ends with it.
# So slices cut no event, none begins before the previous one ended, and none outlasts its thread's next sample.
@dataclass(frozen=True, slots=True)
class Slices:
    """Sampled slices. parent: place of the calling frame's slice among these, or NO_ROW. depth: as recorded."""

    thread: UInts32
    start: Ints
    end: Ints
    parent: AnyArray
    depth: AnyArray


def snapped(slices: Slices, nested: Nested, period_ns: int) -> tuple[Ints, Ints]:
    """Returns starts and ends of the slices, moved so that none cuts a nested event, as far as samples can show."""
    begins, stops = nested.events.start, nested.tree.end
    floor = _seen_before(slices)
    inside = _outermost(
        nested,
        slices.thread,
        slices.start,
        lambda rows, place: (stops[place] < slices.end[rows]) & (floor[rows] < begins[place]),
    )
    start = np.where(inside >= 0, begins[inside], slices.start)
    end = slices.end.copy()
    inside = _outermost(
        nested, slices.thread, start, lambda rows, place: (stops[place] < end[rows]) & (begins[place] < start[rows])
    )
    cut = np.flatnonzero(inside >= 0)
    after = stops[inside[cut]]
    later = cut[end[cut] - after > after - start[cut]]
    start[later] = stops[inside[later]]  # the other ones stay inside: the tree ends them with the event
    inside = _outermost(nested, slices.thread, end, lambda rows, place: begins[place] > slices.start[rows])
    last_seen = np.maximum(slices.start, slices.end - period_ns)
    called = _is_last(slices, period_ns) & (begins[inside] <= last_seen)
    moved = np.where(called, stops[inside], begins[inside])
    return start, np.where(inside >= 0, moved, end)


def _seen_before(slices: Slices) -> Ints:
    """Returns for each slice the beginning of the last slice, callers included, that is over when it begins.

    This slice did not call any event in which that one was seen.
    """
    floor = np.full(len(slices.start), _LONG_AGO)
    order = np.lexsort((slices.start, slices.depth, slices.thread))
    same = (slices.thread[order[1:]] == slices.thread[order[:-1]]) & (
        slices.depth[order[1:]] == slices.depth[order[:-1]]
    )
    before = np.full(len(slices.start), NO_ROW)
    before[order[1:][same]] = order[:-1][same]
    by_depth = np.argsort(slices.depth, kind="stable")
    bounds = np.searchsorted(slices.depth[by_depth], unique_values(slices.depth), "left")
    for rows in np.split(by_depth, bounds[1:]):
        above = np.where(slices.parent[rows] >= 0, floor[slices.parent[rows]], _LONG_AGO)
        own = np.where(before[rows] >= 0, slices.start[before[rows]], _LONG_AGO)
        floor[rows] = np.maximum(above, own)
    return floor


def _is_last(slices: Slices, period_ns: int) -> Flags:
    """Returns which slices end with the recording, rather than because their thread was seen elsewhere or vanished."""
    threads, place = np.unique(slices.thread, return_inverse=True)
    last = np.full(len(threads), _LONG_AGO)
    np.maximum.at(last, place.reshape(-1), slices.end)
    recorded = slices.end >= slices.end.max(initial=_LONG_AGO) - 2 * period_ns
    found: Flags = recorded & (slices.end == last[place.reshape(-1)])
    return found


def _outermost(
    nested: Nested,
    thread: AnyArray,
    time: Ints,
    wanted: Callable[[AnyArray, Ints32], Flags],
) -> Ints32:
    """For each moment the outermost event around it that is wanted, -1: none.

    wanted: by rows and places; must be false for all events around one for which it is false.
    """
    found = np.full(len(time), -1, np.int32)
    above = nested.innermost(thread, time)
    rows = np.arange(len(time))
    while len(rows):
        rows = rows[above[rows] >= 0]
        rows = rows[wanted(rows, above[rows])]
        found[rows] = above[rows]
        above[rows] = nested.tree.parent[above[rows]]
    return found


# Attributes calls, GPU activities and allocations to ops, by external ids.
#
# Theory of operation
# A runtime or driver call belongs to the innermost op of its thread that runs when the call starts; only where
# no op runs, to the innermost annotation (Kineto's rule for ops: an annotation inside an op does not take the
# op's calls away). A GPU activity belongs to the op of the call with its correlation id, so that all kernels of one
# graph launch belong to one op. If the activity's own record contains when and on which thread it was submitted
# (Submissions), that moment counts instead of the call. An allocation is attributed by its thread and time.
# Nothing crosses threads: a kernel of a backward pass belongs to the backward op that launched it.
#
# gpu_user_annotation: the span of an annotation's GPU work on each stream.
# Every GPU activity extends the span of the innermost annotation around its launch, on the activity's stream: from
# the first start to the last end. So an iteration's span does not cover work launched by the optimizer step inside
# it, as in Kineto's traces. The spans here are exact; the exporter begins them one ns earlier and ends them one ns
# later, as Kineto's writer does.


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
        return make_table(ANNOTATION_SPANS, 0, {})
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
    return make_table(ANNOTATION_SPANS, len(row), columns)
