"""From a target's raw folder to its files: columns, the wanted formats, the summary.

If the process's own libkineto recorded, the Chrome formats are its file byte for byte, plain or compressed.

Every file appears as a whole or not at all, so that a conversion may be killed at any time and done again.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kineto_trace.base.atomic_files import DigestFile, atomic_file
from kineto_trace.conversion.launch_warnings import launch_warnings
from kineto_trace.conversion.trace_summary import summarize
from kineto_trace.errors import FormatError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.shared.text_sinks import GzipSink, Output, TextSink
from kineto_trace.model.trace import FILE_TABLES, Trace
from kineto_trace.open.kineto_target import load_kineto_target
from kineto_trace.open.raw_target import LoadedTarget, load_target
from kineto_trace.spool.attachments import Attachments, write_attachments
from kineto_trace.spool.kineto_file import has_request, kineto_file
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY, DEFAULT_FORMAT, FILE_NAMES, OutputFile
from kineto_trace.store.parquet_folder import save_columns


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
_NO_ATTACHMENTS = Attachments(files=(), cut=(), warnings=(), alone=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of a conversion. The counts are of records that are not in the files."""

    files: tuple[OutputFile, ...]
    traced: bool  # False: there were only files beside a trace, so that the wanted formats do not apply
    summary: dict[str, Any]  # keys of the public `Summary`
    warnings: tuple[str, ...]
    cut: tuple[str, ...]  # files that are not whole
    records_dropped: int  # lost in the target, buffers full
    records_undecoded: int  # came, but could not be read
    chunks_torn: int  # cut off when the daemon died

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return asdict(self)


def convert_target(target_dir: Path, *, formats: Sequence[str]) -> Conversion:
    """Writes the columns and the files of these formats (none: the default format). Raises TraceError."""
    wanted = [_format(name) for name in dict.fromkeys(formats or [DEFAULT_FORMAT])]
    if has_request(target_dir):
        exact = [_exact(entry, target_dir) if entry.name in _AS_KINETO_WROTE else entry for entry in wanted]
        return _converted(load_kineto_target(target_dir), exact, target_dir, _NO_ATTACHMENTS)
    attachments = write_attachments(target_dir)
    if attachments.alone:
        return _without_trace(attachments)
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
        summary=_summary(trace),
        warnings=(*loaded.warnings, *launch_warnings(trace), *notes, *attachments.warnings),
        cut=attachments.cut,
        records_dropped=trace.losses.dropped,
        records_undecoded=trace.losses.undecoded,
        chunks_torn=trace.losses.torn,
    )


def _summary(trace: Trace) -> dict[str, Any]:
    """Returns the summary. What a file has beside activities, arrows and names, is not counted."""
    found = summarize(trace)
    activities = {kind: count for kind, count in found["activities"].items() if kind not in FILE_TABLES}
    return {**found, "activities": activities}


def _exact(entry: OutputFormat, target_dir: Path) -> OutputFormat:
    """Returns the format whose file is libkineto's own."""

    def copy(_trace: Trace, sink: TextSink, _name: str) -> Sequence[str]:
        with kineto_file(target_dir).open("rb", buffering=0) as file:
            while part := file.read(_COPY_BYTES):
                sink.text(part)
        return ()

    return entry._replace(write=copy)


def _without_trace(attachments: Attachments) -> Conversion:
    return Conversion(
        files=attachments.files,
        traced=False,
        summary={},
        warnings=attachments.warnings,
        cut=attachments.cut,
        records_dropped=0,
        records_undecoded=0,
        chunks_torn=0,
    )


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
