"""Findings of unnecessary GPU work: copies, changes of layout, models without a backward, functions that do not train.

Origins of GPU activities: the user's function that asked for them, also for those of the backward pass.

Theory of operation
    An activity was asked for when its operator began; for a backward operator, when the forward operator that made its
    node of the graph began. Its origin is the innermost function of the user's at that moment, on the thread of that
    operator. Work launched in the optimizer's step belongs to the optimizer, whoever calls it.

Findings of many small kernels where few would do: in one function of the program, or in the optimizer.
    Small kernels cost the host a launch each, and the GPU a pause each. So their cost is found by replaying the steps
    without them and their launches (analysis/step_replay.py), in the forward and the backward. One kernel in their
    place takes a small part of that.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.cause_views import CAUSES, GPU_CAUSES, gpu_causes, time_causes
from kineto_trace.analysis.finding import COLLECTIVES_OF_THE_HOST, EVALUATION_ADVICE, REMEDIES, Finding
from kineto_trace.analysis.findings.common_findings import heaviest_op, longest_names, measured_times, with_replay
from kineto_trace.analysis.host_findings.framework_parts import (
    DOMINATES,
    EVALUATION,
    dominating,
    purpose_by_name,
    settings_of,
)
from kineto_trace.analysis.host_findings.threads import LEAST_MOMENTS
from kineto_trace.analysis.host_findings.user_code import IN_COLLECTIVES, found_functions
from kineto_trace.analysis.host_time.moment_classes import (
    MomentClass,
    framework_calls,
    moment_classes,
    optimizer_name,
    optimizer_steps,
)
from kineto_trace.analysis.host_time.user_calls import (
    below,
    heaviest_below,
    host_steps,
    inclusive_sums,
    moments,
    thread_slices,
)
from kineto_trace.analysis.idle_gaps import blocking_calls
from kineto_trace.analysis.overview.gpu_figures import gpu_abilities
from kineto_trace.analysis.step_replay import ReplayChange, StepReplay, function_slots, step_replay
from kineto_trace.arrays.intervals import Union, containing, union
from kineto_trace.arrays.row_groups import sums
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.base.quantities import format_duration, share, times
from kineto_trace.collectives.rank_matching import host_collectives
from kineto_trace.kernel_traits.gpu_vendors import WORDS, GpuVendor
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import (
    KERNEL,
    calls,
    forward_backward,
    gpu,
    gpu_vendor,
    op_roles,
    ops,
    training_thread,
)
from kineto_trace.structure.library_calls import CallKind, code_place, framework_of
from kineto_trace.structure.python_frames import python_frames

COMPUTING = ("matrix_products", "elementwise", "other_kernels")
LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|NCHW_?to_?NHWC|NHWC_?to_?NCHW|batched_transpose_\d", re.IGNORECASE)
DOUBLE = re.compile(r"[<(]double[,>)*#]|dgemm|d884gemm|f64f64")
_SCALAR_ONLY = re.compile(r"multi_tensor_apply.*Functor<(?:float|c10)")  # float64 appears in their signatures
_TAKEN_BY = {GpuVendor.AMD: "; for MIOpen, also set the environment variable PYTORCH_MIOPEN_SUGGEST_NHWC=1"}
_CONVOLUTION = re.compile(r"^aten::(?:cudnn_convolution|convolution_backward)")
MEASURED_GAIN = 0.1
HALF_THE_BYTES = 0.5
TRAINS = 0.05  # share of the GPU's work with a backward from which on the program trains
WITHOUT = 0.25  # ratio of work with a backward to work without: a smaller one is due to errors of samples
MODEL = 0.3  # share of the work in matrix products, convolutions and attention that makes a model
NEAR_NS = 200_000  # from a sample to the next operator
MOST = 0.5  # share of the weight that one place needs to be named
SMALL_NS = 8_000.0  # mean of kernels whose launches and pauses take as long as they do
MANY = 50  # kernels of one function in each step
PART = 0.5  # of the GPU's work at most: a function with more of it is the model
LEFT = 0.1  # of the time of small kernels that remains after fusing
OPTIMIZER_PASSES = 0.25  # a fused step reads and writes each number 7 times, separate operators some 30 times
FUSED_STEP = re.compile(r"multi_tensor|[Ff]used")
READS = REMEDIES[CallKind.ITEM]
ON_THE_HOST = 0.25  # of a function's time, beside copies from and to the GPU that such collectives need


@dataclass(frozen=True, slots=True)
class LaunchOrigins:
    """One value per GPU activity. function: number into Trace.strings of the user's function, or NOTHING if unknown."""

    function: Ints
    optimizer: Flags


