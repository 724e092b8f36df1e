"""Findings on threads that share processors or the GIL, on the use of torch, and host figures that findings need.

Threads: another one has the GIL, Python collects garbage, or no processor is free. Use of torch: optimizer, anomaly
mode, compilation, graphs that are run backward twice.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis import finding
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_time.cpu_shortage import Shortage, cpu_shortage, neighbours_text
from kineto_trace.analysis.host_time.moment_classes import MomentClass, moment_classes, optimizer_name, optimizer_steps
from kineto_trace.analysis.host_time.thread_views import counters_of, throttled_pct
from kineto_trace.analysis.host_time.user_calls import (
    commonest_place,
    host_steps,
    host_time_lost,
    moments,
    slices_below,
    thread_slices,
    user_calls,
)
from kineto_trace.analysis.idle_pieces import gil_wait_time
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, containing
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Ints
from kineto_trace.base.quantities import format_duration, times
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import KernelCounters
from kineto_trace.structure.activity_links import EVALUATE_FUNCTION, ops
from kineto_trace.structure.library_calls import CallKind, CodePlace, code_place, functions_named
from kineto_trace.structure.python_frames import RUNNING, ThreadUse, state_counts, thread_use, window_ns
from kineto_trace.structure.step_phases import StepPhase

LEAST_SHARE = 0.05  # of the time of the training thread: less is within the error of its CPU time
LONGEST_FAULT_NS = 2_000_000  # samples show longer ones
PINS = "/torch/utils/data/_utils/pin_memory.py"  # its thread belongs to torch
BUSY = 0.02  # of a core: a thread with more counts as busy
LEAST = 0.02  # of the steps' time: less is within the noise of samples
LEAST_MOMENTS = 3
SINGLE_TENSOR = re.compile(r"(?:^|/)torch/optim/[^:]*: _single_tensor_")
REPEATED = 0.2  # of the nodes of the graph
SMALL_NS = 20_000  # a shorter operator on the CPU is mostly the cost of calling it
FUSED_GAIN = 0.5  # of large operators: one pass over the memory instead of several
GRAD = re.compile(r"(?:^|/)torch/autograd/__init__\.py: grad$")
EVALUATES = re.compile("^" + re.escape(EVALUATE_FUNCTION))
COMPILED = re.compile(r"^Torch-Compiled Region: ")
AROUND_COMPILED = re.compile(
    r"^(?:Torch-Compiled Region: |TorchDynamo Cache Lookup$|(?:autograd::engine::evaluate_function: )?CompiledFunction)"
)
CALLS_DYNAMO = re.compile(r"(?:^|/)torch/_dynamo/eval_frame\.py: ")
CALLS_COMPILED = re.compile(
    r"(?:^|/)torch/(?:_dynamo/(?:eval_frame|external_utils)\.py|_functorch/|_inductor/(?:output_code|utils)\.py"
    r"|autograd/function\.py|nn/modules/module\.py: (?:Module\.)?_(?:wrapped_)?call_impl$)"
)
WARM_UP = 0.2  # of the steps, all at the beginning
PARTS = 10  # of a trace without steps
_RECOMPILED = (
    "Find out why (TORCH_LOGS=recompiles): mark changing sizes as dynamic (dynamic=True, "
    "torch._dynamo.mark_dynamic), pad to a few shapes, keep changing Python values out of compiled code, and call "
    "torch.compile once, outside the loop."
)
_TORCH_COMPILER = re.compile(r"(?:^|/)torch/_(?:dynamo|inductor)/")  # which call Triton to compile
_OTHER_COMPILERS = {  # functions, and the advice
    "JAX": (
        re.compile(r"(?:^|/)jax/_src/"),
        "Call jax.jit once, outside the loop, on a function that is defined once: a new lambda or closure is compiled "
        "again. Keep shapes, types and static arguments the same (pad to a few shapes). jax.config.update("
        "'jax_explain_cache_misses', True) makes JAX log the reasons.",
    ),
    "Triton": (
        re.compile(r"(?:^|/)triton/"),
        "A Triton kernel is compiled again for each new value of a tl.constexpr argument, for each new type, and when "
        "an integer becomes 1 or divisible by 16: pass changing values as ordinary arguments (do_not_specialize), "
        "and compile once, before the loop.",
    ),
}


class _PageFaults(NamedTuple):
    """major: number of the training thread's faults that waited for storage; None if unknown.

    unseen: the share of the time in which it was blocked without a sample that shows it, due to many short faults.
    """

    major: int | None
    unseen: float


def gil(context: Context) -> Iterator[Finding]:
    """Yields waits for the GIL, and who held it."""
    found = context.get(moments)
    lost = found.weight * found.waiting * context.get(host_time_lost)
    weight, count = float(lost.sum()), int(np.count_nonzero(lost))
    in_backward = context.get(gil_wait_time)
    if not is_enough(context, weight + in_backward.length(), count + len(in_backward.start)):
        return
    holder, share = other_python(context)
    yield Finding(
        name="gil",
        title="The training thread waits for Python's global interpreter lock (GIL)"
        + (f", which {holder} holds" if holder else ""),
        saving_ns=int(weight),
        advice=finding.PINNING if PINS in holder else finding.HOLDER_OF_THE_GIL,
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}"
        + (f"; {holder} ran in {100 * share:.0f} % of that thread's samples" if holder else "")
        + _waits_of_autograd(in_backward),
        where=holder,
    )


def _waits_of_autograd(waits: Union) -> str:
    if not len(waits.start):
        return ""
    return (
        f"; the thread of the backward pass waits for it {times(len(waits.start), 'time')}, "
        f"{format_duration(waits.length())} in total (pauses of at least Python's switch interval between autograd's "
        "operators)"
    )


def other_python(context: Context) -> tuple[str, float]:
    """Returns the function that ran most in other threads, with its thread's name and share of the thread's samples."""
    table = context.trace.table("python_function")
    others = np.flatnonzero((table["thread"] != context.get(host_steps).thread) & (table["self_samples"] > 0))
    if not len(others):
        return "", 0.0
    counts = state_counts(table)[others]
    groups = group([table["name"][others], table["thread"][others]])
    running = groups.sums(counts[:, RUNNING])
    best = int(np.argmax(running))
    if not running[best]:
        return "", 0.0
    row = int(others[groups.first[best]])
    thread = int(table["thread"][row])
    samples = int(counts[table["thread"][others] == thread].sum())
    name = context.trace.target.threads.get(thread, str(thread))
    place = code_place(context.trace.strings[int(table["name"][row])], int(table["line"][row]))
    return f"{place} in thread {name}", running[best] / max(samples, 1)


def garbage(context: Context) -> Iterator[Finding]:
    """Yields a finding if Python's garbage collector runs on the training thread, whether the program called
    it or not.
    """
    found = context.get(moments)
    lost = found.weight * found.collecting * context.get(host_time_lost)
    weight, count = float(lost.sum()), int(np.count_nonzero(lost))
    if not is_enough(context, weight, count):
        return
    place = commonest_place(context, np.flatnonzero(lost > 0), lost[lost > 0])
    yield Finding(
        name="garbage_collector",
        title="Python's garbage collector runs in the steps" + (f", mostly in {place.short}" if place else ""),
        saving_ns=int(weight),
        advice=finding.REMEDIES[CallKind.GARBAGE],
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}",
        where=str(place or ""),
    )


def paging(context: Context) -> Iterator[Finding]:
    """Yields memory that is read from storage: as seen by samples while the model trains, and faults too short for
    them.
    """
    found, classes = context.get(moments), context.get(moment_classes)
    table, row = context.trace.table("python_function"), context.get(thread_slices).row[found.place]
    seen = np.maximum(state_counts(table)[row].sum(axis=1), 1)
    trains = np.isin(
        classes.kind, (MomentClass.FORWARD, MomentClass.UNLINKED, MomentClass.BACKWARD, MomentClass.OPTIMIZER)
    )
    lost = found.weight * np.minimum(table["idle_memory"][row] / seen, 1) * trains * context.get(host_time_lost)
    faults, unseen = context.get(_page_faults)
    weight, count = float(lost.sum()) + unseen * total_ns(context), int(np.count_nonzero(lost))
    if faults is not None and faults < max(count, 1):
        return  # without major faults it waited for another thread that maps memory
    if not is_enough(context, weight, count + int(unseen * (faults or 0))):
        return
    place = commonest_place(context, np.flatnonzero(lost > 0), lost[lost > 0])
    yield Finding(
        name="paging",
        title="The training thread waits for memory to be read from storage"
        + (f", mostly in {place.short}" if place else ""),
        saving_ns=int(weight),
        advice=finding.PAGING,
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}"
        + ("" if faults is None else f"; {faults:,} of its page faults waited for storage"),
        where=str(place or ""),
    )


def _page_faults(context: Context) -> _PageFaults:
    counters, thread = counters_of(context), context.get(host_steps).thread
    use = context.get(_own_use)
    if counters is None or thread not in counters.events["thread"]:
        return _PageFaults(None, 0.0)
    faults = int(counters.events["major_faults"][counters.events["thread"] == thread][0])
    cpu_ns, wait_ns, _ = counters.by_thread().get(thread, (0, 0, 0))
    if use is None or not use.samples or thread in counters.life_of():
        return _PageFaults(faults, 0.0)
    blocked = 1 - (cpu_ns + wait_ns) / counters.duration_ns
    unseen = blocked - (use.idle + use.waiting) / use.samples
    explained = unseen * counters.duration_ns <= faults * LONGEST_FAULT_NS
    return _PageFaults(faults, unseen if unseen >= LEAST_SHARE and explained else 0.0)


class _Starved(NamedTuple):
    """The training thread, which is ready to run but gets too little CPU time. share: of the steps, without a CPU."""

    use: ThreadUse
    share: float


def _own_use(context: Context) -> ThreadUse | None:
    """The use of the training thread."""
    thread = context.get(host_steps).thread
    return next((use for use in thread_use(context.trace.target) if use.thread == thread), None)


def _starved(context: Context) -> _Starved | None:
    own = context.get(_own_use)
    if own is None or not own.samples:
        return None
    ready, had = own.running / own.samples, own.cpu_ns / window_ns(context.trace)
    share = ready - had - context.get(_page_faults).unseen
    if share < LEAST_SHARE or not is_enough(context, share * total_ns(context), int(share * own.samples)):
        return None
    return _Starved(own, share)


def processors(context: Context) -> Iterator[Finding]:
    """Yields a finding if the training thread gets too little CPU time, unless that is due to other programs."""
    found, why = context.get(_starved), context.get(cpu_shortage)
    if found is None or why is Shortage.NEIGHBOURS:
        return
    own, uses, window = found.use, thread_use(context.trace.target), window_ns(context.trace)
    had, weight = own.cpu_ns / window, found.share * total_ns(context)
    busy = [use for use in uses if use.cpu_ns > BUSY * window or use is own]
    cores = sum(use.cpu_ns for use in uses) / window
    yield Finding(
        name="no_processor",
        title=f"The training thread is short of CPU: it got {had:.1f} of a core",
        saving_ns=int(weight),
        advice=_advice(why, counters_of(context), busy, cores),
        evidence=f"{per_step(context, weight)}; it had work in {100 * own.running / own.samples:.0f} % of "
        f"{own.samples} samples, but ran only {100 * had:.0f} % of the time; {times(len(busy), 'busy thread')} used "
        f"{cores:.1f} cores in total",
        where=f"thread {context.trace.target.threads.get(own.thread, own.thread)}",
    )


def neighbours_note(context: Context) -> str | None:
    """Returns a note on other programs that take the training thread's CPU; None if none do, or it is not known."""
    found, crowd = context.get(_starved), neighbours_text(context)
    if found is None or not crowd:
        return None
    return f"the training thread waited for a CPU for {100 * found.share:.0f} % of the time: {crowd}"


