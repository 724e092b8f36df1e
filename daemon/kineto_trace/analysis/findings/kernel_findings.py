"""Findings of kernels that do not use the GPU as they could, by what is known of them, and by counters where any are.

Theory of operation
    Names, shapes and grids only estimate how a kernel uses the GPU. Where its counters have a value they take
    precedence: a kernel that uses the tensor pipe is not said to lack it, and how full the GPU is follows from the
    multiprocessors that were busy, not from the grid.
"""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.time_causes import ELEMENTWISE, GPU_CAUSES, gpu_causes, time_causes
from kineto_trace.analysis.counters.roofline import (
    BOUND,
    COMPUTE_BOUND,
    LATENCY_BOUND,
    MEMORY_BOUND,
    PIPE_USED,
    VERDICTS,
    activity_use,
    activity_verdicts,
)
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.gpu_abilities import gpu_abilities
from kineto_trace.analysis.findings.gpu_work_findings import COMPUTING, double_kernels
from kineto_trace.analysis.findings.measured_work import heaviest_op, longest, measured_times
from kineto_trace.analysis.kernels.launch_occupancy import launch_figures
from kineto_trace.base.quantities import ms, share, times
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.tensor_cores import (
    eligible_op_names,
    gains_nothing_from_tensor_cores,
    uses_tensor_cores,
)
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, captured_ops, gpu, owners
from kineto_trace.structure.gpu_devices import vendor_words

SPEED_UP = 4.0  # of matrix products by tensor cores: half of what the peaks of their GPUs differ by
FUSED = 0.5  # of the time of elementwise kernels: a fused one reads and writes once what two read and write twice
FUSED_KERNELS = re.compile(r"^triton_poi_|Fused\w*(?:Optimizer|Adam|Adagrad|Sgd|SGD)")
SMALL_GRID_NS = 10_000  # shorter kernels are a matter of launches
MOSTLY = 0.5  # of the time of kernels: what is measured of so much speaks for them

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def mean_use(context: Context, unit: str, chosen: Flags) -> float:
    """Returns the mean use (%) of a unit (a field of UnitUse) by these activities; NaN: most of it is not known."""
    value, took = context.get(activity_use)[unit][chosen], context.get(measured_times)[chosen]
    known = ~np.isnan(value)
    if int(took[known].sum()) <= MOSTLY * int(took.sum()):
        return float("nan")
    return float(np.average(value[known], weights=took[known]))


def no_tensor_cores(context: Context) -> Iterator[Finding]:
    """Matrix products on ordinary cores, on a GPU that has tensor cores."""
    able = context.get(gpu_abilities)
    if not able.tensor_cores:
        return
    activity, owner, found = context.get(gpu), context.get(owners), context.get(time_causes)
    eligible = np.zeros(len(activity), np.bool_)
    known = (activity.op >= 0) | (context.get(captured_ops) >= 0)
    eligible[known] = context.get(eligible_op_names)[owner[known]]
    kernels = activity.kind == KERNEL
    products = context.get(gpu_causes) == GPU_CAUSES.index("matrix_products")
    chosen = eligible & kernels & products & ~context.get(uses_tensor_cores)[activity.name]
    chosen &= ~context.get(gains_nothing_from_tensor_cores)[activity.name]
    chosen &= ~(context.get(activity_use)["tensor"] >= PIPE_USED)
    took = context.get(measured_times)
    total, everything = int(took[chosen].sum()), int(took[kernels].sum())
    if not total:
        return
    pipe = mean_use(context, "tensor", chosen)
    measured = "" if np.isnan(pipe) else f"; the tensor pipe was used for {pipe:.2g} % while they ran"
    yield Finding(
        name="no_tensor_cores",
        title=f"Matrix products do not use the {able.words.tensor_cores}",
        saving_ns=int(total * (1 - 1 / SPEED_UP)) // len(found.devices),
        advice=able.precision(),
        evidence=f"{ms(total)} of kernels, {share(total, everything)} of all kernel time; the saving assumes "
        f"{SPEED_UP:g} times the speed{measured}",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest(context, chosen),
    )