@dataclass(frozen=True, slots=True)
class SmallKernels:
    """The small kernels of one function. function: number into Trace.strings; work: flags of parts.Gpu."""

    function: int
    work: Flags


def exposed_pinned_copies(context: Context) -> Iterator[Finding]:
    """Yields copies from or to pinned memory that no computation hides."""
    found, activity, took = context.get(time_causes), context.get(gpu), context.get(measured_times)
    saving = found.total("pinned_copies")
    chosen = (context.get(gpu_causes) == GPU_CAUSES.index("pinned_copies")) & (took > 0)
    if not saving or not chosen.any():
        return
    count = int(np.count_nonzero(chosen))
    yield Finding(
        name="pinned_copies",
        title="The GPU waits for copies from or to pinned memory",
        saving_ns=saving,
        advice="Keep data on the GPU if it does not change from step to step, and copy smaller types (uint8 images, "
        "16-bit numbers). Copy the rest ahead of time, on a separate stream while the GPU computes (a prefetcher).",
        evidence=f"{times(count, 'copy', 'copies')} taking "
        f"{format_duration(int(took[chosen].sum()) // len(found.devices))}, "
        f"{format_duration(saving)} of that while no kernel runs",
        causes=("pinned_copies",),
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest_names(context, chosen),
    )


def layout_changes(context: Context) -> Iterator[Finding]:
    """Yields kernels by which cuDNN and MIOpen convert images to the layout for convolutions on tensor cores."""
    activity, took, found = context.get(gpu), context.get(measured_times), context.get(time_causes)
    chosen = (activity.kind == KERNEL) & matches(context.trace.strings, LAYOUT)[activity.name] & (took > 0)
    if not chosen.any():
        return
    time, vendor = int(took[chosen].sum()) // len(found.devices), context.get(gpu_vendor)
    yield Finding(
        name="layout_changes",
        title="Convolutions convert images between channels-first and channels-last layout on the GPU",
        saving_ns=time,
        advice=f"Keep images in the layout that the {WORDS[vendor].tensor_cores} need: "
        f"model.to(memory_format=torch.channels_last), and the same for its inputs{_TAKEN_BY.get(vendor, '')}. In JAX "
        "and TensorFlow, use NHWC.",
        evidence=f"{times(int(np.count_nonzero(chosen)), 'kernel')} taking {format_duration(time)}; normalisation and "
        "pooling may also get faster",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest_names(context, chosen),
    )


def double_precision(context: Context) -> Iterator[Finding]:
    """Yields kernels that compute in float64.

    Products take longer than in float32 by the ratio of the GPU's speeds; other kernels move twice the bytes.
    """
    activity, took = context.get(gpu), context.get(measured_times)
    chosen = context.get(double_kernels) & (took > 0)
    if not chosen.any():
        return
    devices, ratio = len(context.get(time_causes).devices), context.get(gpu_abilities).double_ratio
    time = int(took[chosen].sum()) // devices
    product = context.get(gpu_causes) == GPU_CAUSES.index("matrix_products")
    products = int(took[chosen & product].sum()) // devices
    of_products = f"; on this GPU, matrix products take {ratio:g} times as long" if products and ratio > 2 else ""
    yield Finding(
        name="double_precision",
        title="Kernels compute in double precision (float64)",
        saving_ns=int((time - products) * HALF_THE_BYTES + products * (1 - 1 / ratio)),
        advice="Use float32 (.float(), dtype=torch.float32): data from NumPy is float64 unless it is cast. Keep "
        "float64 only for sums that need it.",
        evidence=f"{times(int(np.count_nonzero(chosen)), 'kernel')} taking {format_duration(time)}; the saving assumes "
        f"that half the bytes take half the time; most GPUs also compute float64 more slowly{of_products}",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest_names(context, chosen),
    )


