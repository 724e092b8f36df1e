"""Findings of many small kernels in the place of few: in one function of the program, or in the optimizer.

Theory of operation
    Small kernels cost the host a launch each, and the GPU a pause each. So what they take is found by running the steps
    again without them and their launches (analysis/replay), in the forward and the backward. One kernel in their place
    takes a small part of that.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.time_causes import CAUSES, time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.gpu_abilities import gpu_abilities
from kineto_trace.analysis.findings.launch_origins import asking_operators, launch_origins
from kineto_trace.analysis.findings.measured_work import heaviest_op, longest, measured_times
from kineto_trace.analysis.findings.replayed_savings import replayed
from kineto_trace.analysis.host_time.call_tree import below
from kineto_trace.analysis.host_time.framework_calls import framework_calls
from kineto_trace.analysis.host_time.optimizer_steps import optimizer_name
from kineto_trace.analysis.replay.function_slots import function_slots
from kineto_trace.analysis.replay.step_replay import Change
from kineto_trace.arrays.row_groups import sums
from kineto_trace.base.quantities import ms
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, NOTHING, gpu
from kineto_trace.structure.python.code_places import code_place

SMALL_NS = 8_000.0  # mean of kernels whose launches and pauses take as long as they
MANY = 50  # kernels of one function in each step
PART = 0.5  # of the GPU's work at most: a function with more of it is the model
LEFT = 0.1  # of the time of small kernels that fused ones still take
OPTIMIZER_PASSES = 0.25  # a fused step reads and writes each number 7 times, operator by operator some 30 times
FUSED_STEP = re.compile(r"multi_tensor|[Ff]used")

Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SmallKernels:
    """The small kernels of one function. function: number into Trace.strings; work: flags of parts.Gpu."""

    function: int
    work: Flags


def small_kernels(context: Context) -> SmallKernels | None:
    """Returns those of the function that has most of them; None if none has enough."""
    activity, origins, took = context.get(gpu), context.get(launch_origins), context.get(measured_times)
    steps = context.get(time_causes).steps.steps
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication & (took > 0) & ~origins.optimizer)
    function = origins.function[rows]
    rows, function = rows[function >= 0], function[function >= 0]
    if not steps or not len(rows):
        return None
    count = np.bincount(function)
    best = int(np.argmax(np.where(sums(function, took[rows], len(count)) < SMALL_NS * count, count, 0)))
    work = np.zeros(len(activity), np.bool_)
    work[_of_function(context, best)] = True
    work &= (activity.kind == KERNEL) & ~activity.communication & ~origins.optimizer
    mine, everything = work & (took > 0), int(took.sum())
    number, time = int(np.count_nonzero(mine)), int(took[mine].sum())
    if number < MANY * steps or time >= SMALL_NS * number or time > PART * everything:
        return None
    return SmallKernels(best, work)


def _of_function(context: Context, function: int) -> Ints:
    """Returns the activities whose work was asked for in a function: as exactly as the operators, where these tell."""
    slots, tree = context.get(function_slots), context.get(framework_calls)
    time = slots.of(below(tree, tree.name == function))
    if not len(time.start):
        return np.flatnonzero(context.get(launch_origins).function == function)
    op = np.append(context.get(asking_operators), NOTHING)[context.get(gpu).op]
    start = np.append(context.trace.table("cpu_op")["start"], 0)[op]
    return np.flatnonzero((op >= 0) & (time.within(start, start + 1) > 0))


def small_kernels_of_functions(context: Context) -> Iterator[Finding]:
    """A function of the program that launches many small kernels."""
    found = context.get(small_kernels)
    if found is None:
        return
    activity, took, steps = context.get(gpu), context.get(measured_times), context.get(time_causes).steps.steps
    rows = np.flatnonzero(found.work & (took > 0))
    place = code_place(context.trace.strings[found.function])
    mean = int(took[rows].sum()) / len(rows)
    finding = Finding(
        name="small_kernels",
        title=f"{place.short} launches {len(rows) / steps:,.0f} small kernels in each step",
        saving_ns=int(took[rows].sum()),
        advice="Compute the same with fewer and larger operators: vectorise loops over parts of tensors. "
        + context.get(gpu_abilities).fusing(),
        evidence=f"{len(rows):,} kernels of {mean / 1e3:.3g} us on average, backward included; the saving is what "
        f"they, their launches and the pauses between them take, less {100 * LEFT:.0f} % for kernels in their place",
        causes=CAUSES,
        op=heaviest_op(context, activity.op[rows], took[rows]),
        kernels=longest(context, found.work),
        where=str(place),
    )
    without = replayed(context, finding, Change(work=found.work))
    if without.replayed:
        yield replace(without, saving_ns=int((1 - LEFT) * without.saving_ns))


def optimizer_kernels(context: Context) -> Iterator[Finding]:
    """An optimizer that launches kernels for each parameter and operation."""
    activity, took, found = context.get(gpu), context.get(measured_times), context.get(time_causes)
    work = context.get(launch_origins).optimizer & (activity.kind == KERNEL)
    rows = np.flatnonzero(work & (took > 0))
    single = ~matches(context.trace.strings, FUSED_STEP)[activity.name[rows]]
    if not found.steps.steps or np.count_nonzero(single) < max(MANY * found.steps.steps, len(rows) / 2):
        return
    name = optimizer_name(context) or "optimizer"
    finding = Finding(
        name="unfused_optimizer",
        title=f"The optimizer ({name}) updates the parameters one by one",
        saving_ns=int(took[rows].sum()),
        advice="Use the fused optimizer (fused=True), else foreach=True.",
        evidence=f"{len(rows) / found.steps.steps:,.0f} kernels in each step, {ms(int(took[rows].sum()))} in all; the "
        f"saving is what they and their launches take, less {100 * OPTIMIZER_PASSES:.0f} %: a fused step reads and "
        "writes less",
        causes=CAUSES,
        op=heaviest_op(context, activity.op[rows], took[rows]),
        kernels=longest(context, work),
    )
    without = replayed(context, finding, Change(work=work))
    yield replace(without, saving_ns=int((1 - OPTIMIZER_PASSES) * without.saving_ns))
