"""Hardware counters of kernels, with the operators that launched them."""

import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kineto_trace.base.array_types import Ints, UInts32
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.event_arguments import argument, arguments
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, view

CATEGORY = "cuda_profiler_range"
_LAUNCH = "cudaLaunchKernel"
_FLOP = re.compile(r"smsp__sass_thread_inst_executed_op_[fhd](fma|mul|add)_pred_on\.sum$")


class _Pairs(NamedTuple):
    """Rows of `other` (ranges) and of cuda_runtime (launches), both by time, and what is wrong with them."""

    ranges: Ints
    launches: Ints
    note: str


@view(
    "counters_with_operators",
    columns(
        ("kernel", "text", "", "name of the profiled range"),
        ("start_ns", "int", "ns", "Unix time of the range"),
        ("duration_us", "float", "us", "duration of the range"),
        ("op_stack", "texts", "", "operators around the launch, from the outermost to the innermost"),
        ("top_op", "text", "", "outermost operator; missing if there is none"),
        ("bottom_op", "text", "", "innermost operator; missing if there is none"),
        ("counter", "text", "", "name of the counter"),
        ("value", "float", "", "its value"),
        (
            "flop",
            "float",
            "",
            "floating-point operations, for counters of such instructions (a fused one counts as two)",
        ),
    ),
)
def counters_with_operators(context: Context) -> Answer:
    """The counters measured by CUPTI's range profiler: one row per range and counter, with the launching operators.

    While ranges are profiled, kernels run one after the other and are not recorded themselves. The n-th range by time
    (category cuda_profiler_range) therefore belongs to the n-th call of cudaLaunchKernel….
    """
    trace = context.trace
    rows = np.arange(len(trace.table("other"))), np.arange(len(trace.table("cuda_runtime")))
    return counter_columns(context, *rows)


def counter_columns(context: Context, ranges: Ints, launches: Ints) -> Answer:
    """The columns of the view. ranges, launches: the rows of `other` and `cuda_runtime` that count."""
    pairs = _paired(context.trace, ranges, launches)
    names = [column.name for column in counters_with_operators.columns]
    if pairs.note:
        return Answer({name: [] for name in names}, (pairs.note,))
    trace = context.trace
    table, called = trace.table("other").take(pairs.ranges), trace.table("cuda_runtime").take(pairs.launches)
    counters = sorted({key for found in arguments(context, "other").objects for key in found})
    values = np.stack([argument(context, "other", key)[pairs.ranges] for key in counters] or [np.empty((0, 0))], axis=1)
    measured = ~np.isnan(values)
    row, counter = np.nonzero(measured)
    value = values[measured]
    factors = np.array([_flops(name) for name in counters])
    stack, top, bottom = _stacks(context, called["thread"], called["start"])
    return Answer(
        {
            "kernel": texts(trace.strings, table["name"][row]),
            "start_ns": table["start"][row],
            "duration_us": table["duration"][row] / 1000,
            "op_stack": stack.take(pa.array(row)),
            "top_op": texts(trace.strings, top[row]),
            "bottom_op": texts(trace.strings, bottom[row]),
            "counter": texts(counters, counter),
            "value": value,
            "flop": value * factors[counter] if len(counters) else value,
        }
    )


def _flops(counter: str) -> float:
    """Returns operations per count; NaN if it counts none."""
    found = _FLOP.match(counter)
    return float("nan") if found is None else 2.0 if found[1] == "fma" else 1.0


def _paired(trace: Trace, ranges: Ints, launches: Ints) -> _Pairs:
    empty, other, calls = np.empty(0, np.int64), trace.table("other"), trace.table("cuda_runtime")
    is_range = np.array([*(text == CATEGORY for text in trace.strings), False], np.bool_)
    is_launch = np.array([*(text.startswith(_LAUNCH) for text in trace.strings), False], np.bool_)
    ranges = ranges[is_range[other["category"][ranges]]]
    launches = launches[is_launch[calls["name"][launches]]]
    if not len(ranges):
        return _Pairs(empty, empty, f"there are no events of the category {CATEGORY} in the trace")
    if len(ranges) != len(launches):
        note = f"{len(ranges):,} ranges and {len(launches):,} calls of {_LAUNCH}… cannot be paired"
        return _Pairs(empty, empty, note)
    ranges = ranges[np.argsort(other["start"][ranges], kind="stable")]
    return _Pairs(ranges, launches[np.argsort(calls["start"][launches], kind="stable")], "")


def _stacks(context: Context, thread: UInts32, start: Ints) -> tuple[pa.Array, Ints, Ints]:
    """For each launch the operators around it, and the names of the outermost and the innermost one; -1: none."""
    tree, name = context.get(ops), context.trace.table("cpu_op")["name"]
    place = tree.nested.innermost(thread, start).astype(np.int64)
    launch, found = [], []
    rows = np.arange(len(place))
    while len(rows):
        rows = rows[place[rows] >= 0]
        launch.append(rows)
        found.append(place[rows])
        place[rows] = tree.nested.tree.parent[place[rows]]
    of_launch = np.concatenate([rows, *launch])
    names = name[tree.row[np.concatenate([rows, *found])]].astype(np.int64)
    order = np.lexsort((-np.arange(len(names)), of_launch))
    names = names[order]
    count = np.bincount(of_launch, minlength=len(start))
    offsets = np.concatenate([[0], np.cumsum(count)])
    stack = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts(context.trace.strings, names))
    padded = np.append(names, -1)
    top = np.where(count > 0, padded[offsets[:-1]], -1)
    bottom = np.where(count > 0, padded[offsets[1:] - 1], -1)
    return stack, top, bottom