def _advice(why: Shortage, found: KernelCounters | None, busy: list[ThreadUse], cores: float) -> str:
    fewer = (
        f"Use fewer threads (torch.set_num_threads, OMP_NUM_THREADS): {len(busy)} are busy on {cores:.1f} cores. "
        if len(busy) > 1
        else ""
    )
    if found is None or why is Shortage.UNKNOWN:
        return (
            f"{fewer}Check the CPU limit of the container or service (cgroup quota) and the CPU affinity (taskset, "
            "cpuset, Slurm's --cpus-per-task), and look for other programs on the machine."
        )
    if why is Shortage.QUOTA:
        return (
            f"Raise the CPU limit of the container or service: its quota of {found.quota_cores:g} cores (control group "
            f"{found.quota_group}) was used up in {throttled_pct(found):.0f} % of the periods. {fewer}".rstrip()
        )
    if why is Shortage.AFFINITY:
        return (
            f"Let the process run on more cores: its CPU affinity allows {found.usable_cores} of the host's "
            f"{found.host_cores} (taskset, cpuset, Slurm's --cpus-per-task). {fewer}".rstrip()
        )
    return fewer.rstrip() or f"Run less at the same time: the host has {times(found.host_cores, 'core')}."


def total_ns(context: Context) -> int:
    """Returns the time (ns) of all steps, the basis of findings' shares; at least 1."""
    return context.get(_total_ns)


