"""Converts a target's raw folder to its files: columns, the requested formats, the summary.

If the process's own libkineto recorded, the Chrome formats are its file byte for byte, plain or compressed.

Every file appears completely or not at all, so that a conversion may be killed at any time and repeated.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import is_in, unique_values
from kineto_trace.arrays.intervals import intersection, union
from kineto_trace.base.array_types import AnyArray
from kineto_trace.base.atomic_files import DigestFile, atomic_file
from kineto_trace.errors import FormatError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.text_sinks import GzipSink, Output, TextSink
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES
from kineto_trace.model.trace import API_TABLES, COUNTER_TABLES, FILE_TABLES, GPU_TABLES, UNTIMED_TABLES, Trace
from kineto_trace.open.raw_target import LoadedTarget, load_kineto_target, load_target
from kineto_trace.spool.kineto_file import has_request, kineto_file
from kineto_trace.spool.raw_records import Attachments, write_attachments
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY, DEFAULT_FORMAT, FILE_NAMES, OutputFile
from kineto_trace.store.parquet_folder import save_columns
from kineto_trace.structure.activity_links import whole_steps
from kineto_trace.structure.nesting import nest_tables, recorded
from kineto_trace.structure.python_frames import WAITING, is_native, line_samples, state_counts, thread_use, window_ns

# Kernels launched just before the recording began run inside it: this share without a launch is normal.
TOLERATED_SHARE = 0.02
TOP = 5
TOP_LINES = 3
NO_GPU = -1.0


class OutputFormat(NamedTuple):
    """A file format of a trace. write: writes the whole trace into a sink under this name; returns notes."""

    name: str
    file_name: str
    sink: Callable[[Output], TextSink]
    write: Callable[[Trace, TextSink, str], Sequence[str]]


def _chrome(trace: Trace, sink: TextSink, name: str) -> Sequence[str]:
    write_chrome(trace, sink, trace_name=name)
    return ()


def _perfetto(trace: Trace, sink: TextSink, name: str) -> Sequence[str]:
    return write_perfetto(trace, sink)


FORMATS = {
    entry.name: entry
    for entry in (
        OutputFormat("chrome", FILE_NAMES["chrome"], GzipSink, _chrome),
        OutputFormat("chrome-json", FILE_NAMES["chrome-json"], TextSink, _chrome),
        OutputFormat("perfetto", FILE_NAMES["perfetto"], TextSink, _perfetto),
    )
}
_AS_KINETO_WROTE = ("chrome", "chrome-json")
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of a conversion. The counts are of records that are not in the files."""

    files: tuple[OutputFile, ...]
    traced: bool  # False: only files beside a trace, so the requested formats do not apply
    summary: dict[str, Any] = field(default_factory=dict)  # keys of the public `Summary`
    warnings: tuple[str, ...]
    cut: tuple[str, ...]  # incomplete files
    records_dropped: int = 0  # lost in the target, buffers full
    records_undecoded: int = 0  # received, but unreadable
    chunks_torn: int = 0  # cut off when the daemon died

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return asdict(self)


def convert_target(target_dir: Path, *, formats: Sequence[str]) -> Conversion:
    """Writes the columns and the files of these formats (empty for the default format). Raises TraceError."""
    wanted = [_format(name) for name in dict.fromkeys(formats or [DEFAULT_FORMAT])]
    if has_request(target_dir):
        exact = [_exact(entry, target_dir) if entry.name in _AS_KINETO_WROTE else entry for entry in wanted]
        return _converted(load_kineto_target(target_dir), exact, target_dir, Attachments())
    attachments = write_attachments(target_dir)
    if attachments.alone:
        found = attachments
        return Conversion(files=found.files, traced=False, warnings=found.warnings, cut=found.cut)
    return _converted(load_target(target_dir), wanted, target_dir, attachments)


def _converted(
    loaded: LoadedTarget, wanted: Sequence[OutputFormat], target_dir: Path, attachments: Attachments
) -> Conversion:
    trace = loaded.trace
    notes: list[str] = []
    files = tuple(_write(trace, entry, target_dir, notes) for entry in wanted)
    save_columns(trace, target_dir / COLUMNS_DIRECTORY)
    return Conversion(
        files=(*files, *attachments.files),
        traced=True,
        summary=summarize(trace),
        warnings=(*loaded.warnings, *launch_warnings(trace), *notes, *attachments.warnings),
        cut=attachments.cut,
        records_dropped=trace.losses.dropped,
        records_undecoded=trace.losses.undecoded,
        chunks_torn=trace.losses.torn,
    )


def _exact(entry: OutputFormat, target_dir: Path) -> OutputFormat:
    """Returns the format whose file is libkineto's own."""

    def copy(_trace: Trace, sink: TextSink, _name: str) -> Sequence[str]:
        with kineto_file(target_dir).open("rb", buffering=0) as file:
            while part := file.read(_COPY_BYTES):
                sink.text(part)
        return ()

    return entry._replace(write=copy)


def _format(name: str) -> OutputFormat:
    entry = FORMATS.get(name)
    if entry is None:
        raise FormatError(f"no output format is called {name!r}; available: {', '.join(FORMATS)}")
    return entry


def _write(trace: Trace, entry: OutputFormat, target_dir: Path, notes: list[str]) -> OutputFile:
    with atomic_file(target_dir / entry.file_name) as file:
        digest = DigestFile(file)
        with entry.sink(digest) as sink:
            notes += [f"{entry.file_name}: {note}" for note in entry.write(trace, sink, entry.file_name)]
    return OutputFile(format=entry.name, name=entry.file_name, size_bytes=digest.size_bytes, sha256=digest.sha256)


