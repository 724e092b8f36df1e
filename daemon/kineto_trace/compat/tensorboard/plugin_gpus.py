"""The figures of each GPU by the rules of the TensorBoard plug-in."""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.overview.gpu_figures import Basis, GpuFigures, figures_of, kernel_rows
from kineto_trace.analysis.overview.gpu_utilization import Course
from kineto_trace.compat.tensorboard.plugin_kernels import plugin_launch_figures, plugin_tensor_use
from kineto_trace.compat.tensorboard.plugin_steps import plugin_clock, plugin_steps
from kineto_trace.model.context import Context
from kineto_trace.structure.event_arguments import has_column

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def plugin_gpu_figures(context: Context) -> list[GpuFigures]:
    """Returns the figures of every GPU with a kernel, over the plug-in's steps, with properties by place in the list.

    In a trace without operators, thus without steps, the plug-in takes all GPUs for idle.
    """
    basis = Basis(
        span=context.get(plugin_steps).span(),
        times=context.get(plugin_clock).times,
        kernel_rows=context.get(plugin_kernel_rows),
        launches=context.get(plugin_launch_figures),
        efficiency=plugin_sm_efficiency,
        tensor_cores=context.get(plugin_tensor_use).by_device,
        properties=dict(enumerate(context.trace.devices)),
    )
    return [figures_of(context, device, basis) for device in sorted(basis.kernel_rows)]


def plugin_kernel_rows(context: Context) -> dict[int, Ints]:
    """Returns the rows of the table `kernel` of each GPU, by start, without kernels that do not state their GPU."""
    told = has_column(context.trace.table("kernel"), "device")
    found = {device: rows[told[rows]] for device, rows in context.get(kernel_rows).items()}
    return {device: rows for device, rows in found.items() if len(rows)}


def plugin_sm_efficiency(blocks_per_sm: Floats, start: Ints, end: Ints) -> Course:
    """Returns gpu_utilization.sm_efficiency as the plug-in computes it; kernels come by their starts.

    It adds and takes away doubles, so that after the last one of some kernels a hint of them may be left: then the
    time until the next one is a stretch as well.
    """
    known = blocks_per_sm > 0
    start, end, value = start[known], end[known], blocks_per_sm[known]
    ending = np.tile([0, 1], len(start))
    time = np.stack([start, end], axis=1).reshape(-1)
    order = np.lexsort((ending, time))
    time = time[order]
    total = np.cumsum(np.stack([value, -value], axis=1).reshape(-1)[order])
    lasting = np.flatnonzero((np.diff(time) > 0) & (total[:-1] > 0))
    return Course(time[lasting], time[lasting + 1], np.minimum(total[lasting], 1.0))
