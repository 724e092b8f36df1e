"""How much of the kernels' time uses tensor cores, and how much of it could.

Could: kernels of the deepest eligible operators (tensor_cores.py), those with no eligible operator inside. What such
an operator or any operator in it launched counts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.op_times import tensor_times
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import subtree_sums
from kineto_trace.kernel_traits.tensor_cores import names_tell, uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, gpu, ops
from kineto_trace.structure.gpu_devices import gpu_vendor

NAN = float("nan")

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TensorUse:
    """Shares 0 to 1 of kernel time; NaN: there is none, or names of kernels on these GPUs do not tell.

    kernel_share: of all kernels' time in kernels that use tensor cores. by_device: likewise on each GPU.
    eligible_share: of the kernel time of all operators, that of eligible ones.
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
    of_ops, told = took[owned], names_tell(context.get(gpu_vendor))
    eligible = _below_deepest(context)[activity.op[owned]] if len(owned) else np.zeros(0, np.bool_)
    return TensorUse(
        kernel_share=share_of(took[uses].sum(), took.sum()) if told else NAN,
        by_device={
            device: share_of(took[uses & (activity.device == device)].sum(), took[activity.device == device].sum())
            if told
            else NAN
            for device in unique_values(activity.device[kernel]).tolist()
        },
        eligible_share=share_of(of_ops[eligible].sum(), of_ops.sum()),
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


def share_of(part: float, whole: float, of_nothing: float = NAN) -> float:
    """Returns the part of a whole, or `of_nothing` if the whole is 0."""
    return float(part) / float(whole) if whole else of_nothing
