"""Kernels as the TensorBoard plug-in sees them: their operators, launch figures and use of tensor cores."""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.kernels.kernel_groups import Mean, known_mean
from kineto_trace.analysis.kernels.launch_occupancy import LaunchFigures, launch_figures, stated_figures
from kineto_trace.analysis.kernels.tensor_core_use import NAN, TensorUse, share_of
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.compat.tensorboard.plugin_backward import outermost, plugin_backward
from kineto_trace.compat.tensorboard.plugin_nodes import launches, nodes
from kineto_trace.compat.tensorboard.plugin_steps import plugin_roles
from kineto_trace.compat.tensorboard.plugin_tensor_names import plugin_tensor_names
from kineto_trace.compat.tensorboard.plugin_tree import plugin_tree
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, NOTHING

ROOT = -2  # the number of what the plug-in calls CallTreeRoot

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def plugin_launch_figures(context: Context) -> LaunchFigures:
    """Returns the figures that the plug-in sees: those stated in the file or, of our captures, in their export."""
    return context.get(launch_figures) if context.trace.head is None else stated_figures(context)


def plugin_mean_by_name(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """Returns the plug-in's mean for kernels by name; unknown values are 0. It adds in numpy's order."""
    order = np.argsort(number, kind="stable")
    ends = np.cumsum(np.bincount(number, minlength=count))[:-1]
    weights = np.split(took[order], ends)
    products = np.split(np.nan_to_num(value[order]) * took[order], ends)
    wholes = [weight.sum() for weight in weights]
    return np.array([part.sum() / whole if whole else 0.0 for part, whole in zip(products, wholes, strict=True)])


def plugin_mean(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """Returns the same for kernels by operator, which the plug-in adds one after the other."""
    summed = np.bincount(number, weights=np.nan_to_num(value) * took, minlength=count)
    whole = np.bincount(number, weights=took, minlength=count)
    mean: Floats = np.divide(summed, whole, out=np.zeros(count), where=whole > 0)
    return mean


def plugin_means(mean: Mean, figures: LaunchFigures) -> tuple[Mean, Mean]:
    """Returns the means of blocks per multiprocessor and of occupancy. A figure that no kernel has stays unknown."""
    blocks, occupancy = (figures.blocks_per_sm > 0).any(), (figures.occupancy >= 0).any()
    return mean if blocks else known_mean, mean if occupancy else known_mean


def plugin_kernel_ops(context: Context) -> tuple[Ints, Ints, Floats]:
    """Returns rows of the table `kernel` as the plug-in visits them, and for each the number of a name, and µs.

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
    threads = len(unique_values(found.thread[steps[found.name]]))
    for chosen in (at_root, *[lost] * threads):
        rows.append(launched.row[kernel[chosen]])
        names.append(np.full(len(chosen), ROOT, np.int64))
    row = np.concatenate(rows)
    return row, np.concatenate(names), launched.device_duration[kernel][row]


def plugin_tensor_use(context: Context) -> TensorUse:
    """Returns the figures by the plug-in's names and operator tree; kernels count as often as it visits their node."""
    table, tree, launched = context.trace.table("kernel"), context.get(plugin_tree), context.get(launches)
    took = table["duration"].astype(np.float64)
    uses = context.get(plugin_tensor_names)[table["name"]]
    kernel = launched.kind == KERNEL
    node = tree.activity[kernel]
    owned = np.flatnonzero(node >= 0)
    visits = context.get(plugin_backward).visits[node[owned]]
    weighted = launched.device_duration[kernel][owned] * visits
    is_op = tree.operator[node[owned]]
    deepest = _deepest(context)
    devices, device = np.unique(table["device"], return_inverse=True)
    whole = np.bincount(device[owned], weights=weighted * is_op, minlength=len(devices))
    tensor = np.bincount(device[owned], weights=weighted * (is_op & uses[owned]), minlength=len(devices))
    counted = bool((is_op & (visits > 0)).any())
    shown = len(context.get(plugin_roles)[0].start) > 0  # without kernels that are no communication: no kernel view
    return TensorUse(
        kernel_share=share_of(took[uses].sum(), took.sum(), 0.0) if shown else NAN,
        by_device={
            number: share_of(part, of_device, 0.0)
            for number, part, of_device in zip(devices.tolist(), tensor, whole, strict=True)
            if counted
        },
        eligible_share=share_of(weighted[deepest[node[owned]]].sum(), whole.sum(), 0.0),
    )


def _deepest(context: Context) -> Flags:
    """Tells which eligible nodes have no eligible one inside; backward operators count where they were hung."""
    tree, moved = context.get(plugin_tree), context.get(plugin_backward)
    inside = tree.below(tree.eligible)
    eligible = tree.eligible.astype(np.int64)
    top = outermost(moved.parent)
    of_top = np.bincount(top[moved.below], weights=inside[moved.roots], minlength=len(moved.module))[moved.hung]
    hosted = (of_top > 0) & (moved.host >= 0)
    np.add.at(eligible, moved.host[hosted], 1)
    found: Flags = tree.eligible & (tree.below(eligible) == 1)
    return found