def launch_warnings(trace: Trace) -> tuple[str, ...]:
    """Warns if calls were recorded, but many kernels have no call with their correlation id."""
    kernels = trace.table("kernel")
    calls = [trace.table(kind)["correlation"] for kind in API_TABLES if len(trace.table(kind))]
    if not len(kernels) or not calls:
        return ()
    without = len(kernels) - int(np.count_nonzero(is_in(kernels["correlation"], np.concatenate(calls))))
    if without <= TOLERATED_SHARE * len(kernels):
        return ()
    declared = [trace.categories[kind] for kind in API_TABLES if kind in trace.categories] or API_TABLES
    # if a vendor declares one type of calls, these were recorded
    advice = f" (record both {' and '.join(declared)})" if len(declared) > 1 else ""
    return (
        f"{without:,} of {len(kernels):,} kernels have no launch in the trace: the calls that launched them were not "
        f"recorded{advice}",
    )


def summarize(trace: Trace) -> dict[str, Any]:
    """Summarizes a trace. The keys are those of the message; times are in ns."""
    activities = Counter[str]()
    for kind, table in trace.tables.items():
        if len(table) and kind not in (*UNTIMED_TABLES, *COUNTER_TABLES, *FILE_TABLES):
            activities[trace.category(kind)] += len(table)
    iterations = whole_steps(Context(trace)).number.tolist()
    return {
        "activities": dict(activities),
        "gpu_busy_fraction": gpu_busy_fraction(trace),
        "top_kernels": top_kernels(trace),
        "top_ops": top_ops(trace),
        "top_functions": top_functions(trace),
        "python_samples": python_states(trace),
        "native_threads": native_threads(trace),
        "window_start_ns": trace.window_start_ns,
        "window_end_ns": trace.window_end_ns,
        "out_of_window": trace.losses.out_of_window,
        "iterations": len(iterations),
        "first_iteration": iterations[0] if iterations else 0,
    }


def gpu_busy_fraction(trace: Trace) -> float:
    """Returns the share of the window in which a GPU was busy, averaged over the GPUs with work; -1 if none had any.

    Time that was not recorded does not count.
    """
    covered = recorded(trace, GPU_TABLES)
    window = covered.length()
    tables = [trace.table(kind) for kind in GPU_TABLES if len(trace.table(kind))]
    if not tables or window <= 0:
        return NO_GPU
    device = np.concatenate([table["device"] for table in tables])
    start = np.concatenate([table["start"] for table in tables])
    end = np.concatenate([table.end() for table in tables])
    shares = []
    for number in unique_values(device):
        own = device == number
        shares.append(intersection(union(start[own], end[own]), covered).length() / window)
    return float(np.mean(shares))


def top_kernels(trace: Trace) -> list[dict[str, Any]]:
    """Returns the kernels with the most total time."""
    table = trace.table("kernel")
    return _top(trace, table["name"], np.ones(len(table), np.int64), table["duration"])


def top_ops(trace: Trace) -> list[dict[str, Any]]:
    """Returns the operators with the most self time (nested operators excluded)."""
    table = trace.table("cpu_op")
    if not len(table):
        return []
    nested = nest_tables([table], trace.window_end_ns)
    return _top(trace, table["name"][nested.order], np.ones(len(table), np.int64), nested.tree.self_time)


def top_functions(trace: Trace) -> list[dict[str, Any]]:
    """Returns the Python functions that ran in the most samples, each with its busiest lines.

    total_ns: number of these samples times the sampling period.
    waiting: further samples in which it waited for the GIL.
    """
    found = line_samples(trace)
    name = trace.table("python_function")["name"][found.row].astype(np.int64)
    busy = found.busy
    best = _top(trace, name, busy, busy * trace.sample_period_ns)
    numbers = {trace.strings[number]: number for number in unique_values(name).tolist()}
    for entry in best:
        own = np.flatnonzero(name == numbers[entry["name"]])
        entry["waiting"] = int(found.counts[own, WAITING].sum())
        lines = unique_values(found.line[own])
        counts = np.bincount(np.searchsorted(lines, found.line[own]), busy[own], len(lines)).astype(np.int64)
        entry["lines"] = [
            {"line": int(lines[place]), "count": int(counts[place])}
            for place in np.argsort(-counts, kind="stable")[:TOP_LINES].tolist()
            if lines[place] and counts[place]
        ]
    return best


def python_states(trace: Trace) -> dict[str, int]:
    """Returns the number of samples of Python threads by state; empty without samples."""
    counts = state_counts(trace.table("python_function")).sum(axis=0)
    names = ("unknown", *STATES[1:])
    return {name: int(count) for name, count in zip(names, counts, strict=True)} if counts.any() else {}


def native_threads(trace: Trace) -> list[dict[str, Any]]:
    """Returns the threads without Python that used the most CPU time."""
    uses = [use for use in thread_use(trace.target) if is_native(use) and use.cpu_ns][:TOP]
    names = trace.target.threads
    return [
        {
            "thread": use.thread,
            "name": names.get(use.thread, ""),
            "cpu_ns": use.cpu_ns,
            "cpu_fraction": use.cpu_ns / window_ns(trace),
        }
        for use in uses
    ]


def _top(trace: Trace, name: AnyArray, count: AnyArray, total: AnyArray) -> list[dict[str, Any]]:
    if not len(name):
        return []
    totals = np.zeros(len(trace.strings), np.int64)
    counts = np.zeros(len(trace.strings), np.int64)
    np.add.at(totals, name, total)
    np.add.at(counts, name, count)
    best = np.argsort(-totals, kind="stable")[:TOP]
    return [
        {"name": trace.strings[number], "count": int(counts[number]), "total_ns": int(totals[number])}
        for number in best.tolist()
        if counts[number]
    ]
