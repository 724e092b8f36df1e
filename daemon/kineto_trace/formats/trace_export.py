"""The single entry point for writing a trace in any format.

    export_trace(trace, Path("trace.pftrace"))                     # the suffix selects the format
    export_trace(trace, Path("logs"), "tensorboard")

FORMATS lists the formats, what each is good for and its suffix.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from kineto_trace.base.atomic_files import atomic_file, write_atomically
from kineto_trace.errors import FormatError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.flame_graphs import FlameGraph, folded, speedscope, stacks
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.profiles.otlp_writer import otlp_message
from kineto_trace.formats.profiles.pprof_writer import pprof_file
from kineto_trace.formats.profiles.profile_samples import Profile, profile
from kineto_trace.formats.shared.text_sinks import GzipSink, TextSink
from kineto_trace.formats.tensorboard_folder import write_tensorboard
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.store.parquet_folder import save_columns


class Written(NamedTuple):
    """The result of an export. path: the file or folder; notes: what the format could not express."""

    path: Path
    size_bytes: int
    notes: tuple[str, ...] = ()


class TraceFormat(NamedTuple):
    """A format for whole traces. suffix: of its files; "" if the format is a folder."""

    name: str
    suffix: str
    meaning: str
    write: Callable[[Trace, Path], Written]


def export_trace(trace: Trace, path: Path, format_name: str = "") -> Written:
    """Writes the trace in this format, by default the one that the suffix of `path` stands for.

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
    raise FormatError(f"{path.name} has no known trace suffix ({suffixes}); name the format")


def _chrome(trace: Trace, path: Path) -> Written:
    return _chrome_with(trace, path, GzipSink)


def _chrome_json(trace: Trace, path: Path) -> Written:
    return _chrome_with(trace, path, TextSink)


def _chrome_with(trace: Trace, path: Path, sink_type: type[TextSink]) -> Written:
    with atomic_file(path) as file:
        with sink_type(file) as sink:
            write_chrome(trace, sink, trace_name=path.name)
        size = file.tell()
    return Written(path, size)


def _perfetto(trace: Trace, path: Path) -> Written:
    with atomic_file(path) as file:
        with TextSink(file) as sink:
            notes = write_perfetto(trace, sink)
        size = file.tell()
    return Written(path, size, notes)


def _tensorboard(trace: Trace, path: Path) -> Written:
    file = write_tensorboard(trace, path)
    return Written(file, file.stat().st_size)


def _folded(graph: FlameGraph) -> Callable[[Trace, Path], Written]:
    def write(trace: Trace, path: Path) -> Written:
        data = folded(stacks(Context(trace), graph))
        write_atomically(path, data)
        return Written(path, len(data), () if data else (f"the trace has no data for a flame graph of {graph.value}",))

    return write


def _speedscope(trace: Trace, path: Path) -> Written:
    context = Context(trace)
    data = speedscope({graph: stacks(context, graph) for graph in FlameGraph}, path.name)
    write_atomically(path, data)
    return Written(path, len(data))


def _profile(encode: Callable[[Profile], bytes]) -> Callable[[Trace, Path], Written]:
    def write(trace: Trace, path: Path) -> Written:
        found = profile(Context(trace))
        data = encode(found)
        write_atomically(path, data)
        return Written(path, len(data), () if found.subjects else ("the trace has no samples, operators or GPU work",))

    return write


def _otlp(found: Profile) -> bytes:
    return otlp_message(found).SerializeToString()


def _store(trace: Trace, path: Path) -> Written:
    files = save_columns(trace, path)
    return Written(path, sum(file.stat().st_size for file in files))


FORMATS: Mapping[str, TraceFormat] = {
    entry.name: entry
    for entry in (
        TraceFormat("chrome", ".json.gz", "Chrome trace, compressed: Perfetto, HTA, the TensorBoard plug-in", _chrome),
        TraceFormat("chrome-json", ".json", "the same as plain text", _chrome_json),
        TraceFormat(
            "perfetto", ".pftrace", "Perfetto's native format: flows, counters, overlapping kernels", _perfetto
        ),
        TraceFormat("tensorboard", "", "log directory of the TensorBoard profiler plug-in", _tensorboard),
        TraceFormat(
            "speedscope", ".speedscope.json", "flame graphs of GPU time, host time and samples in one file", _speedscope
        ),
        TraceFormat("folded", ".folded", "flame graph of host time as folded stacks, in ns", _folded(FlameGraph.HOST)),
        TraceFormat(
            "folded-gpu",
            ".gpu.folded",
            "flame graph of GPU time by launching stack as folded stacks, in ns",
            _folded(FlameGraph.GPU),
        ),
        TraceFormat(
            "folded-samples",
            ".samples.folded",
            "flame graph of Python samples by line as folded stacks",
            _folded(FlameGraph.SAMPLES),
        ),
        TraceFormat("pprof", ".pb.gz", "pprof: CPU samples, host time and GPU time by stack", _profile(pprof_file)),
        TraceFormat("otlp", ".otlp", "the same as OpenTelemetry profiles (ProfilesData)", _profile(_otlp)),
        TraceFormat("store", "", "folder of typed Parquet columns, which this library opens fastest", _store),
    )
}