def double_kernels(context: Context) -> Flags:
    """Returns for each GPU activity whether it is a kernel that computes in float64."""
    activity, strings = context.get(gpu), context.trace.strings
    names = matches(strings, DOUBLE) & ~matches(strings, _SCALAR_ONLY)
    found: Flags = (activity.kind == KERNEL) & names[activity.name]
    return found


def unbenchmarked_convolutions(context: Context) -> Iterator[Finding]:
    """Yields convolutions whose algorithms cuDNN chooses by a rule; the gain of benchmarking them is unknown."""
    if context.trace.target.settings.get("torch.cudnn_benchmark") is not False:
        return
    activity, took, found = context.get(gpu), context.get(measured_times), context.get(time_causes)
    names = matches(context.trace.strings, _CONVOLUTION)[context.trace.table("cpu_op")["name"]]
    chosen = (activity.kind == KERNEL) & np.append(names, False)[activity.op] & (took > 0)
    if not chosen.any():
        return
    time = int(took[chosen].sum()) // len(found.devices)
    yield Finding(
        name="unmeasured_convolutions",
        title="cuDNN chooses convolution algorithms by a heuristic, not by benchmarking",
        saving_ns=int(time * MEASURED_GAIN),
        advice="If the input shapes stay the same, try torch.backends.cudnn.benchmark = True: the first call with each "
        "shape then measures all algorithms, and later calls use the fastest one.",
        evidence=f"torch.backends.cudnn.benchmark is off, and convolutions take {format_duration(time)}; the saving "
        f"assumes {100 * MEASURED_GAIN:.0f} % of that, but the gain may be larger, or zero",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest_names(context, chosen),
    )


def models_without_backward(context: Context) -> tuple[tuple[Finding, int], ...]:
    """Returns functions of a training program that run a model on the GPU without a backward: an evaluation, a teacher.

    Each is a finding and the function, a number into Trace.strings.

    The operators at the moments of the samples, when the stack is certain, show which functions these are; the kernels
    of operators without a backward in their slices show how long they take. Forward operators after the last backward
    of the trace do not count: their backward is not recorded.
    """
    tree, took = context.get(framework_calls), context.get(measured_times)
    rows, node, linked = context.get(_launched)
    weight = took[rows]
    if not len(rows) or int(weight[linked].sum()) < TRAINS * int(weight.sum()):
        return ()
    count = len(tree)
    trained, untrained = _sampled(context)
    without = inclusive_sums(tree, np.bincount(node[~linked], weight[~linked], count))
    heaviest = heaviest_below(tree, without)
    products = (context.get(gpu_causes)[rows] == GPU_CAUSES.index("matrix_products")) & ~linked
    of_model = inclusive_sums(tree, np.bincount(node[products], weight[products], count))
    aside = (untrained >= LEAST_MOMENTS) & (trained < WITHOUT * untrained)
    trains = frozenset(tree.name[~aside & (trained > 0)].tolist())
    inside = np.zeros(count, np.bool_)
    models = []
    for place in range(count):  # outer ones have smaller numbers
        above = tree.parent[place]
        inside[place] = aside[place] or (above != NOTHING and inside[above])
        begins = inside[place] and (above == NOTHING or not inside[above])
        if begins and of_model[place] >= MODEL * without[place]:
            named = dominating(tree, without, place, heaviest, trains)
            named = _saying(context, without, named, heaviest)
            own = rows[below(tree, np.arange(count) == place)[node] & ~linked]
            models.append(_without_backward(context, named, own))
    return tuple(models)


