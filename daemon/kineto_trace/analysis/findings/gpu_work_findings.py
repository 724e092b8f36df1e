"""Findings of work that GPUs do and need not: copies, changes of layout, models that are run without a backward."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.time_causes import GPU_CAUSES, gpu_causes, time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.gpu_abilities import gpu_abilities
from kineto_trace.analysis.findings.launch_origins import launch_origins
from kineto_trace.analysis.findings.measured_work import heaviest_op, longest, measured_times
from kineto_trace.analysis.host_findings import remedies
from kineto_trace.analysis.host_findings.framework_parts import DOMINATES, EVALUATION, purpose_said
from kineto_trace.analysis.host_findings.framework_settings import settings_of
from kineto_trace.analysis.host_findings.host_figures import LEAST_MOMENTS
from kineto_trace.analysis.host_findings.subtrees import dominating
from kineto_trace.analysis.host_time.call_tree import below, heaviest_below, inclusive
from kineto_trace.analysis.host_time.framework_calls import framework_calls
from kineto_trace.analysis.host_time.host_moments import NOTHING, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.optimizer_steps import optimizer_steps
from kineto_trace.arrays.intervals import Union, containing
from kineto_trace.base.quantities import ms, share, times
from kineto_trace.kernel_traits.gpu_vendors import WORDS, GpuVendor
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, calls, gpu, ops
from kineto_trace.structure.fwd_bwd import op_roles
from kineto_trace.structure.gpu_devices import gpu_vendor
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.structure.python.library_calls import framework_of
from kineto_trace.structure.training_thread import training_thread

COMPUTING = ("matrix_products", "elementwise", "other_kernels")
LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|NCHW_?to_?NHWC|NHWC_?to_?NCHW|batched_transpose_\d", re.IGNORECASE)
DOUBLE = re.compile(r"[<(]double[,>)*#]|dgemm|d884gemm|f64f64")
_SCALAR_ONLY = re.compile(r"multi_tensor_apply.*Functor<(?:float|c10)")  # float64 is in their signatures
_TAKEN_BY = {GpuVendor.AMD: "; MIOpen takes it with the environment variable PYTORCH_MIOPEN_SUGGEST_NHWC=1"}
_CONVOLUTION = re.compile(r"^aten::(?:cudnn_convolution|convolution_backward)")
MEASURED_GAIN = 0.1
HALF_THE_BYTES = 0.5
TRAINS = 0.05  # of the GPU's work has a backward: then the program trains
WITHOUT = 0.25  # of work with a backward beside that without: fewer are errors of samples
MODEL = 0.3  # of the work in matrix products, convolutions and attention: then it is a model
NEAR_NS = 200_000  # from a sample to the operator that begins next

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def exposed_pinned_copies(context: Context) -> Iterator[Finding]:
    """Copies from or to pinned memory that no computation hides."""
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
        advice="Keep on the GPU what does not change from step to step, and copy smaller types (uint8 images, 16 "
        "bits). What must be copied can be copied ahead, on a stream of its own while the GPU computes (a prefetcher).",
        evidence=f"{times(count, 'copy', 'copies')}, {ms(int(took[chosen].sum()) // len(found.devices))}, of that "
        f"{ms(saving)} while no kernel runs",
        causes=("pinned_copies",),
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest(context, chosen),
    )


def layout_changes(context: Context) -> Iterator[Finding]:
    """Kernels by which cuDNN and MIOpen bring images into the layout that convolutions on tensor cores want."""
    activity, took, found = context.get(gpu), context.get(measured_times), context.get(time_causes)
    chosen = (activity.kind == KERNEL) & matches(context.trace.strings, LAYOUT)[activity.name] & (took > 0)
    if not chosen.any():
        return
    time, vendor = int(took[chosen].sum()) // len(found.devices), context.get(gpu_vendor)
    yield Finding(
        name="layout_changes",
        title="Convolutions change the layout of their images (channels first, channels last) on the GPU",
        saving_ns=time,
        advice=f"Keep images in the layout that the {WORDS[vendor].tensor_cores} want: "
        f"model.to(memory_format=torch.channels_last), and the same for its inputs{_TAKEN_BY.get(vendor, '')}. In JAX "
        "and TensorFlow: NHWC.",
        evidence=f"{times(int(np.count_nonzero(chosen)), 'kernel')}, {ms(time)}; normalisation and pooling may gain "
        "by it, too",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest(context, chosen),
    )


def double_precision(context: Context) -> Iterator[Finding]:
    """Kernels that compute in float64.

    Products take as much longer than in float32 as the GPU computes float64 more slowly; other kernels move twice the
    bytes.
    """
    activity, took = context.get(gpu), context.get(measured_times)
    chosen = context.get(double_kernels) & (took > 0)
    if not chosen.any():
        return
    devices, ratio = len(context.get(time_causes).devices), context.get(gpu_abilities).double_ratio
    time = int(took[chosen].sum()) // devices
    product = context.get(gpu_causes) == GPU_CAUSES.index("matrix_products")
    products = int(took[chosen & product].sum()) // devices
    of_products = f"; products take {ratio:g} times as long on this GPU" if products and ratio > 2 else ""
    op = heaviest_op(context, activity.op[chosen], took[chosen])
    yield Finding(
        name="double_precision",
        title="Kernels compute in double precision (float64)",
        saving_ns=int((time - products) * HALF_THE_BYTES + products * (1 - 1 / ratio)),
        advice="Use float32 (.float(), dtype=torch.float32): what comes from NumPy is float64 unless it is cast. Sums "
        "that need more can be float64 alone.",
        evidence=f"{times(int(np.count_nonzero(chosen)), 'kernel')}, {ms(time)}; the saving assumes that half of it "
        f"goes with half of the bytes, and most GPUs also compute float64 more slowly{of_products}",
        causes=COMPUTING,
        op=op,
        kernels=longest(context, chosen),
    )


def double_kernels(context: Context) -> Flags:
    """Returns for each GPU activity whether it is a kernel that computes in float64."""
    activity, strings = context.get(gpu), context.trace.strings
    names = matches(strings, DOUBLE) & ~matches(strings, _SCALAR_ONLY)
    found: Flags = (activity.kind == KERNEL) & names[activity.name]
    return found


def unmeasured_convolutions(context: Context) -> Iterator[Finding]:
    """Convolutions whose algorithms cuDNN chooses by a rule; what measuring them would gain is unknown."""
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
        title="Convolutions are chosen by cuDNN's rule of thumb, not by measuring them",
        saving_ns=int(time * MEASURED_GAIN),
        advice="Where the shapes of inputs stay the same, try torch.backends.cudnn.benchmark = True: the first call of "
        "each shape then measures all algorithms, and the fastest one is used.",
        evidence=f"torch.backends.cudnn.benchmark is off, and convolutions take {ms(time)}; {100 * MEASURED_GAIN:.0f} "
        "% of it is assumed to go, which may be none or more",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest(context, chosen),
    )


class ModelWithoutBackward(NamedTuple):
    """function: the one that runs it, a number into Trace.strings."""

    finding: Finding
    function: int


def models_without_backward(context: Context) -> tuple[ModelWithoutBackward, ...]:
    """Functions of a training program that run a model on the GPU and no backward for it: an evaluation, a teacher.

    Which functions these are is told by the operators at the moments of the samples, when the stack is certain; how
    much they take, by the kernels of operators without a backward in their slices. Forward operators after the last
    backward of the trace do not count: theirs is not recorded.
    """
    return tuple(_models(context))


def _models(context: Context) -> Iterator[ModelWithoutBackward]:
    tree, took = context.get(framework_calls), context.get(measured_times)
    rows, node, linked = context.get(_launched)
    weight = took[rows]
    if not len(rows) or int(weight[linked].sum()) < TRAINS * int(weight.sum()):
        return
    count = len(tree)
    trained, untrained = _sampled(context)
    without = inclusive(tree, np.bincount(node[~linked], weight[~linked], count))
    heaviest = heaviest_below(tree, without)
    products = (context.get(gpu_causes)[rows] == GPU_CAUSES.index("matrix_products")) & ~linked
    of_model = inclusive(tree, np.bincount(node[products], weight[products], count))
    aside = (untrained >= LEAST_MOMENTS) & (trained < WITHOUT * untrained)
    trains = frozenset(tree.name[~aside & (trained > 0)].tolist())
    inside = np.zeros(count, np.bool_)
    for place in range(count):  # outer ones have smaller numbers
        above = tree.parent[place]
        inside[place] = aside[place] or (above != NOTHING and inside[above])
        begins = inside[place] and (above == NOTHING or not inside[above])
        if begins and of_model[place] >= MODEL * without[place]:
            named = dominating(tree, without, place, heaviest, trains)
            named = _saying(context, without, named, heaviest)
            yield _without_backward(context, named, rows[below(tree, np.arange(count) == place)[node] & ~linked])


def work_without_backward(context: Context, time: Union) -> str:
    """Tells what operators without a backward that begin in this time launch."""
    rows, _node, linked = context.get(_launched)
    start = context.trace.table("cpu_op")["start"][context.get(gpu).op[rows]]
    return _work(context, rows[~linked & (time.within(start, start + 1) > 0)])


def _work(context: Context, rows: Ints) -> str:
    took, devices = context.get(measured_times), max(len(context.get(time_causes).devices), 1)
    spent = int(took[rows].sum())
    return (
        f"{times(len(rows), 'kernel')}, {ms(spent // devices)}, {share(spent, int(took.sum()))} of the GPU's work, in "
        "operators without a backward"
    )


def _launched(context: Context) -> tuple[Ints, Ints, Flags]:
    """Activities that the training thread launched in operators: their places, nodes of the calls, and if they train.

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
    """For each node of the calls: samples below it in operators that train, or just before one, and in others.

    A sample in a backward or an optimizer trains, whatever operator comes next: it may be the first one after it.
    """
    found, tree, roles = context.get(moments), context.get(framework_calls), context.get(op_roles)
    table, thread = context.trace.table("cpu_op"), context.get(training_thread)
    outermost = context.get(ops).nested.tree.parent[context.get(ops).place] < 0
    rows = np.flatnonzero(outermost & (table["thread"] == thread))
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    time, place = found.time[found.sure], found.place[found.sure]
    at = np.searchsorted(table["start"][rows], time, side="right") - 1
    at = np.where((at >= 0) & (table.end()[rows][at] > time), at, at + 1)  # it runs, or it is the next one
    known = at < len(rows)
    time, place, op = time[known], place[known], rows[at[known]]
    told = np.isin(context.get(moment_classes).kind[found.sure][known], (Class.BACKWARD, Class.OPTIMIZER))
    near = told | (table["start"][op] - time <= NEAR_NS)
    trains = told | roles.linked[op] | roles.backward[op]
    trains |= containing(*context.get(optimizer_steps), table["start"][op]) >= 0
    node = tree.node[place]
    with_backward, without = (
        inclusive(tree, np.bincount(node[near & chosen], minlength=len(tree))) for chosen in (trains, ~trains)
    )
    return with_backward, without


