"""The plug-in's distributed view in the views distributed_overlap, _wait, _ops and _devices.

Communication by the rules of the TensorBoard plug-in's distributed view: operators, their ranges, waiting by order.

Theory of operation
    A node is an operator or annotation with one of ten names (plugin_nodes.COLLECTIVES); if several have one external
    id (or none) the last to begin stays, which may be the gpu_user_annotation. Its ranges are its own one and those of
    the kernels with its external id (if there is any NCCL operator); it belongs to the step that contains it entirely.

    Over workers, nodes belong together by their order (by start), and so do their ranges (by start). The shortest of
    such ranges is the transfer; each worker's transfer is at the end of its range, the rest is synchronising.

    The view exists if every worker has nodes, all have the same number of them with the same numbers of ranges, and
    none uses two libraries. Times are the doubles of the file, in µs.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kineto_trace.analysis.distributed.distributed_views import (
    ALL,
    RankDevices,
    device_columns,
    distributed_devices,
    distributed_ops,
    distributed_overlap,
    distributed_wait,
    overlap,
    overlap_columns,
    rank_devices,
    wait_columns,
)
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Floats, Ints
from kineto_trace.collectives.nccl import MAX_NUMBER
from kineto_trace.compat.plugin_kernels import (
    host_tables,
    plugin_clock,
    plugin_roles,
    plugin_steps,
    rows_of,
    used_processes,
)
from kineto_trace.compat.plugin_tree import COLLECTIVES, base_ns, external_ids, file_times
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Trace
from kineto_trace.structure.event_arguments import parse
from kineto_trace.view_api.view import Answer, Compat, View

_NODE_AND_PROCESS = re.compile(r"(.*)_(\d{1,18})(?!\d)")  # of a worker's name
_KERNEL, _COMMUNICATION, _CPU = 0, 3, 6  # numbers into step_breakdown.ROLES
_MAX_DIMENSIONS = 64  # of a tensor
_BYTES = {"long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2, "unsigned char": 1}
NO_STEP = -1


@dataclass(frozen=True, slots=True)
class PluginRank:
    """What one worker contributes. Times in µs.

    steps: names.
    overlap: for each step computation, overlapping, communication, other.
    Nodes by start: name, step (place in `steps`; NO_STEP), bytes.
    Ranges by node and start: node, start, end.
    libraries: how many were used.
    """

    steps: tuple[str, ...]
    overlap: Floats
    name: tuple[str, ...]
    step: Ints
    bytes: Ints
    node: Ints
    start: Floats
    end: Floats
    libraries: int
    communicates: bool


Partials = Sequence[tuple[int, PluginRank]]


def _nothing(of: View, reason: str) -> Answer:
    return of.answer([], [f"the plug-in would not show a distributed view: {reason}"])


def _overlap_rows(partials: Partials) -> Answer:
    if reason := missing([part for _, part in partials]):
        return _nothing(distributed_overlap, reason)
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
        return _nothing(distributed_wait, reason)
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

    Collectives are matched by their order, only ten operators count, and an operator's own time on the host counts like
    a kernel. The step "" is for collectives outside of steps; the row "all" is in whole microseconds.
    """
    return context.get(plugin_rank)


def _op_rows(partials: Partials) -> Answer:
    if reason := missing([part for _, part in partials]):
        return _nothing(distributed_ops, reason)
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
    return distributed_ops.answer(rows)


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


def plugin_rank(context: Context) -> PluginRank:
    """Returns the contribution of one worker."""
    trace, texts = context.trace, context.trace.strings
    base = base_ns(trace)
    wanted = np.fromiter((text in COLLECTIVES for text in texts), np.bool_, len(texts))
    tables = [table.take(wanted[table["name"]]) for table in host_tables(context)]
    times = [file_times(table, base) for table in tables]
    start = np.concatenate([each for each, _ in times])
    end = start + np.concatenate([each for _, each in times])
    name = np.concatenate([table["name"] for table in tables])
    ids = np.concatenate([external_ids(table) for table in tables])
    inputs = np.concatenate(
        [table["inputs"] if "inputs" in table.columns else np.full(len(table), NO_STRING) for table in tables]
    )
    place = np.concatenate([table.origin.get("place", np.zeros(len(table), np.uint32)) for table in tables])
    libraries = len({texts[number].split(":")[0] for number in unique_values(name).tolist()})
    nccl = any(texts[number].startswith("nccl:") for number in unique_values(name).tolist())
    by_start = np.lexsort((place, start))
    latest = dict(zip(ids[by_start].tolist(), by_start.tolist(), strict=True))
    kept = np.array(list(latest.values()), np.int64)
    kept = kept[np.lexsort((-end[kept], start[kept]))]
    if libraries > 1:
        kept = kept[:0]
    steps = context.get(plugin_steps)
    clock = context.get(plugin_clock)
    node, range_start, range_end = _ranges(context, base, start[kept], end[kept], ids[kept], nccl)
    return PluginRank(
        steps=steps.name,
        overlap=_overlap(context),
        name=tuple(texts[number] for number in name[kept].tolist()),
        step=_steps(start[kept], end[kept], clock.us(steps.start), clock.us(steps.end)),
        bytes=_sizes(trace, inputs[kept]),
        node=node,
        start=range_start,
        end=range_end,
        libraries=libraries,
        communicates=bool(len(context.get(plugin_roles)[_COMMUNICATION].start)),
    )