def work_without_backward(context: Context, time: Union) -> str:
    """Returns a text on what operators without a backward launch, if they begin in this time."""
    rows, _node, linked = context.get(_launched)
    start = context.trace.table("cpu_op")["start"][context.get(gpu).op[rows]]
    return _work(context, rows[~linked & (time.within(start, start + 1) > 0)])


def _work(context: Context, rows: Ints) -> str:
    took, devices = context.get(measured_times), max(len(context.get(time_causes).devices), 1)
    spent = int(took[rows].sum())
    return (
        f"{times(len(rows), 'kernel')} taking {format_duration(spent // devices)}, {share(spent, int(took.sum()))} of "
        "the GPU's work, in operators without a backward pass"
    )


def _launched(context: Context) -> tuple[Ints, Ints, Flags]:
    """Returns the activities that the training thread launched in operators: places, call nodes, and whether they
    train.

    Those of the optimizer do.
    """
    activity, called, roles = context.get(gpu), context.get(calls), context.get(op_roles)
    tree = context.get(framework_calls)
    table, slices, thread = context.trace.table("cpu_op"), context.get(thread_slices), context.get(training_thread)
    if not roles.backward.any() or not len(tree):
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_)
    last = int(table["start"][roles.backward].max())
    rows = np.flatnonzero((activity.op >= 0) & (activity.call >= 0))
    op = activity.op[rows]
    own = (called.thread[activity.call[rows]] == thread) & (table["start"][op] < last)
    rows, op = rows[own], op[own]
    inner = slices.nested.innermost(np.full(len(rows), thread, np.uint32), table["start"][op]).astype(np.int64)
    rows, op, inner = rows[inner >= 0], op[inner >= 0], inner[inner >= 0]
    linked = roles.linked[op] | roles.backward[op] | context.get(launch_origins).optimizer[rows]
    return rows, tree.node[inner], linked


def _sampled(context: Context) -> tuple[Floats, Floats]:
    """Returns for each node of the calls the samples below it in (or just before) operators that train, and in others.

    A sample in a backward or an optimizer trains, whatever operator comes next: it may be the first one after it.
    """
    found, tree, roles = context.get(moments), context.get(framework_calls), context.get(op_roles)
    table, thread = context.trace.table("cpu_op"), context.get(training_thread)
    outermost = context.get(ops).nested.tree.parent[context.get(ops).place] < 0
    rows = np.flatnonzero(outermost & (table["thread"] == thread))
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    time, place = found.time[found.sure], found.place[found.sure]
    at = np.searchsorted(table["start"][rows], time, side="right") - 1
    at = np.where((at >= 0) & (table.end()[rows][at] > time), at, at + 1)  # it runs, or is the next to run
    known = at < len(rows)
    time, place, op = time[known], place[known], rows[at[known]]
    told = np.isin(context.get(moment_classes).kind[found.sure][known], (MomentClass.BACKWARD, MomentClass.OPTIMIZER))
    near = told | (table["start"][op] - time <= NEAR_NS)
    trains = told | roles.linked[op] | roles.backward[op]
    trains |= containing(*context.get(optimizer_steps), table["start"][op]) >= 0
    node = tree.node[place]
    with_backward, without = (
        inclusive_sums(tree, np.bincount(node[near & chosen], minlength=len(tree))) for chosen in (trains, ~trains)
    )
    return with_backward, without


def _saying(context: Context, weight: Floats, start: int, heaviest: Ints) -> int:
    """Returns the outermost function of a framework with nearly all of the time whose name says that it evaluates.

    That is `start` if it is the user's, or if no name says so.
    """
    tree, at = context.get(framework_calls), start
    while at != NOTHING and not tree.user[at] and weight[at] >= DOMINATES * weight[start]:
        if purpose_by_name(code_place(context.trace.strings[int(tree.name[at])])) == EVALUATION:
            return at
        at = int(heaviest[at])
    return start


