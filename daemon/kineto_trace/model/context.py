"""One trace under analysis: a part that several analyses need is computed once, when it is first requested."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from kineto_trace.base.array_types import AnyArray
from kineto_trace.model.trace import Lazy, LazyColumns, Table, Trace

T = TypeVar("T")


class Context:
    """A trace and the parts computed from it: `context.get(steps)` computes `steps(context)` once.

    Not thread-safe. worker: for a trace in a TensorBoard log folder, the process that wrote the file; otherwise "".
    """

    def __init__(self, trace: Trace, *, rank: int | None = None, worker: str = "") -> None:
        self.trace = with_possible_times(trace)
        self.worker = worker
        self.rank = rank if rank is not None else trace.target.rank or 0
        self._parts: dict[Callable[[Context], Any], Any] = {}

    def __repr__(self) -> str:
        return f"<Context of rank {self.rank}: {self.trace!r}>"

    def get(self, part: Callable[["Context"], T]) -> T:
        """Returns the part, computing it at the first call."""
        if part not in self._parts:
            self._parts[part] = part(self)
        found: T = self._parts[part]
        return found


# Corrects impossible times: an event that ends before it begins, as some profilers wrote them, gets no duration.
# Exports write such events back unchanged. In an analysis they would make sums and shares negative. The columns of a
# stored trace are read on demand, and are changed then, so no note counts its events.
def with_possible_times(trace: Trace) -> Trace:
    """Returns the trace with negative durations as 0, and a note that counts them if the trace is in memory."""
    if not isinstance(trace.tables, dict):
        return replace(
            trace,
            tables=Lazy(trace.tables, lambda kind: _possible_table(trace.tables[kind])),
            window_end_ns=_possible_end(trace),
        )
    tables, count = dict(trace.tables), 0
    for kind, table in trace.tables.items():
        duration = table.columns.get("duration")
        if duration is not None and len(duration) and duration.min() < 0:
            count += int(np.count_nonzero(duration < 0))
            tables[kind] = table.with_columns({"duration": np.maximum(duration, 0)})
    if not count:
        return trace
    whose = "1 event has a negative duration" if count == 1 else f"{count} events have negative durations"
    notes = (*trace.notes, f"{whose}: counted as 0")
    return replace(trace, tables=tables, notes=notes, window_end_ns=_possible_end(trace))


def _possible_end(trace: Trace) -> int:
    """Returns the end of the window: it is before the beginning if all events were such."""
    return max(trace.window_start_ns, trace.window_end_ns)


def _possible_table(table: Table) -> Table:
    """Returns the table with columns that are read at the first access, negative durations as 0."""
    columns = LazyColumns(table.columns, len(table), lambda name: _possible(name, table[name]))
    return replace(table, columns=columns)


def _possible(name: str, values: AnyArray) -> AnyArray:
    impossible = name == "duration" and len(values) > 0 and values.min() < 0
    return np.maximum(values, 0) if impossible else values
