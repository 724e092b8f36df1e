"""The event tree of a trace: ops, annotations and Python frames of every thread, one inside the other.

Theory of operation
    Nodes stand in preorder: thread by thread, by start, the enclosing event first (nesting.py has the rules). A
    node's subtree is therefore the stretch from the node to its `stop`; the children of a node, its descendants
    and the outermost nodes are found by stepping from stop to stop, without an index and without recursion.

    Events with the same interval nest Python frame, annotation, op from outside to inside, and within one kind by
    order of record.

    Sampled Python slices (rows with samples) begin and end with samples, somewhere inside ops; slice_snapping.py moves
    their ends so that they do not cut ops.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Events
from kineto_trace.model.trace import API_TABLES, NO_ROW, OP_TABLES, Table
from kineto_trace.structure.nesting import Ints, ends, last_end, nest, nest_tables
from kineto_trace.structure.slice_snapping import Slices, snapped

KINDS = ("python_function", "user_annotation", "cpu_op")  # by number; of equal intervals the first is outside
PYTHON = KINDS.index("python_function")


@dataclass(frozen=True)
class EventTree:
    """One value per node, in preorder. Times in Unix ns, durations in ns.

    kind: number into KINDS. row: in that kind's table. parent: node, NO_ROW: none. depth: 0 for outermost nodes.
    end: not after the parent's. self_ns: in which no child ran. children: direct ones. stop: the node after the
    last descendant.
    """

    kind: npt.NDArray[np.uint8]
    row: npt.NDArray[np.uint32]
    thread: npt.NDArray[np.uint32]
    start: Ints
    end: Ints
    parent: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    self_ns: Ints
    children: npt.NDArray[np.int32]
    stop: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def event_index(self) -> npt.NDArray[np.uint32]:
        """For each node its place among the nodes of all threads by start: Kineto's "Ev Idx"."""
        index = np.empty(len(self), np.uint32)
        index[np.argsort(self.start, kind="stable")] = np.arange(len(self), dtype=np.uint32)
        return index

    def nodes_of(self, kind: str, rows: int) -> npt.NDArray[np.int32]:
        """Returns the node of each of the table's `rows` rows; NO_ROW for rows that are not in the tree."""
        nodes = np.full(rows, NO_ROW, np.int32)
        own = np.flatnonzero(self.kind == KINDS.index(kind))
        nodes[self.row[own]] = own
        return nodes

    def top_level(self) -> Iterator[int]:
        """Returns the outermost nodes, thread by thread."""
        return self._steps(0, len(self))

    def children_of(self, node: int) -> Iterator[int]:
        """Returns the children of a node by start. Raises IndexError if there is no such node."""
        return self._steps(node + 1, int(self.stop[node]))

    def descendants_of(self, node: int) -> range:
        """Returns all nodes below a node, in preorder. Raises IndexError if there is no such node."""
        return range(node + 1, int(self.stop[node]))

    def ancestors_of(self, node: int) -> Iterator[int]:
        """Returns the nodes around a node, innermost first. Raises IndexError if there is no such node."""
        above = int(self.parent[node])
        while above != NO_ROW:
            yield above
            above = int(self.parent[above])

    def path_to(self, node: int) -> list[int]:
        """Returns the nodes from the outermost one to this one. Raises IndexError if there is no such node."""
        return [*reversed(list(self.ancestors_of(node))), node]

    def innermost(self, thread: npt.NDArray[Any], time: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Returns for each moment (Unix ns) of a thread the innermost running node; NO_ROW if there is none."""
        events = Events(self.thread, self.start, self.end)
        moments = Events(thread, time)
        order = moments.order()
        found = np.empty(len(order), np.int32)
        found[order] = events.enclosing(self.parent, moments.take(order))
        return found

    def _steps(self, first: int, stop: int) -> Iterator[int]:
        while first < stop:
            yield first
            first = int(self.stop[first])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Events of one kind."""

    kind: int
    row: npt.NDArray[np.uint32]
    thread: npt.NDArray[np.uint32]
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


def _whole(kind: int, table: Table, rows: npt.NDArray[Any] | None) -> _Rows:
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
    """Sampled slices that overlap no op, annotation, call or exact Python call in part."""
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
