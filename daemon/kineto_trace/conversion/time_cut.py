"""A part of a trace, for viewers: the activities between two times, with their launches and operators."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kineto_trace.analysis.overview.gpu_figures import gpu_tracks
from kineto_trace.arrays.id_sets import is_in, unique_values
from kineto_trace.base.array_types import Flags, Ints
from kineto_trace.decode.iterations import apply_window
from kineto_trace.errors import TraceError
from kineto_trace.formats.chrome.chrome_writer import file_base_ns, write_chrome
from kineto_trace.formats.chrome.counter_tracks import CounterTrack, gap_rows
from kineto_trace.formats.text_sinks import GzipSink
from kineto_trace.model.activity_tables import COUNTER
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, OP_TABLES, Table, Trace
from kineto_trace.structure.activity_links import whole_steps
from kineto_trace.structure.trace_forms import recording_span

METADATA = ord("M")  # the phase of rows that name processes and threads
MARGIN = 0.25  # of the selected span, on either side
LEAST_MARGIN_NS = 100_000
_NAMED = (*OP_TABLES, *GPU_TABLES, "python_function", "cuda_runtime", "cuda_driver")


def cut(trace: Trace, start_ns: int, end_ns: int) -> Trace:
    """Returns the activities that overlap [start_ns, end_ns) (Unix ns), with their launches and operators.

    Arrows of a file stay with all their ends if one of them is inside; rows that name processes and threads stay.
    Raises TraceError if the end is not after the start.
    """
    if end_ns <= start_ns:
        raise TraceError(f"the end of a time span must be after its start, but this one is {start_ns} to {end_ns}")
    tables, _ = apply_window(trace.tables, start_ns, end_ns)
    if "flow" in trace.tables:
        tables["flow"] = trace.table("flow").take(_arrows(trace.table("flow"), start_ns, end_ns))
    if "other" in trace.tables:
        other = trace.table("other")
        ends = gap_rows(other, trace.strings)  # those of samples that extend out of the span, too
        if COUNTER in tables and ends.any():
            ends &= np.isin(other["start"], tables[COUNTER].end())
        tables["other"] = other.take(_others(other, start_ns, end_ns) | ends)
    return replace(
        trace,
        tables=tables,
        window_start_ns=max(start_ns, trace.window_start_ns),
        window_end_ns=min(end_ns, trace.window_end_ns),
    )


def with_margin(start_ns: int, end_ns: int) -> tuple[int, int]:
    """Returns a span of time with some margin on either side (Unix ns)."""
    margin = max(LEAST_MARGIN_NS, int(MARGIN * (end_ns - start_ns)))
    return start_ns - margin, end_ns + margin


def longest(trace: Trace, name: str) -> tuple[int, int]:
    """Returns start and end (Unix ns) of the longest activity with this name. Raises TraceError if there is none."""
    numbers = np.flatnonzero(np.array([text == name for text in trace.strings], np.bool_))
    found = [each for kind in _NAMED for each in _longest_in(trace.table(kind), numbers)]
    if not found:
        raise TraceError(f"no activity in the trace is called {name!r}")
    return max(found, key=lambda each: each[1] - each[0])


def _longest_in(table: Table, numbers: Ints) -> Iterator[tuple[int, int]]:
    rows = np.flatnonzero(np.isin(table["name"], numbers)) if len(table) else np.empty(0, np.int64)
    if len(rows):
        row = rows[int(np.argmax(table["duration"][rows]))]
        yield int(table["start"][row]), int(table["start"][row] + table["duration"][row])


def _arrows(table: Table, start_ns: int, end_ns: int) -> Flags:
    inside = (table["start"] >= start_ns) & (table["start"] < end_ns)
    found: Flags = is_in(table["id"].view(np.uint64), unique_values(table["id"][inside]).view(np.uint64))
    return found


def _others(table: Table, start_ns: int, end_ns: int) -> Flags:
    inside: Flags = (table["start"] < end_ns) & (table.end() >= start_ns)
    inside |= table["phase"] == METADATA
    return inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """What a viewer shows first of a whole trace.

    start_ns, end_ns: two steps in the middle, as the file counts time; both 0 with fewer than three steps.
    tracks: the first words of the names of the thread that trains and of the stream that works most.
    """

    start_ns: int
    end_ns: int
    tracks: Sequence[str]


def focus_of(context: Context, *, perfetto: bool = False) -> Focus:
    """Returns what to show first of the file that write_timeline writes of the whole trace.

    perfetto: of the file in Perfetto's format that the trace was read from.
    """
    trace, found = context.trace, whole_steps(context)
    span, tracks = (0, 0), []
    if len(found):
        threads, counts = np.unique(found.thread, return_counts=True)
        thread = int(threads[np.argmax(counts)])
        name = trace.target.threads.get(thread, trace.target.process_name)
        tracks += [f"thread {thread}", f"{name} {thread}"][: 1 + perfetto]
    if len(found) > 2:
        first, base = len(found) // 2 - 1, 0 if perfetto else file_base_ns(trace)
        span = (int(found.start[first]) - base, int(found.end[first + 1]) - base)
    kernels = trace.table("kernel")
    if len(kernels):
        streams, place = np.unique(kernels["stream"], return_inverse=True)
        tracks.append(f"stream {streams[np.argmax(np.bincount(place, kernels['duration']))]}")
    return Focus(start_ns=span[0], end_ns=span[1], tracks=tracks)


def write_timeline(context: Context, path: Path, span: tuple[int, int] | None, *, tracks: bool) -> bool:
    """Writes a compressed Chrome trace. Returns whether it has tracks that the trace does not have.

    span: the only part of interest, [start, end) in Unix ns. Raises TraceError for one that is empty, OSError.
    """
    if span is not None:
        context = Context(cut(context.trace, *span))
    added = _tracks(context, span) if tracks else []
    with path.open("wb", buffering=0) as file, GzipSink(file) as sink:  # unlike an export, deleted after sending
        write_chrome(context.trace, sink, trace_name=path.name, tracks=added)
    return bool(added)


def _tracks(context: Context, span: tuple[int, int] | None) -> list[CounterTrack]:
    start, end = recording_span(context)
    if span is not None:  # removed parts include launches from before
        start, end = max(start, span[0]), min(end, span[1])
    return gpu_tracks(context, start, end) if start < end else []
