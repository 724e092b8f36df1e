"""The single entry point for writing a trace in any format.

    export_trace(trace, Path("trace.pftrace"))                     # the suffix selects the format
    export_trace(trace, Path("logs"), "tensorboard")

FORMATS lists the formats, what each is good for and its suffix.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kineto_trace.base.atomic_files import atomic_file, write_atomically
from kineto_trace.errors import FormatError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.flame_graphs import FlameGraph, folded, speedscope, stacks
from kineto_trace.formats.otlp_writer import otlp_message
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.pprof_writer import pprof_file
from kineto_trace.formats.profile_samples import Profile, profile
from kineto_trace.formats.text_sinks import GzipSink, TextSink
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.store.parquet_folder import save_columns

SUFFIX = ".pt.trace.json.gz"
DEFAULT_RUN = "trace"
_UNSAFE = re.compile(r"[^\w.-]+")


class Exported(NamedTuple):
    """The result of an export. path: the file or folder; notes: what the format could not express."""

    path: Path
    size_bytes: int
    notes: tuple[str, ...] = ()


class TraceFormat(NamedTuple):
    """A format for whole traces. suffix: of its files; "" if the format is a folder."""

    name: str
    suffix: str
    meaning: str
    write: Callable[[Trace, Path], Exported]


def export_trace(trace: Trace, path: Path, format_name: str = "") -> Exported:
    """Writes the trace in this format, by default the one of the suffix of `path`.

    A file appears completely or not at all. Raises FormatError for a format that does not exist, OSError if the path
    cannot be written.
    """
    chosen = FORMATS.get(format_name or format_of(path))
    if chosen is None:
        raise FormatError(f"no trace format is called {format_name!r}; available: {', '.join(FORMATS)}")
    return chosen.write(trace, path)


def format_of(path: Path) -> str:
    """Returns the name of the format with the suffix of this path. Raises FormatError."""
    for entry in sorted(FORMATS.values(), key=lambda item: -len(item.suffix)):
        if entry.suffix and path.name.endswith(entry.suffix):
            return entry.name
    suffixes = ", ".join(entry.suffix for entry in FORMATS.values() if entry.suffix)
    raise FormatError(f"{path.name} has no known trace suffix ({suffixes}); specify the format")


def _chrome(sink_type: type[TextSink], trace: Trace, path: Path) -> Exported:
    with atomic_file(path) as file:
        with sink_type(file) as sink:
            write_chrome(trace, sink, trace_name=path.name)
        size = file.tell()
    return Exported(path, size)


def _perfetto(trace: Trace, path: Path) -> Exported:
    with atomic_file(path) as file:
        with TextSink(file) as sink:
            notes = write_perfetto(trace, sink)
        size = file.tell()
    return Exported(path, size, notes)


def _tensorboard(trace: Trace, path: Path) -> Exported:
    file = write_tensorboard(trace, path)
    return Exported(file, file.stat().st_size)


def _folded(graph: FlameGraph, trace: Trace, path: Path) -> Exported:
    data = folded(stacks(Context(trace), graph))
    write_atomically(path, data)
    return Exported(path, len(data), () if data else (f"the trace has no data for a flame graph of {graph.value}",))


def _speedscope(trace: Trace, path: Path) -> Exported:
    context = Context(trace)
    data = speedscope({graph: stacks(context, graph) for graph in FlameGraph}, path.name)
    write_atomically(path, data)
    return Exported(path, len(data))


def _profile(encode: Callable[[Profile], bytes], trace: Trace, path: Path) -> Exported:
    found = profile(Context(trace))
    data = encode(found)
    write_atomically(path, data)
    return Exported(path, len(data), () if found.subjects else ("the trace has no samples, operators or GPU work",))


def _otlp(found: Profile) -> bytes:
    return otlp_message(found).SerializeToString()


def _store(trace: Trace, path: Path) -> Exported:
    files = save_columns(trace, path)
    return Exported(path, sum(file.stat().st_size for file in files))


FORMATS: Mapping[str, TraceFormat] = {
    entry.name: entry
    for entry in (
        TraceFormat(
            "chrome",
            ".json.gz",
            "Chrome trace, compressed: for Perfetto, HTA and the TensorBoard plug-in",
            partial(_chrome, GzipSink),
        ),
        TraceFormat("chrome-json", ".json", "Chrome trace, uncompressed", partial(_chrome, TextSink)),
        TraceFormat(
            "perfetto",
            ".pftrace",
            "Perfetto's native format, with flows, counters and overlapping kernels",
            _perfetto,
        ),
        TraceFormat("tensorboard", "", "log directory of the TensorBoard profiler plug-in", _tensorboard),
        TraceFormat(
            "speedscope", ".speedscope.json", "flame graphs of GPU time, host time and samples in one file", _speedscope
        ),
        TraceFormat(
            "folded", ".folded", "flame graph of host time as folded stacks, in ns", partial(_folded, FlameGraph.HOST)
        ),
        TraceFormat(
            "folded-gpu",
            ".gpu.folded",
            "flame graph of GPU time by launching stack as folded stacks, in ns",
            partial(_folded, FlameGraph.GPU),
        ),
        TraceFormat(
            "folded-samples",
            ".samples.folded",
            "flame graph of Python samples by line as folded stacks",
            partial(_folded, FlameGraph.SAMPLES),
        ),
        TraceFormat(
            "pprof", ".pb.gz", "pprof: CPU samples, host time and GPU time by stack", partial(_profile, pprof_file)
        ),
        TraceFormat("otlp", ".otlp", "OpenTelemetry profiles: the same data as pprof", partial(_profile, _otlp)),
        TraceFormat("store", "", "folder of typed Parquet columns, which this library opens fastest", _store),
    )
}


# The folders that the TensorBoard profiler plug-in reads.
#
# The plug-in treats every folder under the log directory that has files WORKER[.SPAN].pt.trace.json[.gz] as a run,
# orders the spans of one worker by their numbers, and reads WORKER as NODE_PROCESS.
# torch.profiler.tensorboard_trace_handler gives the same names; here the number is the window's start in Unix
# milliseconds. All ranks of a job belong in one run.
def write_tensorboard(trace: Trace, log_directory: Path, *, run: str = "") -> Path:
    """Writes the trace into the log directory, which is created if it is missing. Returns the file.

    run: the name of the folder, by default the name of the capture. An existing trace of the same process and
    millisecond is replaced.
    """
    folder = log_directory / _safe(run or trace.target.capture_id, DEFAULT_RUN)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{worker(trace)}.{trace.window_start_ns // 1_000_000}{SUFFIX}"
    with atomic_file(path) as file, GzipSink(file) as sink:
        write_chrome(trace, sink, trace_name=path.name)
    return path


def worker(trace: Trace) -> str:
    """Returns the plug-in's name of the traced process: its host and process id."""
    return f"{_safe(trace.target.host, 'host')}_{trace.target.pid}"


def _safe(name: str, default: str) -> str:
    """Returns the name in a form that is valid for a file or folder."""
    return _UNSAFE.sub("_", name).strip(".") or default