def elementwise(context: Context) -> Iterator[Finding]:
    """Elementwise kernels, which move memory most of all, and could be fused, but for those that are.

    These are torch.compile's own, and those of fused optimizers. Kernels in float64 are told by their type, which is
    to be changed first.
    """
    activity, took = context.get(gpu), context.get(measured_times)
    every = context.get(elementwise_kernels) & (took > 0)
    unfused = every & ~matches(context.trace.strings, FUSED_KERNELS)[activity.name]
    chosen = unfused & ~context.get(double_kernels)
    double = int(took[unfused & ~chosen].sum()) // max(len(context.get(time_causes).devices), 1)
    apart = f"; {ms(double)} of others compute in float64, which is another finding" if double else ""
    total = context.get(time_causes).total("elementwise")
    time = int(total * (int(took[chosen].sum()) / max(int(took[every].sum()), 1)))
    if not time:
        return
    yield Finding(
        name="elementwise",
        title="Many elementwise kernels that could be fused",
        saving_ns=int(time * FUSED),
        advice=context.get(gpu_abilities).fusing(),
        evidence=f"{times(int(np.count_nonzero(chosen)), 'kernel')}, {ms(time)}; the saving assumes that half of it "
        f"goes{apart}{_memory_use(context, chosen)}",
        causes=("elementwise",),
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest(context, chosen),
    )


def elementwise_kernels(context: Context) -> Flags:
    """Returns for each GPU activity whether it is an elementwise kernel, by its name."""
    activity = context.get(gpu)
    found: Flags = (activity.kind == KERNEL) & matches(context.trace.strings, ELEMENTWISE)[activity.name]
    return found


def _memory_use(context: Context, chosen: Flags) -> str:
    """Says how much of the memory's peak these kernels used, and what bounds most of them; "": it is not known."""
    dram, took = mean_use(context, "dram", chosen), context.get(measured_times)
    if np.isnan(dram):
        return ""
    verdict = context.get(activity_verdicts)
    most = {name: int(took[chosen & (verdict == VERDICTS.index(name))].sum()) for name in (MEMORY_BOUND, LATENCY_BOUND)}
    name = next((name for name, time in most.items() if time > MOSTLY * int(took[chosen].sum())), "")
    bound = f": {name}" if name else ""
    whole = share(int(took[chosen].sum()), int(took.sum()))
    return f"; {whole} of the GPU's work, measured at {dram:.3g} % of DRAM's peak{bound}"


def small_grids(context: Context) -> Iterator[Finding]:
    """Kernels with fewer blocks than the GPU has multiprocessors, so that a part of it has nothing to do.

    Of kernels whose counters say how busy the multiprocessors were, that counts instead of their blocks; those that use
    the memory or arithmetic units well leave nothing idle that they could use.
    """
    per_sm, activity = context.get(launch_figures).blocks_per_sm, context.get(gpu)
    took = context.get(measured_times)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication & (took >= SMALL_GRID_NS))
    blocks, busy = per_sm[activity.row[rows]], context.get(activity_use)["sm_busy"][rows]
    measured = ~np.isnan(busy)
    verdict = context.get(activity_verdicts)[rows]
    well = np.isin(verdict, [VERDICTS.index(name) for name in (MEMORY_BOUND, COMPUTE_BOUND)])
    small = np.where(measured, busy < BOUND, (blocks > 0) & (blocks < 1)) & ~well
    if not small.any():
        return
    rows, blocks, busy, measured = rows[small], blocks[small], busy[small], measured[small]
    filled = np.where(measured, busy / 100, blocks)
    chosen = np.zeros(len(activity), np.bool_)
    chosen[rows] = True
    devices = max(len(context.get(time_causes).devices), 1)
    yield Finding(
        name="small_grids",
        title="Kernels leave a part of the GPU without work",
        saving_ns=int((took[rows] * (1 - filled)).sum()) // devices,
        advice="Make the work of these operators larger (batch, sequence, fused heads), or run independent ones on "
        "streams of their own.",
        evidence=f"{times(len(rows), 'kernel')} of {ms(float(took[rows].sum()))} "
        f"{_filled(blocks, busy, took[rows], vendor_words(context).multiprocessor)}; the saving "
        "is what a full GPU would give at most",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[rows], took[rows]),
        kernels=longest(context, chosen),
    )


def _filled(blocks: Floats, busy: Floats, took: Ints, multiprocessor: str) -> str:
    """Says how full the GPU was: by what was measured, by the blocks, or by both."""
    told = []
    for value, text in (
        (blocks, f"with {{:.2g}} blocks per {multiprocessor}"),
        (busy, f"during which a {multiprocessor} was busy for {{:.3g}} % of the time, by its counter"),
    ):
        known = ~np.isnan(value)
        if known.any():
            told.append(text.format(float(np.average(value[known], weights=took[known]))))
    return ", ".join(told)
