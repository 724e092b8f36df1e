"""How much of the kernels' time uses tensor cores, and how much of it could.

Could: kernels of the deepest eligible operators (tensor_cores.py), those with no eligible operator inside. What such
an operator or any operator in it launched counts here; for the plug-in only what it launched itself.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.op_times import tensor_times
from kineto_trace.arrays.row_groups import subtree_sums
from kineto_trace.compat.tensorboard.plugin_backward import outermost, plugin_backward
from kineto_trace.compat.tensorboard.plugin_nodes import launches
from kineto_trace.compat.tensorboard.plugin_steps import plugin_roles
from kineto_trace.compat.tensorboard.plugin_tensor_names import plugin_tensor_names
from kineto_trace.compat.tensorboard.plugin_tree import plugin_tree
from kineto_trace.kernel_traits.tensor_cores import uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, gpu, ops

NAN = float("nan")

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TensorUse:
    """Shares 0 to 1 of kernel time; NaN: no kernels.

    kernel_share: of all kernels' time in kernels that use tensor cores; the plug-in's is unknown where all kernels are
    communication. by_device: likewise on each GPU; the
    plug-in counts only kernels of operators there. eligible_share: of the kernel time of all operators, that of
    eligible ones; 0 where operators have no kernels.
    """

    kernel_share: float
    by_device: dict[int, float]
    eligible_share: float


def tensor_use(context: Context) -> TensorUse:
    """The figures of all kernels, attributed by call and thread."""
    activity = context.get(gpu)
    kernel = activity.kind == KERNEL
    took = np.where(kernel, activity.end - activity.start, 0)
    uses = kernel & context.get(uses_tensor_cores)[activity.name]
    owned = np.flatnonzero(kernel & (activity.op >= 0))
    of_ops = took[owned]
    eligible = _below_deepest(context)[activity.op[owned]] if len(owned) else np.zeros(0, np.bool_)
    return TensorUse(
        kernel_share=_share(took[uses].sum(), took.sum()),
        by_device={
            device: _share(took[uses & (activity.device == device)].sum(), took[activity.device == device].sum())
            for device in np.unique(activity.device[kernel]).tolist()
        },
        eligible_share=_share(of_ops[eligible].sum(), of_ops.sum(), 0.0),
    )


def _below_deepest(context: Context) -> Flags:
    """For each row of cpu_op: whether it is one of the deepest eligible operators or inside of one."""
    tree = context.get(ops)
    stop = tree.nested.tree.stop
    eligible = context.get(tensor_times).eligible[tree.row]
    deepest = np.flatnonzero(eligible & (subtree_sums(eligible, stop) == 1))
    change = np.zeros(len(eligible) + 1, np.int64)
    change[deepest] += 1
    np.subtract.at(change, stop[deepest], 1)
    inside: Flags = (np.cumsum(change)[:-1] > 0)[tree.place]
    return inside


def plugin_tensor_use(context: Context) -> TensorUse:
    """The plug-in's figures: its names, and kernels of operators in its own tree, as often as it comes by these."""
    table, tree, launched = context.trace.table("kernel"), context.get(plugin_tree), context.get(launches)
    took = table["duration"].astype(np.float64)
    uses = context.get(plugin_tensor_names)[table["name"]]
    kernel = launched.kind == KERNEL
    node = tree.activity[kernel]
    owned = np.flatnonzero(node >= 0)
    visits = context.get(plugin_backward).visits[node[owned]]
    weighted = launched.device_duration[kernel][owned] * visits
    is_op = tree.operator[node[owned]]
    deepest = _plugin_deepest(context)
    devices, device = np.unique(table["device"], return_inverse=True)
    whole = np.bincount(device[owned], weights=weighted * is_op, minlength=len(devices))
    tensor = np.bincount(device[owned], weights=weighted * (is_op & uses[owned]), minlength=len(devices))
    counted = bool((is_op & (visits > 0)).any())
    shown = len(context.get(plugin_roles)[0].start) > 0  # without kernels that are no communication: no kernel view
    return TensorUse(
        kernel_share=_share(took[uses].sum(), took.sum(), 0.0) if shown else NAN,
        by_device={
            number: _share(tensor[place], whole[place], 0.0) for place, number in enumerate(devices.tolist()) if counted
        },
        eligible_share=_share(weighted[deepest[node[owned]]].sum(), whole.sum(), 0.0),
    )


def _plugin_deepest(context: Context) -> Flags:
    """The eligible nodes with no eligible one inside; backward operators count where they were hung."""
    tree, moved = context.get(plugin_tree), context.get(plugin_backward)
    inside = tree.below(tree.eligible)
    eligible = tree.eligible.astype(np.int64)
    top = outermost(moved.parent)
    of_top = np.bincount(top[moved.below], weights=inside[moved.roots], minlength=len(moved.module))[moved.hung]
    hosted = (of_top > 0) & (moved.host >= 0)
    np.add.at(eligible, moved.host[hosted], 1)
    found: Flags = tree.eligible & (tree.below(eligible) == 1)
    return found


def _share(part: float, whole: float, of_nothing: float = NAN) -> float:
    return float(part) / float(whole) if whole else of_nothing
