"""The file that a viewer gets: a trace or a part of one, if wanted with tracks of how busy the GPUs were."""

from pathlib import Path

from kineto_trace.analysis.overview.gpu_tracks import gpu_tracks
from kineto_trace.conversion.time_cut import cut
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.shared.text_sinks import GzipSink
from kineto_trace.model.context import Context
from kineto_trace.structure.recording_span import recording_span


def write_timeline(context: Context, path: Path, span: tuple[int, int] | None, *, tracks: bool) -> bool:
    """Writes a compressed Chrome trace. Returns whether it has tracks that the trace does not have.

    span: the only part of interest, [start, end) in Unix ns. Raises TraceError for one that is empty, OSError.
    """
    first, last = recording_span(context)
    if span is not None:
        context = Context(cut(context.trace, *span))
        first, last = max(first, span[0]), min(last, span[1])
    added = gpu_tracks(context, first, last) if tracks and first < last else []
    with path.open("wb", buffering=0) as file, GzipSink(file) as sink:  # unlike an export, gone once it was sent
        write_chrome(context.trace, sink, trace_name=path.name, tracks=added)
    return bool(added)
