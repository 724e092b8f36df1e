"""Communication as the TensorBoard plug-in's distributed view sees it: operators, their ranges, waiting by order.

Theory of operation
    A node is an operator or annotation with one of ten names (plugin_nodes.COLLECTIVES); of several with one external
    id (or without any) the last to begin stays, which may be the gpu_user_annotation. Its ranges are its own one and
    those of the kernels with its external id (if there is any NCCL operator); it belongs to the step in which it lies
    as a whole.

    Over workers, nodes belong together by their order (by start), and so do their ranges (by start). The shortest of
    such ranges is the transfer; each worker's transfer lies at the end of its range, the rest is synchronising.

    The view exists if every worker has nodes, all have the same number of them with the same numbers of ranges, and
    none uses two libraries. Times are the doubles of the file, in µs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.distributed.distributed_views import overlap
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.compat.tensorboard.plugin_nodes import COLLECTIVES, base_ns, external_ids, file_times
from kineto_trace.compat.tensorboard.plugin_steps import host_tables, plugin_clock, plugin_roles, plugin_steps, rows_of
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Trace
from kineto_trace.structure.event_arguments import parse

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_KERNEL, _COMMUNICATION, _CPU = 0, 3, 6  # numbers into step_breakdown.ROLES
_BYTES = {"long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2, "unsigned char": 1}
NO_STEP = -1


@dataclass(frozen=True, slots=True)
class PluginRank:
    """What one worker contributes. Times in µs.

    steps: names. overlap: for each step computation, overlapping, communication, other. Nodes by start: name, step
    (place in `steps`; NO_STEP), bytes. Ranges by node and start: node, start, end. libraries: how many were used.
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
    """Returns for each node the step in which it lies as a whole, or NO_STEP. Steps are left behind one by one."""
    if not len(step_start):
        return np.full(len(start), NO_STEP)
    at = np.searchsorted(np.maximum.accumulate(step_end), start, side="right")
    place = np.minimum(at, len(step_start) - 1)
    inside = (at < len(step_start)) & (start >= step_start[place]) & (end <= step_end[place])
    return np.where(inside, place, NO_STEP)


def _sizes(trace: Trace, inputs: npt.NDArray[Any]) -> Ints:
    sizes = {number: _size(trace.strings[number]) if number >= 0 else 0 for number in unique_values(inputs).tolist()}
    return np.array([sizes[number] for number in inputs.tolist()], np.int64)


def _size(text: str) -> int:
    """Sums over all inputs the product of the dimensions times the width of the type; unknown types have width 0."""
    arguments = parse(text)
    shapes = arguments.get("Input Dims", arguments.get("Input dims")) or []
    types = arguments.get("Input type") or []
    total = 0
    for shape, kind in zip(shapes, types, strict=False):
        if isinstance(shape, list) and all(isinstance(length, int) for length in shape):
            total += int(np.prod(shape, dtype=np.int64)) * _BYTES.get(kind, 0)
    return total


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