def _total_ns(context: Context) -> int:
    return max(context.get(host_steps).total_ns, 1)


def per_step(context: Context, weight: float) -> str:
    """Formats a time as one per step: "12.3 ms of each step (31 %)"."""
    window, total = context.get(host_steps), total_ns(context)
    share = f"{100 * weight / total:.0f} %"
    if not window.whole:
        return f"{format_duration(weight)} ({share} of the {'incomplete steps' if window.told else 'trace'})"
    return f"{format_duration(weight / len(window.start))} of each step ({share})"


def margin(context: Context, weight: float) -> str:
    """Formats the uncertainty of a share: "±3 points" if it comes from samples."""
    if is_exact(context):
        return "from recorded calls"
    count = max(len(context.get(moments)), 1)
    share = min(max(weight / total_ns(context), 0.0), 1.0)
    return f"±{196 * math.sqrt(share * (1 - share) / count):.0f} points"


def is_exact(context: Context) -> bool:
    """Returns whether all calls of Python were recorded, rather than samples."""
    return not context.trace.table("python_function")["self_samples"].any()


def idleness(context: Context, share: float) -> str:
    """Formats for how much of a time the thread did not run; "" if calls were recorded, which do not show it."""
    return "" if is_exact(context) else f"; the thread slept or waited for {100 * share:.0f} % of that"


