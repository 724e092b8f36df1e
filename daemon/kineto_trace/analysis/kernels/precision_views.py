"""In which precision the kernels compute."""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.arrays.row_groups import group
from kineto_trace.kernel_traits.precisions import (
    BITS,
    UNKNOWN,
    precision_name,
    precision_number,
    precision_of_name,
    precision_of_types,
)
from kineto_trace.kernel_traits.tensor_cores import names_tell, uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, gpu
from kineto_trace.structure.event_arguments import NOTHING, argument_objects
from kineto_trace.structure.gpu_devices import gpu_vendor
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view


def activity_precisions(context: Context) -> npt.NDArray[np.int64]:
    """Returns for each GPU activity the number of the precision in which it computes; UNKNOWN: nothing tells.

    Copies, fills and collectives do not compute: theirs is unknown.
    """
    activity = context.get(gpu)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication)
    told = np.full(len(context.trace.strings), UNKNOWN)
    for text in np.flatnonzero(np.bincount(activity.name[rows], minlength=len(told))).tolist():
        told[text] = precision_number(precision_of_name(context.trace.strings[text]))
    places, types = argument_objects(context, "cpu_op", "Input type")
    typed = np.array([*(precision_number(precision_of_types(each)) for each in types), UNKNOWN], np.int64)
    of_op = np.append(np.where(places == NOTHING, UNKNOWN, typed[places]), UNKNOWN)
    found = np.full(len(activity), UNKNOWN, np.int64)
    found[rows] = np.where(told[activity.name[rows]] == UNKNOWN, of_op[activity.op[rows]], told[activity.name[rows]])
    return found


@view(
    "kernel_precision",
    columns(
        ("precision", "text", "", "fp64, fp32, tf32, bf16, fp16, fp8, fp4 or int8; missing: nothing tells it"),
        ("bits", "int", "", "size of a stored value"),
        ("calls", "int", "", "number of kernels"),
        ("total_us", "float", "us", "sum of their durations"),
        ("share_pct", "float", "%", "share of the time of all kernels that compute"),
        ("tensor_core_us", "float", "us", "of total_us, kernels that use tensor cores, judged by their names"),
    ),
)
def kernel_precision(context: Context) -> Answer:
    """In which precision the kernels compute, those with the most time first. Collectives do not compute.

    The narrowest type in a kernel's name counts, since wider ones beside it are those of sums and results; where a name
    has none (compiled and fused kernels), the narrowest type of the operator's inputs, if they were recorded.
    """
    activity = context.get(gpu)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication)
    number = context.get(activity_precisions)[rows]
    took = (activity.end - activity.start)[rows]
    groups = group([number])
    total = groups.sums(took)
    order = np.argsort(-total, kind="stable")
    told_by_names = names_tell(context.get(gpu_vendor))
    on_tensor_cores = groups.sums(took * context.get(uses_tensor_cores)[activity.name[rows]])
    names = [precision_name(at) for at in number[groups.first[order]].tolist()]
    return Answer(
        {
            "precision": names,
            "bits": [None if name is None else BITS[name] for name in names],
            "calls": groups.sizes()[order],
            "total_us": total[order] / 1000,
            "share_pct": 100 * total[order] / max(int(total.sum()), 1),
            "tensor_core_us": on_tensor_cores[order] / 1000 if told_by_names else [None] * len(order),
        },
        [] if len(rows) else [NO_GPU if not len(activity) else "the trace has no kernels"],
    )
