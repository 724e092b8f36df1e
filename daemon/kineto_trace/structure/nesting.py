"""Events of threads as the native tree code wants them: sorted, nested, and searched by time.

Theory of operation
    `Nested` holds some rows of one or several tables in the order thread, start, longest first. The rules of
    nesting are those of the profiler's own tree building, with one difference that is marked:

    - An event's parent is the innermost event of its thread that runs when it starts.
    - An event that outlives its parent (overlapping, not nested) ends with its parent.
    - An event that was still running when the recording ended ends with its parent, or with the window.
    - Intervals are half-open: what starts when another event ends comes after it (PyTorch nests it into the
      other event; rows that came from samples or from rounded times would then nest where they only touch).
    - Events with the same interval nest by rank, then by order of record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import NEVER, Events, Nest
from kineto_trace.model.trace import Table

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Nested:
    """Sorted events and their tree. order: for each place, the number of the event as it was given."""

    events: Events  # with the ends of the tree
    tree: Nest
    order: npt.NDArray[np.uint32]

    def innermost(self, thread: npt.NDArray[Any], time: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Returns for each moment (ns) of a thread the place of the innermost running event; -1 if there is none."""
        moments = Events(thread, time)
        order = moments.order()
        found = np.empty(len(order), np.int32)
        found[order] = self.events.enclosing(self.tree.parent, moments.take(order))
        return found

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
    """The tree of all rows of these tables, which have threads; of equal intervals the first table's is outside."""
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
