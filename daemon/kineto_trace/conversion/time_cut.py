"""A part of a trace, for viewers: the activities between two times, with what belongs to them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import is_in, unique_values
from kineto_trace.decode.time_window import apply_window
from kineto_trace.errors import TraceError
from kineto_trace.formats.chrome.counter_rows import gap_rows
from kineto_trace.model.activity_tables import COUNTER
from kineto_trace.model.trace import GPU_TABLES, OP_TABLES, Table, Trace

METADATA = ord("M")  # the phase of rows that name processes and threads
MARGIN = 0.25  # of what is looked at, on either side
LEAST_MARGIN_NS = 100_000
_NAMED = (*OP_TABLES, *GPU_TABLES, "python_function", "cuda_runtime", "cuda_driver")

Mask = npt.NDArray[np.bool_]


def cut(trace: Trace, start_ns: int, end_ns: int) -> Trace:
    """Returns the activities that overlap [start_ns, end_ns) (Unix ns), with their launches and operators.

    Arrows of a file stay with all their ends if one of them is inside; rows that name processes and threads stay.
    Raises TraceError if the end is not after the start.
    """
    if end_ns <= start_ns:
        raise TraceError(f"a stretch of time ends after it begins; {start_ns} to {end_ns} does not")
    tables, _ = apply_window(trace.tables, start_ns, end_ns)
    if "flow" in trace.tables:
        tables["flow"] = trace.table("flow").take(_arrows(trace.table("flow"), start_ns, end_ns))
    if "other" in trace.tables:
        other = trace.table("other")
        ends = gap_rows(other, trace.strings)  # those of samples that reach out of the stretch, too
        if COUNTER in tables and ends.any():
            ends &= np.isin(other["start"], tables[COUNTER].end())
        tables["other"] = other.take(_others(other, start_ns, end_ns) | ends)
    return replace(
        trace,
        tables=tables,
        window_start_ns=max(start_ns, trace.window_start_ns),
        window_end_ns=min(end_ns, trace.window_end_ns),
    )


def around(start_ns: int, end_ns: int) -> tuple[int, int]:
    """Returns a stretch of time with some margin on either side (Unix ns)."""
    margin = max(LEAST_MARGIN_NS, int(MARGIN * (end_ns - start_ns)))
    return start_ns - margin, end_ns + margin


def longest(trace: Trace, name: str) -> tuple[int, int]:
    """Returns start and end (Unix ns) of the longest activity with this name. Raises TraceError if there is none."""
    numbers = np.flatnonzero(np.array([text == name for text in trace.strings], np.bool_))
    found = [each for kind in _NAMED for each in _longest_in(trace.table(kind), numbers)]
    if not found:
        raise TraceError(f"no activity of the trace is called {name!r}")
    return max(found, key=lambda each: each[1] - each[0])


def _longest_in(table: Table, numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    rows = np.flatnonzero(np.isin(table["name"], numbers)) if len(table) else np.empty(0, np.int64)
    if len(rows):
        row = rows[int(np.argmax(table["duration"][rows]))]
        yield int(table["start"][row]), int(table["start"][row] + table["duration"][row])


def _arrows(table: Table, start_ns: int, end_ns: int) -> Mask:
    inside = (table["start"] >= start_ns) & (table["start"] < end_ns)
    found: Mask = is_in(table["id"].view(np.uint64), unique_values(table["id"][inside]).view(np.uint64))
    return found


def _others(table: Table, start_ns: int, end_ns: int) -> Mask:
    inside: Mask = (table["start"] < end_ns) & (table.end() >= start_ns)
    inside |= table["phase"] == METADATA
    return inside
