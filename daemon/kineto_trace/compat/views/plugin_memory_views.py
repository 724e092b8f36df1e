"""The plug-in's memory view in the views memory_statistics, memory_curve and memory_events."""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.memory.memory_views import (
    between,
    blocks,
    by_operator,
    curve_columns,
    event_columns,
    memory_curve,
    memory_events,
    memory_statistics,
    metrics,
    missing,
    operator_texts,
    point_limit,
    statistics_columns,
)
from kineto_trace.arrays.row_groups import sums
from kineto_trace.compat.tensorboard.plugin_backward import plugin_backward
from kineto_trace.compat.tensorboard.plugin_memory import (
    calls_counted,
    plugin_events,
    plugin_levels,
    plugin_memory,
    profiler_start,
)
from kineto_trace.compat.tensorboard.plugin_nodes import base_ns, microseconds
from kineto_trace.compat.tensorboard.plugin_sweep import summed_up, traversals
from kineto_trace.compat.tensorboard.plugin_tree import plugin_tree
from kineto_trace.model.context import Context
from kineto_trace.structure.allocations import NOTHING, largest_triangles, memory_records
from kineto_trace.view_api.view import Answer, Compat

POINTS = 10240
UNKNOWN, ROOT = "<unknown>", "CallTreeRoot"  # the plug-in's names

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@memory_statistics.variant(Compat.PLUGIN)
def plugin_statistics(context: Context, *, start_ns: int | None = None, end_ns: int | None = None) -> Answer:
    """compat=plugin: the memory view of the TensorBoard profiler plug-in.

    It uses the plug-in's operator tree, counts calls only of operators that the plug-in visits (it does not look
    inside a node without any record), and has CPU and GPUs only. Rows are sorted by name.
    """
    records = context.get(memory_records)
    chosen, notes = between(records, start_ns, end_ns), missing(records)
    tree, found, moved = context.get(plugin_tree), context.get(plugin_memory), context.get(plugin_backward)
    base = base_ns(context.trace)
    low, high = (None if ns is None else float(microseconds(np.array([ns]), base)[0]) for ns in (start_ns, end_ns))
    inside = tree.operator.copy()
    if low is not None:
        inside &= tree.end >= low
    if high is not None:
        inside &= tree.start <= high
    turn = traversals(tree, moved, found.entered, low, high)
    counted = np.where(inside, calls_counted(context, turn), 0)
    calls = sums(tree.name.astype(np.int64), counted, len(context.trace.strings))
    parts = []
    for device in range(len(records.devices)):
        usable = chosen & found.known & (found.operator >= 0) & (records.device == device)
        own = metrics(records, usable, found.operator, len(tree))
        total = {name: summed_up(tree, moved, turn, values) for name, values in own.items()}
        parts.append(by_operator(tree.name, total, own, (counted > 0).astype(np.int64)))
    return statistics_columns(context, records, parts, calls, notes, by_name=True)


@memory_curve.variant(Compat.PLUGIN)
def plugin_curve(context: Context, *, max_points: int = 0) -> Answer:
    """compat=plugin: the curve of the TensorBoard profiler plug-in.

    Every change is two points at the same time, the level before it and the level after it, and a device has at most
    10240 points unless max_points is given.
    """
    limit = point_limit(max_points) or POINTS
    records = context.get(memory_records)
    start = profiler_start(context)
    parts = []
    for device, name in enumerate(records.devices):
        time, allocated, reserved = plugin_levels(context, device)
        if len(time):
            points = _steps(microseconds(time, base_ns(context.trace)) - start, allocated, reserved)
            parts.append((name, points[largest_triangles(points, limit)]))
    return curve_columns(parts, None, missing(records))


def _steps(time: Floats, allocated: Ints, reserved: Ints) -> Floats:
    """Every point but the first one preceded by the level before it."""
    points = np.stack([time, allocated, reserved], axis=1).astype(np.float64)
    twice = np.repeat(points, 2, axis=0)[1:]
    twice[1::2, 1:] = points[:-1, 1:]
    return twice


@memory_events.variant(Compat.PLUGIN)
def plugin_event_rows(
    context: Context,
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    min_bytes: int = 0,
    max_bytes: int | None = None,
) -> Answer:
    """compat=plugin: the events of the TensorBoard profiler plug-in.

    Pairs come first, by release, then blocks that were not released, then blocks that were not allocated. An address
    that was allocated twice without a release shows only the second allocation.
    """
    records = context.get(memory_records)
    tree, found = context.get(plugin_tree), context.get(plugin_memory)
    first, second = plugin_events(records)
    known = np.append(found.known, False)[np.where(first >= 0, first, second)]
    chosen = between(records, start_ns, end_ns)
    first, second = blocks(records, first[known], second[known], chosen, min_bytes=min_bytes, max_bytes=max_bytes)
    node = np.append(found.operator, NOTHING)[first]
    node = np.where(first >= 0, node, NOTHING)
    name = np.append(tree.name, NOTHING)
    names = operator_texts(context, name[node], name[np.append(tree.parent, NOTHING)[node]], UNKNOWN, ROOT)
    time = microseconds(records.time, base_ns(context.trace)) - profiler_start(context)
    return event_columns(records, first, second, time, names.texts[names.number], missing(records))
