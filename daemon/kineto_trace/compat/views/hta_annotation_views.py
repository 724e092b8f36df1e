"""HTA's annotations in the views gpu_annotations and kernels_with_annotations."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.annotation_views import (
    TakenOn,
    allowed,
    annotation_columns,
    gpu_annotations,
    kernels_with_annotations,
    no_annotations,
    tracks_of,
)
from kineto_trace.arrays.overlap_resolution import innermost_spans
from kineto_trace.arrays.row_groups import group
from kineto_trace.arrays.top_n import as_hta
from kineto_trace.compat.hta.hta_frame import KIND, NOTHING, HtaFrame, hta_frame
from kineto_trace.model.context import Context
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, Compat

Ints = npt.NDArray[np.int64]


@gpu_annotations.variant(Compat.HTA)
def hta_annotations(
    context: Context,
    *,
    on: TakenOn = "gpu",
    duration_ratio: float = 0.8,
    num_kernels: int = 1000,
    allowlist: Sequence[str] = (),
) -> Answer:
    """compat=hta: the figures of get_gpu_user_annotation_breakdown.

    Rows are sorted by name. The quantile of running sums decides which annotations become one row, whose statistics
    are then those of the sums.
    """
    frame = context.get(hta_frame)
    chosen = frame.exact & (frame.kind == KIND["gpu_user_annotation" if on == "gpu" else "user_annotation"])
    name, duration = frame.name[chosen], frame.duration[chosen] / 1000
    strings, kept = context.trace.strings, allowed(context, name, allowlist)
    found = as_hta(name.astype(np.int64), duration, strings, ratio=duration_ratio, limit=num_kernels, kept=kept)
    return annotation_columns(found, on, by_name=True)


@kernels_with_annotations.variant(Compat.HTA)
def hta_kernels_with_annotations(context: Context) -> Answer:
    """compat=hta: the figures of get_gpu_kernels_with_user_annotations.

    Every activity gets the shortest annotation of its stream that overlaps it; activities of other streams with exactly
    the same times get it too. Those of 0 us have none at its edges (with pandas 3, HTA gives them none anywhere). HTA
    fails if rounding made an activity end before it starts; here such activities have no annotation. Synchronisations
    count as activities.
    """
    frame = context.get(hta_frame)
    spans = np.flatnonzero(frame.exact & (frame.kind == KIND["gpu_user_annotation"]))
    if not len(spans):
        empty = Answer({column.name: [] for column in kernels_with_annotations.columns}, ())
        return empty._replace(notes=(no_annotations("gpu"),))
    rows = np.flatnonzero((frame.stream >= 0) & (frame.correlation >= 0) | (frame.kind == KIND["cuda_sync"]))
    spans = spans[np.argsort(-frame.duration[spans], kind="stable")]
    order = _writing_order(frame, spans)
    found = innermost_spans(
        tracks_of(frame.pid[rows], frame.tid[rows]),
        (frame.start[rows], frame.end[rows]),
        tracks_of(frame.pid[spans], frame.tid[spans]),
        (frame.start[spans], frame.end[spans]),
        order,
    )
    written = np.where(found >= 0, order[found], NOTHING)
    same = group([frame.start[rows], frame.duration[rows]])
    last = np.full(len(same), NOTHING, np.int64)
    np.maximum.at(last, same.number, written)
    written = last[same.number]
    at = np.empty(len(spans), np.int64)
    at[order] = frame.name[spans]
    name = np.where((written >= 0) & (frame.duration[rows] >= 0), at[written], NOTHING)
    broken = bool((frame.duration[rows] < 0).any())
    notes = ["HTA fails on this trace: by its rounding some activities end before they start"] if broken else []
    values = {
        "name": texts(context.trace.strings, frame.name[rows]),
        "device": frame.pid[rows],
        "stream": frame.tid[rows],
        "start_ns": frame.start[rows],
        "duration_us": frame.duration[rows] / 1000,
        "annotation": texts(context.trace.strings, name),
    }
    return Answer(values, notes)


def _writing_order(frame: HtaFrame, spans: Ints) -> Ints:
    """When HTA writes each annotation, given from long to short: stream by stream, in the order of appearance."""
    _, first, track = np.unique(tracks_of(frame.pid[spans], frame.tid[spans]), return_index=True, return_inverse=True)
    order = np.lexsort((np.arange(len(spans)), first[track]))
    place = np.empty(len(spans), np.int64)
    place[order] = np.arange(len(spans))
    return place
