"""GPU time by annotation, and the latency of annotations."""

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from kineto_trace.analysis.gpu_time_views import NO_GPU, GpuEvents, gpu_events, statistics_rows
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import innermost_spans
from kineto_trace.arrays.row_groups import ByName, group, largest, subtree_sums, sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Ints, Ints32
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from kineto_trace.structure.activity_links import Calls, calls, gpu
from kineto_trace.structure.nesting import Nested, ends, nest_tables
from kineto_trace.structure.nesting import gpu_annotations as derived_annotations
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, view

TakenOn = Literal["gpu", "cpu"]
NAN = float("nan")
_NUMBER = re.compile(r"#\d+$")  # of a step or a request
PERCENTILES = {"p50_us": 50.0, "p90_us": 90.0, "p95_us": 95.0, "p99_us": 99.0, "p99_9_us": 99.9, "max_us": 100.0}


def annotations_on_gpu(context: Context) -> Table:
    """The rows of gpu_user_annotation; for captures, which do not record it, the rows that Kineto would make."""
    table = context.trace.table("gpu_user_annotation")
    return table if len(table) else derived_annotations(context.trace.tables)


@view(
    "gpu_annotations",
    columns(
        ("name", "text", "", 'name; "others" sums up everything that is not listed'),
        ("count", "int", "", "number of annotations; with compat=hta, a row of several names counts the names"),
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
    """The annotations that take the most time; all others share one row.

    On the GPU, an annotation lasts on each stream from the start of the first activity launched in it to the end of the
    last one. Nested annotations each count in full.

    Options:
    - on: where the time is measured, gpu or cpu.
    - num_kernels: the maximum number of annotations to list. If there are more, annotations are listed only until they
      make up duration_ratio of the time.
    - duration_ratio: see num_kernels.
    - allowlist: annotations whose names contain one of these strings are always listed.
    """
    table = context.get(annotations_on_gpu) if on == "gpu" else context.trace.table("user_annotation")
    name, duration = table["name"].astype(np.int64), table["duration"] / 1000
    strings, kept = context.trace.strings, allowed_names(context, table["name"], allowlist)
    return annotation_columns(
        largest(name, duration, strings, ratio=duration_ratio, limit=num_kernels, kept=kept), on, by_name=False
    )


def allowed_names(context: Context, name: Ints32, allowlist: Sequence[str]) -> frozenset[str]:
    """The names (given by their numbers) that contain one of these texts."""
    names = [context.trace.strings[number] for number in unique_values(name).tolist()]
    return frozenset(each for each in names if any(text in each for text in allowlist))


def annotation_columns(found: ByName, on: TakenOn, *, by_name: bool) -> Answer:
    """The columns of the view gpu_annotations."""
    rows = statistics_rows(found)
    if by_name:
        rows.sort(key=lambda row: str(row["name"]))
    return gpu_annotations.answer(rows, () if rows else (no_annotations(on),))


def no_annotations(on: TakenOn) -> str:
    """Returns the note on a trace without annotations."""
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


def tracks_of(device: AnyArray, stream: AnyArray) -> Ints:
    """One number for each device and stream."""
    return device.astype(np.int64) << 32 | stream.astype(np.int64) & 0xFFFFFFFF


def launch_annotations(context: Context) -> Ints:
    """Returns for each GPU activity the name of the innermost annotation around its launch, or NOTHING."""
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


@view(
    "annotation_latency",
    columns(
        ("name", "text", "", "annotation"),
        ("count", "int", "", "number of annotations whose end was recorded"),
        ("p50_us", "float", "us", "median of their latency"),
        ("p90_us", "float", "us", "90th percentile, interpolated"),
        ("p95_us", "float", "us", "95th percentile"),
        ("p99_us", "float", "us", "99th percentile"),
        ("p99_9_us", "float", "us", "99.9th percentile"),
        ("max_us", "float", "us", "longest"),
        ("mean_host_us", "float", "us", "mean duration on the host"),
        ("mean_gpu_us", "float", "us", "mean GPU time launched in it, summed over activities"),
    ),
)
def annotation_latency(context: Context) -> Answer:
    """The latency of each annotation, such as an inference request or batch, by percentile; the slowest come first.

    Latency is the time from the start of the annotation to its end on the host, or to the end of the last GPU activity
    launched in it, whichever is later. Names that differ only in a trailing #number, such as those of steps, share
    a row. Percentiles between two values are interpolated: with fewer than 100 values, the 99th is close to the
    longest.
    """
    table = context.trace.table("user_annotation")
    if not len(table):
        return annotation_latency.answer([], [no_annotations("cpu")])
    nested = nest_tables([table], context.trace.window_end_ns)
    start, end = nested.events.start, nested.tree.end
    gpu_end, gpu_ns = _gpu_work(context, nested)
    row = nested.order.astype(np.int64)
    whole = np.flatnonzero(ends(table)[row] < context.trace.window_end_ns)
    kinds: dict[str, int] = {}
    kind = np.zeros(len(context.trace.strings), np.int64)
    for number in unique_values(table["name"]).tolist():
        kind[number] = kinds.setdefault(_NUMBER.sub("", context.trace.strings[number]), len(kinds))
    groups = group([kind[table["name"][row[whole]]]])
    count = groups.sizes()
    latency = (np.maximum(end, gpu_end) - start)[whole] / 1000
    parts = np.split(latency[np.argsort(groups.number, kind="stable")], np.cumsum(count)[:-1])
    found = np.array([np.percentile(part, list(PERCENTILES.values())) for part in parts if len(part)])
    found = found.reshape(-1, len(PERCENTILES))
    order = np.argsort(-found[:, 0], kind="stable")
    mean_gpu = groups.sums(gpu_ns[whole]) / count / 1000 if len(context.get(gpu)) else np.full(len(count), NAN)
    names = list(kinds)
    first = kind[table["name"][row[whole[groups.first[order]]]]]
    return Answer(
        {
            "name": [names[number] for number in first.tolist()],
            "count": count[order],
            **{name: found[order, at] for at, name in enumerate(PERCENTILES)},
            "mean_host_us": groups.sums((end - start)[whole])[order] / count[order] / 1000,
            "mean_gpu_us": mean_gpu[order],
        }
    )


def _gpu_work(context: Context, nested: Nested) -> tuple[Ints, Ints]:
    """Returns for each annotation, in tree order, the end of its last GPU activity (0: none) and the total GPU time
    (ns).
    """
    activity, called, tree = context.get(gpu), context.get(calls), nested.tree
    last, took = np.zeros(len(tree.parent), np.int64), np.zeros(len(tree.parent), np.int64)
    rows = np.flatnonzero(activity.call >= 0)
    if not len(rows):
        return last, took
    place = nested.innermost(called.thread, called.start)[activity.call[rows]].astype(np.int64)
    rows, place = rows[place >= 0], place[place >= 0]
    np.maximum.at(last, place, activity.end[rows])
    took = subtree_sums(sums(place, activity.end[rows] - activity.start[rows], len(last)), tree.stop)
    for depth in range(int(tree.depth.max()), 0, -1):
        level = np.flatnonzero(tree.depth == depth)
        np.maximum.at(last, tree.parent[level], last[level])
    return last, took
