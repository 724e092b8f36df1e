"""How long requests, batches and other annotated parts of a program took, by percentile."""

import re

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.annotation_views import no_annotations
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group, subtree_sums, sums
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu
from kineto_trace.structure.nesting import Nested, ends, nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]

NAN = float("nan")
_NUMBER = re.compile(r"#\d+$")  # of a step or a request
PERCENTILES = {"p50_us": 50.0, "p90_us": 90.0, "p95_us": 95.0, "p99_us": 99.0, "p99_9_us": 99.9, "max_us": 100.0}


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
        ("mean_host_us", "float", "us", "mean time on the host alone"),
        ("mean_gpu_us", "float", "us", "mean of the summed time of the GPU activities that were launched in it"),
    ),
)
def annotation_latency(context: Context) -> Answer:
    """The latency of each annotation, such as a request or a batch of inference, by percentile; the slowest come first.

    Latency lasts from the start of the annotation to its end on the host, or to the end of the last GPU activity that
    was launched in it, whichever is later. A number behind # at the end of a name, as of steps, does not tell rows
    apart. Percentiles between two values are interpolated: of fewer than 100 values, the 99th is close to the longest.
    """
    table = context.trace.table("user_annotation")
    if not len(table):
        return Answer({column.name: [] for column in annotation_latency.columns}, [no_annotations("cpu")])
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
    """Of each annotation, in the order of the tree: the end of its last GPU activity (0: none), their time (ns)."""
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