def _ranges(
    context: Context, base: int, start: Floats, end: Floats, ids: Ints, nccl: bool
) -> tuple[Ints, Floats, Floats]:
    node = np.arange(len(start))
    if nccl and len(ids):
        kernel = rows_of(context, "kernel")
        order, external = np.argsort(ids, kind="stable"), external_ids(kernel)
        at = np.minimum(np.searchsorted(ids[order], external), len(ids) - 1)
        rows = np.flatnonzero(ids[order[at]] == external)
        kernel_start, duration = (times[rows] for times in file_times(kernel, base))
        node = np.concatenate([node, order[at[rows]]])
        start = np.concatenate([start, kernel_start])
        end = np.concatenate([end, kernel_start + duration])
    order = np.lexsort((-end, start, node))
    return node[order], start[order], end[order]


def _steps(start: Floats, end: Floats, step_start: Floats, step_end: Floats) -> Ints:
    """Returns for each node the step that contains it entirely, or NO_STEP. Steps are left behind one by one."""
    if not len(step_start):
        return np.full(len(start), NO_STEP)
    at = np.searchsorted(np.maximum.accumulate(step_end), start, side="right")
    place = np.minimum(at, len(step_start) - 1)
    inside = (at < len(step_start)) & (start >= step_start[place]) & (end <= step_end[place])
    return np.where(inside, place, NO_STEP)


def _sizes(trace: Trace, inputs: AnyArray) -> Ints:
    sizes = {number: _size(trace.strings[number]) if number >= 0 else 0 for number in unique_values(inputs).tolist()}
    return np.array([sizes[number] for number in inputs.tolist()], np.int64)


def _size(text: str) -> int:
    """Sums over all inputs the product of the dimensions times the width of the type; unknown types have width 0.

    0 if that is more than there can be.
    """
    arguments = parse(text)
    shapes = arguments.get("Input Dims", arguments.get("Input dims")) or []
    types = arguments.get("Input type") or []
    total = 0
    for shape, kind in zip(shapes, types, strict=False):
        if isinstance(shape, list) and all(isinstance(length, int) and abs(length) < MAX_NUMBER for length in shape):
            total += math.prod(shape[:_MAX_DIMENSIONS]) * _BYTES.get(kind, 0)
    return total if abs(total) < MAX_NUMBER else 0


def _overlap(context: Context) -> Floats:
    """Returns PluginRank.overlap. Without kernels, the operators of the host count as computation."""
    roles, steps = context.get(plugin_roles), context.get(plugin_steps)
    computing = roles[_KERNEL] if len(roles[_KERNEL].start) else roles[_CPU]
    return overlap(computing, roles[_COMMUNICATION], steps.start, steps.end) / context.get(plugin_clock).per_us


def missing(ranks: Sequence[PluginRank]) -> str | None:
    """Returns why the plug-in shows no distributed view for these workers, or None if it shows one."""
    if any(rank.libraries > 1 for rank in ranks):
        return "a rank uses more than one communication library"
    if not ranks or any(not rank.communicates or not rank.name for rank in ranks):
        return "a rank has no communication operator that the plug-in knows"
    if len({len(rank.name) for rank in ranks}) > 1:
        return "the ranks differ in the number of communication operators"
    if len({tuple(np.bincount(rank.node).tolist()) for rank in ranks}) > 1:
        return "the ranks differ in the number of kernels of a communication operator"
    return None


def transfers(ranks: Sequence[PluginRank]) -> Floats:
    """Returns for each range, by order, the shortest duration on any worker, in µs."""
    found: Floats = np.min([rank.end - rank.start for rank in ranks], axis=0)
    return found


def merged_length(start: Floats, end: Floats) -> float:
    """Returns the length of the union of the ranges."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    begins = np.concatenate([[True], start[1:] > reach[:-1]])
    first = np.flatnonzero(begins)
    last = np.append(first[1:] - 1, len(start) - 1)
    return float((reach[last] - start[first]).sum())