def _without_backward(context: Context, named: int, rows: Ints) -> tuple[Finding, int]:
    activity, took, tree = context.get(gpu), context.get(measured_times), context.get(framework_calls)
    number = int(tree.name[named])
    function = code_place(context.trace.strings[number])
    while not tree.user[named] and tree.parent[named] != NOTHING:
        named = int(tree.parent[named])
    place = code_place(context.trace.strings[int(tree.name[named])])
    package = "" if function == place else framework_of(function)
    shown = f"{function.shown} of {package}, called in {place.short}," if package else place.short
    chosen = np.zeros(len(activity), np.bool_)
    chosen[rows] = True
    finding = Finding(
        name="evaluation_in_the_step",
        title=f"{shown} runs a model without a backward pass",
        saving_ns=int(took[rows].sum()) // max(len(context.get(time_causes).devices), 1),
        advice=f"{EVALUATION_ADVICE} {settings_of(package, 'evaluation_in_the_step')}".rstrip(),
        evidence=_work(context, rows),
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[rows], took[rows]),
        kernels=longest_names(context, chosen),
        where=str(place),
    )
    return finding, number


def launch_origins(context: Context) -> LaunchOrigins:
    """Returns the origins of the activities."""
    activity, called, table = context.get(gpu), context.get(calls), context.trace.table("cpu_op")
    op = np.append(context.get(requesting_operators), NOTHING)[activity.op]
    of_call = activity.call
    start = np.where(op >= 0, np.append(table["start"], 0)[op], np.append(called.start, 0)[of_call])
    thread = np.where(op >= 0, np.append(table["thread"], 0)[op], np.append(called.thread, 0)[of_call])
    known = (op >= 0) | (of_call >= 0)
    optimizer = known & (containing(*context.get(optimizer_steps), start) >= 0)
    frames = context.get(python_frames)
    place = frames.innermost(thread.astype(np.uint32), start)
    function = np.full(len(activity), NOTHING)
    if len(frames.row):
        user = np.append(frames.user, NOTHING)[place]
        function = np.where(known & (user >= 0), frames.name[user], NOTHING)
    return LaunchOrigins(function, optimizer)


def main_origin(context: Context, rows: Ints, weights: Ints) -> tuple[str, str]:
    """Returns the origin of most of this weight of GPU activities, in short and with its file; "" if none has most of
    it.
    """
    origins, total = context.get(launch_origins), int(weights.sum())
    if not total:
        return "", ""
    optimizer = origins.optimizer[rows]
    if int(weights[optimizer].sum()) > MOST * total:
        shown = f"the optimizer ({optimizer_name(context)})"
        return shown, shown
    function = origins.function[rows]
    rest = ~optimizer & (function >= 0)
    of_function = sums(function[rest], weights[rest], len(context.trace.strings))
    best = int(np.argmax(of_function)) if len(of_function) else 0
    if not rest.any() or of_function[best] <= MOST * total:
        return "", ""
    place = code_place(context.trace.strings[best])
    return place.short, str(place)


def requesting_operators(context: Context) -> Ints:
    """Returns for each row of cpu_op the row that asked for it: for the backward the forward operator, else itself.

    NOTHING for operators of the backward whose forward is unknown.
    """
    tree, links = context.get(ops), forward_backward(context.trace.tables)
    table = context.trace.table("cpu_op")
    outermost = np.cumsum(tree.nested.tree.parent < 0)[tree.place] if len(table) else np.empty(0, np.int64)
    count = int(outermost.max(initial=0)) + 1
    of_group = np.full(count, NOTHING)
    of_group[outermost[links.backward_rows]] = links.forward_rows
    backward = np.zeros(count, np.bool_)
    backward[outermost[table["forward_thread"] > 0]] = True
    asked: Ints = np.where(backward[outermost], of_group[outermost], np.arange(len(table)))
    return asked


