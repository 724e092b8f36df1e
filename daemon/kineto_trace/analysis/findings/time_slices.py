"""Another program that takes turns on a GPU, told by the slices of time that are missing from this one's.

Theory of operation
    Programs that share a GPU without MPS or MIG run by turns, each for a slice of time that the driver has set (some
    2 ms). What this one misses is a kernel that takes a slice longer than others of its name and grid, or a wait of
    launched work for a slice in which the device does nothing. Both have nearly the same length, whatever the kernel:
    this tells them from kernels with more to do, and from waits for events. Matrix products prove nothing, since some
    have the same grid whatever their size; they are taken to lose as large a part of their time as the other kernels.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.time_causes import GPU_CAUSES, gpu_causes, time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.gpu_work_findings import COMPUTING
from kineto_trace.analysis.findings.measured_work import longest, measured_times
from kineto_trace.analysis.idle.idle_gaps import QUEUED, idle_gaps
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.quantities import ms, times
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, gpu
from kineto_trace.structure.gpu_devices import vendor_words

LEAST_NS = 500_000  # drivers' slices take 1 to 6 ms
LEAST_SLICES, LEAST_NAMES = 10, 3
ALIKE = 0.15  # of the length: slices differ by less
MOSTLY = 0.6  # of the candidates are alike

Ints = npt.NDArray[np.int64]


def time_slices(context: Context) -> Iterator[Finding]:
    """Time slices in which another program had the GPU."""
    activity, took = context.get(gpu), context.get(measured_times)
    products = context.get(gpu_causes) == GPU_CAUSES.index("matrix_products")
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication & ~products & (took > 0))
    kernels = context.trace.table("kernel")
    grid = [kernels[name][activity.row[rows]] for name in ("grid_x", "grid_y", "grid_z")]
    excess = _excess([activity.name[rows], *grid], (activity.end - activity.start)[rows])
    late, excess = rows[excess >= LEAST_NS], excess[excess >= LEAST_NS]
    gaps = context.get(idle_gaps)
    waits = np.flatnonzero((gaps.cause == QUEUED) & (gaps.length >= LEAST_NS))
    lost = np.concatenate([excess, gaps.length[waits]])
    if len(lost) < LEAST_SLICES or len(late) + len(waits) < LEAST_SLICES:
        return
    slice_ns = float(np.median(lost))
    alike = np.abs(lost - slice_ns) <= ALIKE * slice_ns
    names = unique_values(activity.name[np.concatenate([late, gaps.after[waits]])[alike]])
    if np.count_nonzero(alike) < max(LEAST_SLICES, MOSTLY * len(lost)) or len(names) < LEAST_NAMES:
        return
    chosen = np.zeros(len(activity), np.bool_)
    chosen[late] = True
    devices = max(len(context.get(time_causes).devices), 1)
    # matrix products, whose own lengths prove nothing, lose as much of their time as other kernels
    works, others = int(took[activity.kind == KERNEL].sum()), int(took[rows].sum())
    of_kernels = np.arange(len(lost)) < len(late)
    saving = int(lost[alike & of_kernels].sum() * (works / max(others, 1)) + lost[alike & ~of_kernels].sum()) // devices
    words = vendor_words(context)
    yield Finding(
        name="gpu_shared",
        title="Another program takes turns with this one on the GPU",
        saving_ns=saving,
        advice=f"Find the other process (kinetoctl top and {words.status} list those of each GPU), and run it on "
        f"another GPU or at another time. Where programs must share a GPU, {words.sharing}.",
        evidence=f"{times(int(alike.sum()), 'slice')} of {ms(slice_ns)} are missing: in {times(len(late), 'kernel')} "
        f"that took so much longer than others alike, and {times(len(waits), 'wait')} of launched work; with as large "
        f"a part of the matrix products, that is {ms(saving)}",
        causes=(*COMPUTING, "queued", "kernel_gaps", "launch_latency"),
        kernels=longest(context, chosen),
    )


def _excess(keys: list[npt.NDArray[Any]], length: Ints) -> Ints:
    """Returns how much longer each kernel took than the median one with these keys."""
    found = group(keys)
    order = np.lexsort((length, found.number))
    sizes = found.sizes()
    first = np.cumsum(sizes) - sizes
    median = length[order][first + sizes // 2]
    longer: Ints = length - median[found.number]
    return longer