def is_enough(context: Context, weight: float, count: int) -> bool:
    """Returns whether so much time, in so many moments, is worth a finding."""
    return weight >= LEAST * total_ns(context) and count >= LEAST_MOMENTS


def processor_share(context: Context) -> float:
    """Returns the share of the training thread's ready time in which it had a processor; 1 if unknown."""
    use = context.get(_own_use)
    if use is None or not use.running or not use.samples:
        return 1.0
    return min(use.cpu_ns / window_ns(context.trace) / (use.running / use.samples), 1.0)


def optimizer(context: Context) -> Iterator[Finding]:
    """Yields a finding if an optimizer updates the parameters one by one."""
    classes, found = context.get(moment_classes), context.get(moments)
    rows = np.flatnonzero((classes.kind == MomentClass.OPTIMIZER) & (classes.weight > 0))
    weight = float(classes.weight[rows].sum())
    if (
        not is_enough(context, weight, len(rows))
        or not slices_below(context, functions_named(context, SINGLE_TENSOR))[found.place[rows]].any()
    ):
        return
    count, large = _ops_of_optimizer(context)
    steps = max(len(context.get(host_steps).start), 1)
    saving = max(weight - large, 0.0) + FUSED_GAIN * min(large, weight)
    if not is_enough(context, saving, len(rows)):
        return
    name = optimizer_name(context) or "optimizer"
    yield Finding(
        name="unfused_optimizer",
        title=f"The optimizer ({name}) updates the parameters one by one",
        saving_ns=int(saving),
        advice="Use the fused optimizer (fused=True; on the CPU since torch 2.4) or, failing that, foreach=True.",
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}, in {count / steps:,.0f} operators per step; "
        "the saving assumes that the cost of calling them disappears, as does half the time of those above "
        f"{format_duration(SMALL_NS)}",
    )