def small_kernels(context: Context) -> SmallKernels | None:
    """Returns the small kernels of the function that has most of them; None if none has enough."""
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
    """Returns the activities that a function asked for, with the precision of the operators where these are known."""
    slots, tree = context.get(function_slots), context.get(framework_calls)
    time = slots.of(below(tree, tree.name == function))
    if not len(time.start):
        return np.flatnonzero(context.get(launch_origins).function == function)
    op = np.append(context.get(requesting_operators), NOTHING)[context.get(gpu).op]
    start = np.append(context.trace.table("cpu_op")["start"], 0)[op]
    return np.flatnonzero((op >= 0) & (time.within(start, start + 1) > 0))


def small_kernels_of_functions(context: Context) -> Iterator[Finding]:
    """Yields a function of the program that launches many small kernels."""
    found = context.get(small_kernels)
    if found is None:
        return
    activity, took, steps = context.get(gpu), context.get(measured_times), context.get(time_causes).steps.steps
    rows = np.flatnonzero(found.work & (took > 0))
    place = code_place(context.trace.strings[found.function])
    mean = int(took[rows].sum()) / len(rows)
    finding = Finding(
        name="small_kernels",
        title=f"{place.short} launches {len(rows) / steps:,.0f} small kernels per step",
        saving_ns=int(took[rows].sum()),
        advice="Do the same work with fewer, larger operators: vectorise loops over parts of tensors. "
        + context.get(gpu_abilities).fusing(),
        evidence=f"{len(rows):,} kernels of {format_duration(mean)} on average, including the backward pass; the "
        f"saving is the time of these kernels, their launches and the pauses between them, minus {100 * LEFT:.0f} % "
        "for the kernels that replace them",
        causes=CAUSES,
        op=heaviest_op(context, activity.op[rows], took[rows]),
        kernels=longest_names(context, found.work),
        where=str(place),
    )
    without = with_replay(context, finding, ReplayChange(work=found.work))
    if without.replayed:
        yield replace(without, saving_ns=int((1 - LEFT) * without.saving_ns))


def optimizer_kernels(context: Context) -> Iterator[Finding]:
    """Yields an optimizer that launches kernels for each parameter and operation."""
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
        advice="Use the fused optimizer (fused=True) or, failing that, foreach=True.",
        evidence=f"{len(rows) / found.steps.steps:,.0f} kernels per step, "
        f"{format_duration(int(took[rows].sum()))} in total; the saving is the time of these kernels and their "
        f"launches, minus {100 * OPTIMIZER_PASSES:.0f} % for the fused step",
        causes=CAUSES,
        op=heaviest_op(context, activity.op[rows], took[rows]),
        kernels=longest_names(context, work),
    )
    without = with_replay(context, finding, ReplayChange(work=work))
    yield replace(without, saving_ns=int((1 - OPTIMIZER_PASSES) * without.saving_ns))


# Functions that do not train, in programs that use a GPU: what the steps would gain without them.
# Theory of operation
# Samples show which functions these are and what to do about them, as without a GPU (host_findings/user_code.py).
# Their cost is found by replaying the steps without them: without their time on the host, their work on the GPU and
# their waits for it. That is less than their time if the GPU lags behind anyway, and more if the host could run ahead
# without their waits.
# GPU idle time in the same functions is part of that cost, and not a finding of its own.


class NonTrainingFunction(NamedTuple):
    """names: of its functions (numbers into Trace.strings). time: the time that disappears with it."""

    finding: Finding
    names: frozenset[int]
    time: Union


def non_training_findings(context: Context) -> Iterator[Finding]:
    """Yields functions of the program that do not train; models with an unknown share of the steps come from their
    kernels.
    """
    told = context.get(non_training)
    for finding, function in context.get(models_without_backward):
        if not any(function in each.names for each in told):
            yield finding
    yield from (each.finding for each in told)


