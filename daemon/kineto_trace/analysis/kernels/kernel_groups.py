"""Kernels by their properties: how often, how long, and how well they fill the GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.kernels.launch_occupancy import launch_figures, plugin_launch_figures
from kineto_trace.arrays.row_groups import Groups, group
from kineto_trace.compat.tensorboard.plugin_backward import plugin_backward
from kineto_trace.compat.tensorboard.plugin_nodes import launches, nodes
from kineto_trace.compat.tensorboard.plugin_tree import plugin_tree
from kineto_trace.decode.iterations import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, NOTHING, gpu, owners

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PROPERTIES = (
    *(f"grid_{axis}" for axis in "xyz"),
    *(f"block_{axis}" for axis in "xyz"),
    "registers",
    "static_shared_memory",
    "dynamic_shared_memory",
)
Mean = Callable[[Ints, Floats, Floats, int], Floats]  # of each row its group, a figure and us; and the groups
ROOT = -2  # an operator's number: what the plug-in calls CallTreeRoot


@dataclass(frozen=True, slots=True)
class KernelGroups:
    """Groups of kernels, the longest in all first. Durations in us, one value per group.

    first: row of the table `kernel`. blocks_per_sm, occupancy: means weighted by duration; NaN: unknown.
    """

    groups: Groups
    order: Ints
    first: Ints
    calls: Ints
    total: Floats
    longest: Floats
    shortest: Floats
    blocks_per_sm: Floats
    occupancy: Floats


def kernel_groups(
    context: Context, keys: Sequence[npt.NDArray[Any]], rows: Ints, took: Floats, mean: Mean | None = None
) -> KernelGroups:
    """These rows of the table `kernel` (maybe several times) by their keys, an array each. took: us.

    mean: the plug-in's, of a launch figure in each group; without it, what is unknown does not count.
    """
    found, figures = group(keys), context.get(plugin_launch_figures if mean else launch_figures)
    count = len(found)
    total = np.bincount(found.number, weights=took, minlength=count).astype(np.float64)
    longest, shortest = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(longest, found.number, took)
    np.minimum.at(shortest, found.number, took)
    order = np.argsort(-total, kind="stable")
    blocks, occupancy = (
        mean(found.number, value[rows], took, count)
        if mean and any_of(value)
        else _known_mean(found.number, value[rows], took, count)
        for value, any_of in ((figures.blocks_per_sm, _any_positive), (figures.occupancy, _any_known))
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


def _any_positive(value: Floats) -> bool:
    return bool((value > 0).any())


def _any_known(value: Floats) -> bool:
    return bool((value >= 0).any())


def _known_mean(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """The mean of what is known, weighted by duration (by number where all durations are zero)."""
    rows = np.flatnonzero(~np.isnan(value))
    number, value, took = number[rows], value[rows], took[rows]
    whole = np.bincount(number, weights=took, minlength=count)
    weight = np.where(whole[number] > 0, took, 1)
    summed = np.bincount(number, weights=value * weight, minlength=count)
    whole = np.bincount(number, weights=weight, minlength=count)
    mean: Floats = np.divide(summed, whole, out=np.full(count, np.nan), where=whole > 0)
    return mean


def plugin_mean_by_name(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """The plug-in's mean for kernels by name: what is unknown is 0. It adds as numpy does, which rounding can show."""
    order = np.argsort(number, kind="stable")
    ends = np.cumsum(np.bincount(number, minlength=count))[:-1]
    weights = np.split(took[order], ends)
    products = np.split(np.nan_to_num(value[order]) * took[order], ends)
    wholes = [weight.sum() for weight in weights]
    return np.array([part.sum() / whole if whole else 0.0 for part, whole in zip(products, wholes, strict=True)])


def plugin_mean(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """The same for kernels by operator, which it adds one after the other."""
    summed = np.bincount(number, weights=np.nan_to_num(value) * took, minlength=count)
    whole = np.bincount(number, weights=took, minlength=count)
    mean: Floats = np.divide(summed, whole, out=np.zeros(count), where=whole > 0)
    return mean


def kernel_ops(context: Context) -> Ints:
    """For each row of the table `kernel` the row of cpu_op that launched it; NOTHING: none."""
    activity = context.get(gpu)
    own = activity.kind == KERNEL
    found = np.full(len(context.trace.table("kernel")), NOTHING, np.int64)
    found[activity.row[own]] = activity.op[own]
    return found


def kernel_owners(context: Context) -> Ints:
    """For each row of the table `kernel` the name of the op or annotation that it belongs to; NOTHING: none."""
    activity = context.get(gpu)
    own = activity.kind == KERNEL
    found = np.full(len(context.trace.table("kernel")), NOTHING, np.int64)
    found[activity.row[own]] = context.get(owners)[own]
    return found


def plugin_kernel_ops(context: Context) -> tuple[Ints, Ints, Floats]:
    """Rows of the table `kernel` as the plug-in comes by them in its tree; for each the number of a name, and us.

    The name is that of the node with the kernel's call, by external ids. ROOT: kernels whose call has the external
    id 0 in a thread that has nodes, and, once for every thread that has steps, kernels without a call. All others are
    missing: calls without an operator of their external id.
    """
    launched, tree, found = context.get(launches), context.get(plugin_tree), context.get(nodes)
    kernel = np.flatnonzero(launched.kind == KERNEL)
    node = tree.activity[kernel]
    owned = np.flatnonzero(node >= 0)
    moved = context.get(plugin_backward)
    times = moved.visits[node[owned]]
    rows = [np.repeat(launched.row[kernel[owned]], times)]
    names = [np.repeat(tree.name[node[owned]].astype(np.int64), times)]
    left = np.bincount(tree.track[tree.parent == NOTHING], minlength=int(tree.track.max(initial=-1)) + 1)
    left -= np.bincount(tree.track[moved.removed[tree.parent[moved.removed] == NOTHING]], minlength=len(left))
    if len(left):
        left[moved.main] += np.count_nonzero(moved.host == NOTHING)
    zero = (launched.external == 0) & np.isin(launched.thread, tree.thread[left[tree.track] > 0])
    call = launched.call[kernel]
    at_root = np.flatnonzero(np.append(zero, False)[call])
    lost = np.flatnonzero(call == NOTHING)
    steps = np.array([text.startswith(STEP_PREFIX) for text in context.trace.strings], np.bool_)
    threads = len(np.unique(found.thread[steps[found.name]]))
    for chosen in (at_root, *[lost] * threads):
        rows.append(launched.row[kernel[chosen]])
        names.append(np.full(len(chosen), ROOT, np.int64))
    row = np.concatenate(rows)
    return row, np.concatenate(names), launched.device_duration[kernel][row]
