"""Kernels by their properties: how often, how long, and how well they fill the GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.kernels.launch_occupancy import LaunchFigures
from kineto_trace.arrays.row_groups import Groups, group
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, NOTHING, captured_ops, gpu, owners

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

PROPERTIES = (
    *(f"grid_{axis}" for axis in "xyz"),
    *(f"block_{axis}" for axis in "xyz"),
    "registers",
    "static_shared_memory",
    "dynamic_shared_memory",
)
Mean = Callable[[Ints, Floats, Floats, int], Floats]  # of each row its group, a figure and us; and the groups


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


def known_mean(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """The mean of what is known, weighted by duration (by number where all durations are zero)."""
    rows = np.flatnonzero(~np.isnan(value))
    number, value, took = number[rows], value[rows], took[rows]
    whole = np.bincount(number, weights=took, minlength=count)
    weight = np.where(whole[number] > 0, took, 1)
    summed = np.bincount(number, weights=value * weight, minlength=count)
    whole = np.bincount(number, weights=weight, minlength=count)
    mean: Floats = np.divide(summed, whole, out=np.full(count, np.nan), where=whole > 0)
    return mean


def kernel_groups(
    keys: Sequence[npt.NDArray[Any]],
    rows: Ints,
    took: Floats,
    figures: LaunchFigures,
    means: tuple[Mean, Mean] = (known_mean, known_mean),
) -> KernelGroups:
    """These rows of the table `kernel` (maybe several times) by their keys, an array each. took: us.

    means: of blocks per multiprocessor and of occupancy.
    """
    found = group(keys)
    count = len(found)
    total = np.bincount(found.number, weights=took, minlength=count).astype(np.float64)
    longest, shortest = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(longest, found.number, took)
    np.minimum.at(shortest, found.number, took)
    order = np.argsort(-total, kind="stable")
    return KernelGroups(
        groups=found,
        order=order,
        first=rows[found.first][order],
        calls=found.sizes()[order],
        total=total[order],
        longest=longest[order],
        shortest=shortest[order],
        blocks_per_sm=means[0](found.number, figures.blocks_per_sm[rows], took, count)[order],
        occupancy=means[1](found.number, figures.occupancy[rows], took, count)[order],
    )


def kernel_ops(context: Context) -> Ints:
    """For each row of the table `kernel` the row of cpu_op that launched it; NOTHING: none."""
    activity = context.get(gpu)
    own = activity.kind == KERNEL
    found = np.full(len(context.trace.table("kernel")), NOTHING, np.int64)
    found[activity.row[own]] = activity.op[own]
    return found


def captured_kernels(context: Context) -> Flags:
    """For each row of the table `kernel` whether it belongs to an op that captured it into a CUDA graph."""
    activity = context.get(gpu)
    own = activity.kind == KERNEL
    found = np.zeros(len(context.trace.table("kernel")), np.bool_)
    found[activity.row[own]] = context.get(captured_ops)[own] != NOTHING
    return found


def kernel_owners(context: Context) -> Ints:
    """For each row of the table `kernel` the name of the op or annotation that it belongs to; NOTHING: none."""
    activity = context.get(gpu)
    own = activity.kind == KERNEL
    found = np.full(len(context.trace.table("kernel")), NOTHING, np.int64)
    found[activity.row[own]] = context.get(owners)[own]
    return found
