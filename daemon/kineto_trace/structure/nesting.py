"""Nesting of intervals: the innermost interval around another one, and the recorded time.

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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kineto_trace.arrays.codec import NEVER, Events, Nest
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.base.array_types import AnyArray, Ints, Ints32, UInts32
from kineto_trace.model.trace import Table, Trace


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