def _ops_of_optimizer(context: Context) -> tuple[int, float]:
    """Returns the number of outermost operators in the optimizer's steps, and the time (ns) of those that are not
    small.
    """
    table, steps = context.trace.table("cpu_op"), context.get(optimizer_steps)
    outermost = context.get(ops).nested.tree.parent[context.get(ops).place] < 0
    inside = outermost & (containing(*steps, table["start"]) >= 0)
    inside &= table["thread"] == context.get(host_steps).thread
    took = table["duration"][inside]
    return len(took), float(took[took > SMALL_NS].sum())


def anomaly_mode(context: Context) -> Iterator[Finding]:
    """Yields a finding if torch records a stack for each operator."""
    classes = context.get(moment_classes)
    weight = float(classes.weight[classes.kind == MomentClass.ANOMALY].sum())
    checks = float(_checks(context))
    if is_enough(context, weight, int(np.count_nonzero(classes.kind == MomentClass.ANOMALY))):
        yield Finding(
            name="anomaly_mode",
            title="Autograd's anomaly mode is on",
            saving_ns=int(weight + checks),
            advice="Turn anomaly detection off (torch.autograd.set_detect_anomaly(False), detect_anomaly): it records "
            "a Python stack for each operator, and checks every gradient.",
            evidence=f"{per_step(context, weight)}, {margin(context, weight)}, spent on formatting stacks in "
            f"operators, and {per_step(context, checks)} on checks for NaN in the backward pass",
        )


def _checks(context: Context) -> int:
    """Returns the time (ns) of operators inside the backward that check for NaN, in the steps."""
    table, tree = context.trace.table("cpu_op"), context.get(ops)
    names = {"aten::isnan", "aten::any", "aten::_is_any_true", "aten::is_nonzero"}
    chosen = np.array([text in names for text in context.trace.strings], np.bool_)[table["name"]]
    above = tree.nested.tree.parent[tree.place]
    evaluates = matches(context.trace.strings, EVALUATES)
    parents = np.where(above >= 0, tree.row[above], -1) if len(tree.row) else above
    inside = np.append(evaluates[table["name"]], False)[parents]
    inside &= context.get(host_steps).of(table["start"]) >= 0
    return int(table["duration"][chosen & inside].sum())


def recomputation(context: Context) -> Iterator[Finding]:
    """Yields the forward pass that activation checkpointing computes again in the backward."""
    classes, found, calls = context.get(moment_classes), context.get(moments), context.get(user_calls)
    again = calls.phase[found.place] == StepPhase.RECOMPUTATION if len(calls) else np.zeros(len(found), np.bool_)
    rows = np.flatnonzero(again & (classes.weight > 0))
    weight = float(classes.weight[rows].sum())
    if not is_enough(context, weight, len(rows)):
        return
    place = commonest_place(context, rows, classes.weight[rows])
    yield Finding(
        name="recomputation",
        title="Activation checkpointing computes the forward pass again" + (f", mostly {place.short}" if place else ""),
        saving_ns=int(weight),
        advice="Checkpoint fewer layers, or keep the results of expensive operators "
        "(create_selective_checkpoint_contexts), as far as the memory allows: this time is the price of the memory "
        "that checkpointing saves.",
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}, in torch.utils.checkpoint during the "
        "backward pass",
        where=str(place or ""),
    )


