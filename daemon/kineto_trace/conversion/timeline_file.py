"""The file that a viewer gets: a trace or a part of one, if wanted with tracks of how busy the GPUs were."""

from pathlib import Path

from kineto_trace.analysis.overview.gpu_tracks import gpu_tracks
from kineto_trace.conversion.time_cut import cut
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.chrome.counter_tracks import CounterTrack
from kineto_trace.formats.shared.text_sinks import GzipSink
from kineto_trace.model.context import Context
from kineto_trace.structure.recording_span import recording_span


def write_timeline(context: Context, path: Path, span: tuple[int, int] | None, *, tracks: bool) -> bool:
    """Writes a compressed Chrome trace. Returns whether it has tracks that the trace does not have.

    span: the only part of interest, [start, end) in Unix ns. Raises TraceError for one that is empty, OSError.
    """
    if span is not None:
        context = Context(cut(context.trace, *span))
    added = _tracks(context, span) if tracks else []
    with path.open("wb", buffering=0) as file, GzipSink(file) as sink:  # unlike an export, gone once it was sent
        write_chrome(context.trace, sink, trace_name=path.name, tracks=added)
    return bool(added)


def _tracks(context: Context, span: tuple[int, int] | None) -> list[CounterTrack]:
    start, end = recording_span(context)
    if span is not None:  # what was cut out keeps launches from before
        start, end = max(start, span[0]), min(end, span[1])
    return gpu_tracks(context, start, end) if start < end else []