def _saying(context: Context, weight: Floats, start: int, heaviest: Ints) -> int:
    """Returns the outermost function of a framework with nearly all of the time that says that it evaluates.

    That is `start` if it is the user's, or if none says so.
    """
    tree, at = context.get(framework_calls), start
    while at != NOTHING and not tree.user[at] and weight[at] >= DOMINATES * weight[start]:
        if purpose_said(code_place(context.trace.strings[int(tree.name[at])])) == EVALUATION:
            return at
        at = int(heaviest[at])
    return start


def _without_backward(context: Context, named: int, rows: Ints) -> ModelWithoutBackward:
    activity, took, tree = context.get(gpu), context.get(measured_times), context.get(framework_calls)
    number = int(tree.name[named])
    function = code_place(context.trace.strings[number])
    while not tree.user[named] and tree.parent[named] != NOTHING:
        named = int(tree.parent[named])
    place = code_place(context.trace.strings[int(tree.name[named])])
    package = "" if function == place else framework_of(function)
    shown = f"{function.shown} of {package}, called in {place.short}" if package else place.short
    chosen = np.zeros(len(activity), np.bool_)
    chosen[rows] = True
    devices = max(len(context.get(time_causes).devices), 1)
    time = int(took[rows].sum())
    finding = Finding(
        name="evaluation_in_the_step",
        title=f"{shown} runs a model without a backward",
        saving_ns=time // devices,
        advice=f"{remedies.EVALUATION} {settings_of(package, 'evaluation_in_the_step')}".rstrip(),
        evidence=_work(context, rows),
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[rows], took[rows]),
        kernels=longest(context, chosen),
        where=str(place),
    )
    return ModelWithoutBackward(finding, number)