def compilation(context: Context) -> Iterator[Finding]:
    """Yields a finding if torch.compile works inside the steps."""
    classes, found, calls = context.get(moment_classes), context.get(moments), context.get(user_calls)
    rows = np.flatnonzero((classes.kind == MomentClass.COMPILE) & (classes.weight > 0))
    weight = float(classes.weight[rows].sum())
    if not is_enough(context, weight, len(rows)):
        return
    steps, count, what = _parts(context, rows)
    warm_up = steps[-1] < max(WARM_UP * count, 1)
    anew = bool((calls.kind[found.place[rows]] == CallKind.RESET).any())
    compiler, advice = _compiler(context, rows)
    where = _caller(context, rows)
    evidence = f"{per_step(context, weight)}, {margin(context, weight)}; in {len(steps)} of {count} {what}"
    if warm_up:
        yield Finding(
            name="compile_warm_up",
            title=f"{compiler} compiles in the first steps of the trace",
            saving_ns=int(weight),
            advice="Trace later, after the warm-up (--start-iteration): this ends once everything is compiled.",
            evidence=evidence,
            where=where,
        )
        return
    yield Finding(
        name="compiled_in_the_loop" if anew else "recompilation",
        title="torch.compile is called, or reset, in the loop" if anew else f"{compiler} compiles again and again",
        saving_ns=int(weight),
        advice="Call torch.compile once, outside the loop, and do not reset it." if anew else advice,
        evidence=evidence,
        where=where,
    )


def graph_breaks(context: Context) -> Iterator[Finding]:
    """Yields a finding if compiled code runs in several pieces per step, where dynamo has counted graph breaks."""
    counted = context.trace.target.settings.get("dynamo.graph_breaks")
    pieces = compiled_pieces(context)
    if not isinstance(counted, int) or counted <= 0 or pieces < 2:
        return
    classes, found, slices = context.get(moment_classes), context.get(moments), context.get(thread_slices)
    calling = functions_named(context, CALLS_COMPILED)
    inner = context.trace.table("python_function")["name"][slices.row[found.place]]
    outside = np.append(~matches(context.trace.strings, AROUND_COMPILED)[context.trace.table("cpu_op")["name"]], False)
    rows = np.flatnonzero(
        calling[inner] & (classes.weight > 0) & (classes.kind != MomentClass.COMPILE) & ~outside[classes.op]
    )
    saving = float(classes.weight[rows].sum()) * (1 - 1 / pieces)
    if not is_enough(context, saving, len(rows)):
        return
    where = _split_function(context, rows)
    yield Finding(
        name="graph_breaks",
        title=f"torch.compile has split the model: {pieces:.0f} compiled pieces run in each step"
        + (f", mostly in {where.short}" if where else ""),
        saving_ns=int(saving),
        advice="Look for graph breaks (TORCH_LOGS=graph_breaks; fullgraph=True raises at the first one), and keep "
        "print, .item() and conditions on the values of tensors out of compiled code: use torch.where or torch.cond, "
        "and check values once per step, outside compiled code.",
        evidence=f"{per_step(context, saving)}, {margin(context, saving)}, spent calling the compiled pieces; "
        f"graph breaks so far: {counted}",
        where=str(where or ""),
    )


def _split_function(context: Context, rows: Ints) -> CodePlace | None:
    """Returns the user's function that is, or contains, compiled code most often at these moments."""
    calls, found, slices = context.get(user_calls), context.get(moments), context.get(thread_slices)
    places = calls.user_slice[found.place[rows]]
    places = places[places != NOTHING]
    places = places[slices_below(context, functions_named(context, CALLS_DYNAMO))[places]]
    return _commonest(context, slices.row[places])


def compiled_pieces(context: Context) -> float:
    """Returns the number of calls of compiled code per step, on the training thread."""
    table, steps = context.trace.table("cpu_op"), context.get(host_steps)
    own = matches(context.trace.strings, COMPILED)[table["name"]] & (table["thread"] == steps.thread)
    inside = steps.of(table["start"][own]) >= 0
    return float(np.count_nonzero(inside)) / max(len(steps.start), 1)