def non_training(context: Context) -> tuple[NonTrainingFunction, ...]:
    """Returns the functions with a known share of the steps; empty if the steps cannot be replayed."""
    replay, tree = context.get(step_replay), context.get(framework_calls)
    if replay is None:
        return ()
    told: list[NonTrainingFunction] = []
    for finding, function in context.get(models_without_backward):
        told += _aside(context, replay, finding, tree.name == function, of_model=True)
    for finding, roots in context.get(found_functions):
        nodes = np.isin(np.arange(len(tree)), roots)
        if roots and not any(set(tree.name[nodes].tolist()) & each.names for each in told):
            told += _aside(context, replay, finding, nodes)
    return tuple(told)


def non_training_time(context: Context) -> Union:
    """Returns the time of all of them together."""
    parts = [each.time for each in context.get(non_training)]
    nothing = np.empty(0, np.int64)
    return union(
        np.concatenate([nothing, *(part.start for part in parts)]),
        np.concatenate([nothing, *(part.end for part in parts)]),
    )


def is_part_of_one(context: Context, finding: Finding) -> bool:
    """Returns whether a finding of idle time is part of one of these functions."""
    if finding.frame < 0:
        return False
    name = int(context.trace.table("python_function")["name"][finding.frame])
    return any(name in each.names and finding.saving_ns <= each.finding.saving_ns for each in context.get(non_training))


def _aside(
    context: Context, replay: StepReplay, finding: Finding, begins: Flags, *, of_model: bool = False
) -> Iterator[NonTrainingFunction]:
    """Yields the functions of a finding that can be left out of the replay.

    begins: the nodes of framework_calls at which the function begins.
    of_model: whether it was recognised by its kernels.
    """
    tree, told = context.get(framework_calls), context.get(moments)
    nodes = below(tree, begins)
    slots = context.get(function_slots).of(nodes)
    length = int(slots.within(np.array([replay.low]), np.array([replay.high]))[0])
    if not length:
        return
    # a sample represents its share of the time; slots may overestimate it
    sampled = float(told.weight[nodes[tree.node[told.place]]].sum()) / context.get(host_steps).total_ns
    surplus = max(length / (replay.high - replay.low) / max(sampled, 1e-9), 1.0)
    share = replay.share(ReplayChange(left_out=slots, thread=context.get(training_thread))) / surplus
    window = context.get(time_causes).steps.measured_ns
    evidence = (
        f"in a replay without it, the steps take {100 * share:.3g} % less time; the training thread spends "
        f"{format_duration(sampled * window)} in it; "
        f"{work_without_backward(context, slots) if of_model else finding.evidence}"
    )
    title, advice = finding.title, finding.advice
    if finding.name == IN_COLLECTIVES:
        on_host = host_collectives(context)
        running = union(on_host.start, on_host.end)
        if int(slots.within(running.start, running.end).sum()) >= ON_THE_HOST * length:
            title, advice = f"{title} on the host", f"{COLLECTIVES_OF_THE_HOST} {advice}"
    if READS not in advice and _waits(context, slots) >= context.get(time_causes).steps.steps > 0:
        advice = f"{advice} This code also waits for results from the GPU. {READS}"
    replayed = replace(
        finding,
        title=title,
        saving_ns=int(share * window),
        evidence=evidence,
        advice=advice,
        causes=CAUSES,
        replayed=True,
    )
    yield NonTrainingFunction(replayed, frozenset(tree.name[nodes].tolist()), slots)


def _waits(context: Context, time: Union) -> int:
    """Counts the calls of the training thread in this time that wait for the GPU."""
    called = context.get(calls)
    own = context.get(blocking_calls) & (called.thread == context.get(training_thread))
    return int(np.count_nonzero(time.within(called.start[own], called.start[own] + 1)))
