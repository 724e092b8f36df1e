"""Time by annotation, and the annotation that each GPU activity belongs to."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import GpuEvents, gpu_events
from kineto_trace.analysis.gpu_time.kernel_breakdown_views import statistics_rows
from kineto_trace.arrays.overlap_resolution import innermost_spans
from kineto_trace.arrays.row_groups import group
from kineto_trace.arrays.top_n import as_hta, largest
from kineto_trace.compat.hta.hta_frame import KIND, HtaFrame, hta_frame
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from kineto_trace.structure.activity_links import Calls, calls, gpu
from kineto_trace.structure.gpu_annotations import gpu_annotations as derived_annotations
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, Compat, view

NOTHING = -1

Ints = npt.NDArray[np.int64]


def annotations_on_gpu(context: Context) -> Table:
    """gpu_user_annotation of the trace; of captures, which do not record it, what Kineto would make."""
    table = context.trace.table("gpu_user_annotation")
    return table if len(table) else derived_annotations(context.trace.tables)


@view(
    "gpu_annotations",
    columns(
        ("name", "text", "", "name; others: all that are not listed"),
        ("count", "int", "", "annotations; HTA's figures, where names were put together: names"),
        ("sum_us", "float", "us", "sum of durations"),
        ("max_us", "float", "us", "longest"),
        ("min_us", "float", "us", "shortest"),
        ("mean_us", "float", "us", "mean"),
        ("std_us", "float", "us", "standard deviation, of a sample; 0 for one annotation"),
    ),
    compat=(Compat.HTA,),
)
def gpu_annotations(
    context: Context,
    *,
    on: str = "gpu",
    duration_ratio: float = 0.8,
    num_kernels: int = 1000,
    allowlist: Sequence[str] = (),
    compat: Compat = Compat.NONE,
) -> Answer:
    """The annotations that take most of the time, and all others as one row.

    On the GPU an annotation lasts, on each stream, from the start of the first activity launched in it to the end of
    the last one. Annotations inside each other count both.

    Options: on: gpu or cpu: where the time is taken; num_kernels: if there are more, only so many are listed, and only
    until they are duration_ratio of the time; allowlist: names that contain one of these texts are always listed.

    HTA's figures (get_gpu_user_annotation_breakdown): sorted by name; annotations are put together by the quantile of
    running sums, and all statistics are then of the sums.
    """
    if on not in ("gpu", "cpu"):
        raise ViewError(f"view gpu_annotations: on is {on!r}; it must be gpu or cpu")
    names = context.trace.strings
    if compat is Compat.HTA:
        frame = context.get(hta_frame)
        chosen = frame.exact & (frame.kind == KIND["gpu_user_annotation" if on == "gpu" else "user_annotation"])
        name, duration = frame.name[chosen], frame.duration[chosen]
    else:
        table = context.get(annotations_on_gpu) if on == "gpu" else context.trace.table("user_annotation")
        name, duration = table["name"], table["duration"]
    kept = frozenset(
        names[number] for number in np.unique(name).tolist() if any(text in names[number] for text in allowlist)
    )
    choose = as_hta if compat is Compat.HTA else largest
    found = choose(name.astype(np.int64), duration / 1000, names, ratio=duration_ratio, limit=num_kernels, kept=kept)
    rows = statistics_rows(found)
    if compat is Compat.HTA:
        rows.sort(key=lambda row: str(row["name"]))
    fields = [column.name for column in gpu_annotations.columns]
    notes = () if rows else (f"there are no annotations on the {on.upper()} in the trace",)
    return Answer({field: [row[field] for row in rows] for field in fields}, notes)


@view(
    "kernels_with_annotations",
    columns(
        ("name", "text", "", "kernel, copy or fill"),
        ("device", "int", "", "GPU as the process numbers it"),
        ("stream", "int", "", "stream"),
        ("start_ns", "int", "ns", "Unix time"),
        ("duration_us", "float", "us", "duration"),
        ("annotation", "text", "", "innermost annotation; missing: none"),
    ),
    compat=(Compat.HTA,),
)
def kernels_with_annotations(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """Every GPU activity with the innermost annotation around its launch.

    Activities without a launch in the trace get the shortest annotation of their stream that overlaps them.

    HTA's figures (get_gpu_kernels_with_user_annotations): always the shortest annotation of the stream that overlaps;
    activities of other streams with the very same times get it too, those of 0 us none. HTA fails if rounding made an
    activity end before it starts; these have no annotation here. Synchronisations count as activities.
    """
    if compat is Compat.HTA:
        return _hta_rows(context)
    events, table = gpu_events(context, compat), context.get(annotations_on_gpu)
    name = _by_launch(context)
    missing = np.flatnonzero(name < 0)
    if len(missing) and len(table):
        place = innermost_spans(
            _tracks(events.device[missing], events.stream[missing]),
            (events.start[missing], events.end[missing]),
            _tracks(table["device"], table["stream"]),
            (table["start"], table.end()),
            np.argsort(np.argsort(-table["duration"], kind="stable"), kind="stable"),
        )
        name[missing] = np.where(place >= 0, table["name"][place], NOTHING)
    return _answer(context, events, name)


def _tracks(device: npt.NDArray[np.generic], stream: npt.NDArray[np.generic]) -> Ints:
    return device.astype(np.int64) << 32 | stream.astype(np.int64) & 0xFFFFFFFF


def _by_launch(context: Context) -> Ints:
    """The name of the innermost annotation around each activity's launch."""
    work, called, table = context.get(gpu), context.get(calls), context.trace.table("user_annotation")
    if not len(table) or not len(called):
        return np.full(len(work), NOTHING, np.int64)
    return np.where(work.call >= 0, _names_of_calls(table, called, context.trace.window_end_ns)[work.call], NOTHING)


def _names_of_calls(table: Table, called: Calls, window_end_ns: int) -> Ints:
    nested = nest_tables([table], window_end_ns)
    place = nested.innermost(called.thread, called.start)
    return np.where(place >= 0, table["name"][nested.order[place]], NOTHING).astype(np.int64)


def _hta_rows(context: Context) -> Answer:
    frame = context.get(hta_frame)
    spans = np.flatnonzero(frame.exact & (frame.kind == KIND["gpu_user_annotation"]))
    if not len(spans):
        empty = Answer({column.name: [] for column in kernels_with_annotations.columns}, ())
        return empty._replace(notes=("there are no annotations on the GPU in the trace",))
    rows = np.flatnonzero((frame.stream >= 0) & (frame.correlation >= 0) | (frame.kind == KIND["cuda_sync"]))
    spans = spans[np.argsort(-frame.duration[spans], kind="stable")]
    order = _writing_order(frame, spans)
    found = innermost_spans(
        _tracks(frame.pid[rows], frame.tid[rows]),
        (frame.start[rows], frame.end[rows]),
        _tracks(frame.pid[spans], frame.tid[spans]),
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
    name = np.where((written >= 0) & (frame.duration[rows] > 0), at[written], NOTHING)
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
    _, first, track = np.unique(_tracks(frame.pid[spans], frame.tid[spans]), return_index=True, return_inverse=True)
    order = np.lexsort((np.arange(len(spans)), first[track]))
    place = np.empty(len(spans), np.int64)
    place[order] = np.arange(len(spans))
    return place


def _answer(context: Context, events: GpuEvents, name: Ints) -> Answer:
    strings = context.trace.strings
    return Answer(
        {
            "name": texts(strings, events.name),
            "device": events.device,
            "stream": events.stream,
            "start_ns": events.start,
            "duration_us": (events.end - events.start) / 1000,
            "annotation": texts(strings, name),
        }
    )