def _parts(context: Context, rows: Ints) -> tuple[Ints, int, str]:
    """Returns the steps of these moments, the number of steps and their noun; without steps, tenths of the trace."""
    found, window = context.get(moments), context.get(host_steps)
    if window.told:
        return unique_values(found.step[rows]), len(window.start), "steps"
    since = (found.time[rows] - window.start[0]) / max(window.total_ns, 1)
    return unique_values((since * PARTS).astype(np.int64)), PARTS, "tenths of the trace"


def _compiler(context: Context, rows: Ints) -> tuple[str, str]:
    """Returns which compiler works at most of these moments, and the advice if it compiles again and again."""
    place = context.get(moments).place[rows]
    if slices_below(context, functions_named(context, _TORCH_COMPILER))[place].any():
        return "torch.compile", _RECOMPILED
    for name, (functions, advice) in _OTHER_COMPILERS.items():
        if 2 * np.count_nonzero(slices_below(context, functions_named(context, functions))[place]) > len(place):
            return name, advice
    return "torch.compile", _RECOMPILED


def _caller(context: Context, rows: Ints) -> str:
    """Returns the user's function around most of these moments."""
    calls, found, slices = context.get(user_calls), context.get(moments), context.get(thread_slices)
    places = calls.user_slice[found.place[rows]]
    return str(_commonest(context, slices.row[places[places != NOTHING]]) or "")


def _commonest(context: Context, rows: Ints) -> CodePlace | None:
    """Returns the function of most of these rows of python_function; None without rows."""
    if not len(rows):
        return None
    names, counts = np.unique(context.trace.table("python_function")["name"][rows], return_counts=True)
    return code_place(context.trace.strings[int(names[np.argmax(counts)])])


def second_backward(context: Context) -> Iterator[Finding]:
    """Yields a finding if a graph is run backward more than once, with the callers that do not train."""
    repeated = _repeated_share(context)
    if repeated < REPEATED:
        return
    classes, found, calls = context.get(moment_classes), context.get(moments), context.get(user_calls)
    table, slices = context.trace.table("python_function"), context.get(thread_slices)
    rows = np.flatnonzero((classes.kind == MomentClass.BACKWARD) & (classes.weight > 0))
    places = calls.user_slice[found.place[rows]]
    rows, places = rows[places != NOTHING], places[places != NOTHING]
    if not len(rows):
        return
    names, callers = np.unique(table["name"][slices.row[places]], return_inverse=True)
    callers = callers.reshape(-1)
    weights = np.bincount(callers, classes.weight[rows], len(names))
    asks = slices_below(context, functions_named(context, GRAD))[found.place[rows]]  # autograd.grad accumulates nothing
    extra = np.bincount(callers, asks, len(names)) > 0.5 * np.bincount(callers, minlength=len(names))
    if not extra.any():
        extra = np.arange(len(names)) != np.argmax(weights)
    for number in np.flatnonzero(extra).tolist():
        if not is_enough(context, float(weights[number]), int((callers == number).sum())):
            continue
        place = code_place(context.trace.strings[int(names[number])])
        yield Finding(
            name="second_backward",
            title=f"{place.short} runs the graph's backward pass again",
            saving_ns=int(weights[number]),
            advice="Run the backward pass once: use the gradients that it leaves in .grad, or do this only every N "
            "steps.",
            evidence=f"{per_step(context, float(weights[number]))}, {margin(context, float(weights[number]))}; "
            f"{100 * repeated:.0f} % of the graph's nodes run more than once",
            where=str(place),
        )


def _repeated_share(context: Context) -> float:
    """Returns the share of backward nodes that ran more than once: the same number of the same thread."""
    table = context.trace.table("cpu_op")
    around = matches(context.trace.strings, EVALUATES)[table["name"]]  # the engine's own operator has the same number
    rows = np.flatnonzero((table["forward_thread"] > 0) & (table["sequence"] >= 0) & ~around)
    if not len(rows):
        return 0.0
    keys, counts = np.unique(
        table["forward_thread"][rows].astype(np.int64) << 40 | table["sequence"][rows], return_counts=True
    )
    return float(np.count_nonzero(counts > 1) / len(keys))
