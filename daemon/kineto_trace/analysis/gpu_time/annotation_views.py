"""Time by annotation, and the annotation that each GPU activity belongs to."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU, GpuEvents, gpu_events
from kineto_trace.analysis.gpu_time.kernel_breakdown_views import statistics_rows
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.overlap_resolution import innermost_spans
from kineto_trace.arrays.top_n import ByName, largest
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from kineto_trace.structure.activity_links import Calls, calls, gpu
from kineto_trace.structure.gpu_annotations import gpu_annotations as derived_annotations
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, view

NOTHING = -1
TakenOn = Literal["gpu", "cpu"]

Ints = npt.NDArray[np.int64]


def annotations_on_gpu(context: Context) -> Table:
    """gpu_user_annotation of the trace; of captures, which do not record it, what Kineto would make."""
    table = context.trace.table("gpu_user_annotation")
    return table if len(table) else derived_annotations(context.trace.tables)


@view(
    "gpu_annotations",
    columns(
        ("name", "text", "", "name; others: everything that is not listed"),
        ("count", "int", "", "number of annotations; with compat=hta, number of names where several share a row"),
        ("sum_us", "float", "us", "sum of their durations"),
        ("max_us", "float", "us", "longest duration"),
        ("min_us", "float", "us", "shortest duration"),
        ("mean_us", "float", "us", "mean"),
        ("std_us", "float", "us", "sample standard deviation; 0 for one annotation"),
    ),
)
def gpu_annotations(
    context: Context,
    *,
    on: TakenOn = "gpu",
    duration_ratio: float = 0.8,
    num_kernels: int = 1000,
    allowlist: Sequence[str] = (),
) -> Answer:
    """The annotations that take most of the time, and all others as one row.

    On the GPU, an annotation lasts on each stream from the start of the first activity launched in it to the end of the
    last one. Nested annotations each count in full.

    Options:
    - on: where the time is taken, gpu or cpu.
    - num_kernels: the maximum number of annotations to list. If there are more, annotations are listed only until they
      make up duration_ratio of the time.
    - duration_ratio: see num_kernels.
    - allowlist: annotations whose names contain one of these texts are always listed.
    """
    table = context.get(annotations_on_gpu) if on == "gpu" else context.trace.table("user_annotation")
    name, duration = table["name"].astype(np.int64), table["duration"] / 1000
    strings, kept = context.trace.strings, allowed(context, table["name"], allowlist)
    return annotation_columns(
        largest(name, duration, strings, ratio=duration_ratio, limit=num_kernels, kept=kept), on, by_name=False
    )


def allowed(context: Context, name: npt.NDArray[np.int32], allowlist: Sequence[str]) -> frozenset[str]:
    """The names (given by their numbers) that contain one of these texts."""
    names = [context.trace.strings[number] for number in unique_values(name).tolist()]
    return frozenset(each for each in names if any(text in each for text in allowlist))


def annotation_columns(found: ByName, on: TakenOn, *, by_name: bool) -> Answer:
    """The columns of the view gpu_annotations."""
    rows = statistics_rows(found)
    if by_name:
        rows.sort(key=lambda row: str(row["name"]))
    fields = [column.name for column in gpu_annotations.columns]
    notes = () if rows else (no_annotations(on),)
    return Answer({field: [row[field] for row in rows] for field in fields}, notes)


def no_annotations(on: TakenOn) -> str:
    """The note on a trace without any."""
    return f"there are no annotations on the {on.upper()} in the trace"


@view(
    "kernels_with_annotations",
    columns(
        ("name", "text", "", "kernel, copy or fill"),
        ("device", "int", "", "GPU index in the process"),
        ("stream", "int", "", "stream"),
        ("start_ns", "int", "ns", "Unix time"),
        ("duration_us", "float", "us", "duration"),
        ("annotation", "text", "", "innermost annotation; missing if there is none"),
    ),
    nothing=NO_GPU,
)
def kernels_with_annotations(context: Context) -> Answer:
    """Every GPU activity with the innermost annotation around its launch.

    Activities whose launch is not in the trace get the shortest annotation of their stream that overlaps them.
    """
    events, table = context.get(gpu_events), context.get(annotations_on_gpu)
    name = launch_annotations(context)
    missing = np.flatnonzero(name < 0)
    if len(missing) and len(table):
        place = innermost_spans(
            tracks_of(events.device[missing], events.stream[missing]),
            (events.start[missing], events.end[missing]),
            tracks_of(table["device"], table["stream"]),
            (table["start"], table.end()),
            np.argsort(np.argsort(-table["duration"], kind="stable"), kind="stable"),
        )
        name[missing] = np.where(place >= 0, table["name"][place], NOTHING)
    return _answer(context, events, name)


def tracks_of(device: npt.NDArray[np.generic], stream: npt.NDArray[np.generic]) -> Ints:
    """One number for each device and stream."""
    return device.astype(np.int64) << 32 | stream.astype(np.int64) & 0xFFFFFFFF


def launch_annotations(context: Context) -> Ints:
    """Returns for each GPU activity the name of the innermost annotation around its launch; NOTHING: none."""
    work, called, table = context.get(gpu), context.get(calls), context.trace.table("user_annotation")
    if not len(table) or not len(called):
        return np.full(len(work), NOTHING, np.int64)
    return np.where(work.call >= 0, _names_of_calls(table, called, context.trace.window_end_ns)[work.call], NOTHING)


def _names_of_calls(table: Table, called: Calls, window_end_ns: int) -> Ints:
    nested = nest_tables([table], window_end_ns)
    place = nested.innermost(called.thread, called.start)
    return np.where(place >= 0, table["name"][nested.order[place]], NOTHING).astype(np.int64)


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
