"""Kernels by their properties: how often, how long, and how well they fill the GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.context import Context
from kineto_trace.analysis.groups import Groups, group
from kineto_trace.analysis.launch_figures import launch_figures
from kineto_trace.analysis.parts import KERNEL, NOTHING, gpu
from kineto_trace.analysis.plugin_backward import plugin_backward
from kineto_trace.analysis.plugin_nodes import Node, launches, nodes
from kineto_trace.analysis.plugin_tree import plugin_tree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PROPERTIES = (
    *(f"grid_{axis}" for axis in "xyz"),
    *(f"block_{axis}" for axis in "xyz"),
    "registers",
    "static_shared_memory",
    "dynamic_shared_memory",
)
ROOT = -2  # an operator's number: what the plug-in calls CallTreeRoot


@dataclass(frozen=True, slots=True)
class KernelGroups:
    """Groups of kernels, the longest in all first. Durations in ns, one value per group.

    first: row of the table `kernel`. blocks_per_sm, occupancy: means weighted by duration; NaN: unknown.
    """

    groups: Groups
    order: Ints
    first: Ints
    calls: Ints
    total: Ints
    longest: Ints
    shortest: Ints
    blocks_per_sm: Floats
    occupancy: Floats


def kernel_groups(
    context: Context, keys: Sequence[npt.NDArray[Any]], rows: Ints, *, missing_is_zero: bool
) -> KernelGroups:
    """These rows of the table `kernel` (maybe several times) by their keys, an array each.

    missing_is_zero: a launch figure that is unknown counts as 0, else not at all.
    """
    found, figures = group(keys), context.get(launch_figures)
    took = context.trace.table("kernel")["duration"][rows]
    total = found.sums(took)
    longest, shortest = np.zeros(len(found), np.int64), np.full(len(found), np.iinfo(np.int64).max)
    np.maximum.at(longest, found.number, took)
    np.minimum.at(shortest, found.number, took)
    order = np.argsort(-total, kind="stable")
    blocks, occupancy = (
        _mean(found, value[rows], took, missing_is_zero) for value in (figures.blocks_per_sm, figures.occupancy)
    )
    return KernelGroups(
        groups=found,
        order=order,
        first=rows[found.first][order],
        calls=found.sizes()[order],
        total=total[order],
        longest=longest[order],
        shortest=shortest[order],
        blocks_per_sm=blocks[order],
        occupancy=occupancy[order],
    )


def _mean(found: Groups, value: Floats, took: Ints, missing_is_zero: bool) -> Floats:
    """The mean of each group, weighted by duration (by number where all durations are zero)."""
    known = np.flatnonzero(~np.isnan(value))
    if missing_is_zero and not len(known):
        return np.full(len(found), np.nan)
    rows = np.arange(len(value)) if missing_is_zero else known
    number, count = found.number[rows], len(found)
    weight = took[rows] / 1000
    summed = np.bincount(number, weights=np.nan_to_num(value[rows]) * weight, minlength=count)
    whole = np.bincount(number, weights=weight, minlength=count)
    plain = np.bincount(number, weights=np.nan_to_num(value[rows]), minlength=count)
    seen = np.bincount(number, minlength=count)
    empty = np.zeros(count) if missing_is_zero else np.divide(plain, seen, out=np.full(count, np.nan), where=seen > 0)
    return np.divide(summed, whole, out=empty, where=whole > 0)


def kernel_ops(context: Context) -> Ints:
    """For each row of the table `kernel` the row of cpu_op that launched it; NOTHING: none."""
    activity = context.get(gpu)
    own = activity.kind == KERNEL
    found = np.full(len(context.trace.table("kernel")), NOTHING, np.int64)
    found[activity.row[own]] = activity.op[own]
    return found


def plugin_kernel_ops(context: Context) -> tuple[Ints, Ints]:
    """Rows of the table `kernel` as the plug-in comes by them in its tree, and for each the number of a name.

    The name is that of the node with the kernel's call, by external ids. ROOT: kernels whose call has the external
    id 0, and, once for every thread that has steps, kernels without a call. All others are missing: calls without
    an operator of their external id.
    """
    launched, tree, found = context.get(launches), context.get(plugin_tree), context.get(nodes)
    kernel = np.flatnonzero(launched.kind == KERNEL)
    node = tree.activity[kernel]
    owned = np.flatnonzero(node >= 0)
    times = context.get(plugin_backward).visits[node[owned]]
    rows = [np.repeat(launched.row[kernel[owned]], times)]
    names = [np.repeat(tree.name[node[owned]].astype(np.int64), times)]
    zero = (launched.external == 0) & np.isin(launched.thread, np.unique(found.thread))
    call = launched.call[kernel]
    at_root = np.flatnonzero(np.append(zero, False)[call])
    lost = np.flatnonzero(call == NOTHING)
    threads = len(np.unique(found.thread[found.kind == Node.STEP]))
    for chosen in (at_root, *[lost] * threads):
        rows.append(launched.row[kernel[chosen]])
        names.append(np.full(len(chosen), ROOT, np.int64))
    return np.concatenate(rows), np.concatenate(names)
