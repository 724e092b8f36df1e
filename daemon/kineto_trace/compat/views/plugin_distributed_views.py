"""The plug-in's distributed view in the views distributed_overlap, _wait, _ops and _devices."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.distributed.distributed_views import (
    ALL,
    OPS,
    OVERLAP,
    WAIT,
    RankDevices,
    device_columns,
    distributed_devices,
    distributed_ops,
    distributed_overlap,
    distributed_wait,
    op_columns,
    overlap_columns,
    rank_devices,
    wait_columns,
)
from kineto_trace.compat.tensorboard.plugin_communication import (
    NO_STEP,
    PluginRank,
    merged_length,
    missing,
    plugin_rank,
    transfers,
)
from kineto_trace.compat.tensorboard.plugin_steps import used_processes
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat

Partials = Sequence[tuple[int, PluginRank]]
Floats = npt.NDArray[np.float64]
_NODE_AND_PROCESS = re.compile(r"(.*)_(\d+)")  # of a worker's name


def _nothing(names: Sequence[str], reason: str) -> Answer:
    return Answer({name: [] for name in names}, [f"the plug-in would not show a distributed view: {reason}"])


def _overlap_rows(partials: Partials) -> Answer:
    if reason := missing([part for _, part in partials]):
        return _nothing(("step", "rank", *OVERLAP), reason)
    return overlap_columns(partials, np.trunc)


@distributed_overlap.variant(Compat.PLUGIN, reduce=_overlap_rows)
def plugin_overlap(context: Context) -> PluginRank:
    """compat=plugin: the figures of the TensorBoard profiler plug-in.

    Communication is everything with the external id of one of ten operators, and the time of these operators
    themselves on the host. The row "all" is in whole microseconds. There is no result unless every rank has the same
    number of these operators.
    """
    return context.get(plugin_rank)


def _wait_rows(partials: Partials) -> Answer:
    if reason := missing([part for _, part in partials]):
        return _nothing(("step", "rank", *WAIT), reason)
    transfer = transfers([part for _, part in partials])
    rows: dict[tuple[str, int], Floats] = {}
    names = [ALL]
    for rank, part in partials:
        labels = ["" if step == NO_STEP else part.steps[step] for step in part.step.tolist()]
        used = list(dict.fromkeys(labels))
        step_of_node = np.array([used.index(label) for label in labels])
        costs = []
        for place, label in enumerate(used):
            chosen = step_of_node[part.node] == place
            start, end = part.start[chosen], part.end[chosen]
            moving = merged_length(end - transfer[chosen], end)
            costs.append(np.array([moving, merged_length(start, end) - moving]))
            rows[label, rank] = costs[-1]
        names += used
        rows[ALL, rank] = np.trunc(np.sum(costs, axis=0) / max(1, len(costs)))
    return wait_columns(rows, list(dict.fromkeys(names)), [rank for rank, _ in partials])


@distributed_wait.variant(Compat.PLUGIN, reduce=_wait_rows)
def plugin_wait(context: Context) -> PluginRank:
    """compat=plugin: the figures of the TensorBoard profiler plug-in.

    Collectives are matched by their order, only ten operators count, and an operator's own time on the host counts
    like a kernel. The step "" is what lies in no step; the row "all" is in whole microseconds.
    """
    return context.get(plugin_rank)


def _op_rows(partials: Partials) -> Answer:
    if reason := missing([part for _, part in partials]):
        return _nothing(("rank", "name", *OPS), reason)
    transfer = transfers([part for _, part in partials])
    rows: list[tuple[Any, ...]] = []
    for rank, part in partials:
        names = np.array(part.name, object)
        for name in dict.fromkeys(part.name):
            nodes = names == name
            chosen = nodes[part.node]
            start, end = part.start[chosen], part.end[chosen]
            count, size = int(nodes.sum()), int(part.bytes[nodes].sum())
            total, moving = merged_length(start, end), merged_length(end - transfer[chosen], end)
            rows.append(
                (rank, name, count, size, round(size / count), total, round(total / count))
                + (moving, round(moving / count))
            )
    return op_columns(rows)


@distributed_ops.variant(Compat.PLUGIN, reduce=_op_rows)
def plugin_ops(context: Context) -> PluginRank:
    """compat=plugin: the figures of the TensorBoard profiler plug-in.

    Only the operators nccl:… and gloo:… broadcast, reduce, all_reduce, all_gather and reduce_scatter count, with their
    own time on the host too. Bytes are the elements of their inputs times 8 (long), 4 (float, int), 2 (Half,
    BFloat16), 1 (uchar) or 0. Collectives are matched by their order, and averages are rounded.
    """
    return context.get(plugin_rank)


def _device_rows(partials: Sequence[tuple[int, RankDevices]]) -> Answer:
    places = {rank: (part.host, part.process) for rank, part in partials}
    unnamed = 0
    for rank, part in sorted(partials, key=lambda entry: entry[1].worker):
        if match := _NODE_AND_PROCESS.match(part.worker):
            places[rank] = match[1], int(match[2])
        elif part.worker and part.devices:
            places[rank] = part.worker, unnamed
            unnamed += 1
    return device_columns(partials, places)


@distributed_devices.variant(Compat.PLUGIN, reduce=_device_rows)
def plugin_devices(context: Context) -> RankDevices:
    """compat=plugin: the figures of the TensorBoard profiler plug-in.

    Only GPUs whose properties are in the file are listed. For files of a TensorBoard log folder
    ("<machine>_<process id>.pt.trace.json"), machine and process come from the file name; other names count as
    machines, whose processes are numbered from 0.
    """
    known = dict(enumerate(context.trace.devices))
    return rank_devices(context, sorted(number for number in used_processes(context) if number in known), known)
