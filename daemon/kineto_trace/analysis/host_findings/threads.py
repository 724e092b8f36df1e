"""Findings on threads that share processors or the GIL, and host figures that findings need.

Another thread has the GIL, Python collects garbage, or no processor is free.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis import finding
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_time.host_moments import host_steps, host_time_lost, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import MomentClass, moment_classes
from kineto_trace.analysis.host_time.thread_views import counters_of
from kineto_trace.analysis.host_time.user_calls import commonest_place
from kineto_trace.analysis.idle_pieces import gil_wait_time
from kineto_trace.arrays.intervals import Union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.quantities import format_duration, times
from kineto_trace.model.context import Context
from kineto_trace.structure.library_calls import CallKind, code_place
from kineto_trace.structure.python_frames import RUNNING, ThreadUse, state_counts, thread_use, window_ns

LEAST_SHARE = 0.05  # of the time of the training thread: less is within the error of its CPU time
LONGEST_FAULT_NS = 2_000_000  # samples show longer ones
PINS = "/torch/utils/data/_utils/pin_memory.py"  # its thread belongs to torch
BUSY = 0.02  # of a core: a thread with more counts as busy
LEAST = 0.02  # of the steps' time: less is within the noise of samples
LEAST_MOMENTS = 3


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
        title="The training thread waits for Python's lock (GIL)" + (f", which {holder} holds" if holder else ""),
        saving_ns=int(weight),
        advice=finding.PINNING if PINS in holder else finding.HOLDER_OF_THE_GIL,
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}"
        + (f"; {holder} ran in {100 * share:.0f} % of the samples of its thread" if holder else "")
        + _waits_of_autograd(in_backward),
        where=holder,
    )


def _waits_of_autograd(waits: Union) -> str:
    if not len(waits.start):
        return ""
    return (
        f"; the thread of the backward waits for it {times(len(waits.start), 'time')}, "
        f"{format_duration(waits.length())}: autograd "
        "stands still between operators for Python's switch interval or more"
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
    place = str(commonest_place(context, np.flatnonzero(lost > 0), lost[lost > 0]) or "")
    yield Finding(
        name="garbage_collector",
        title="Python's garbage collector runs in the steps" + (f", most in {place}" if place else ""),
        saving_ns=int(weight),
        advice=finding.REMEDIES[CallKind.GARBAGE],
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}",
        where=place,
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
    place = str(commonest_place(context, np.flatnonzero(lost > 0), lost[lost > 0]) or "")
    yield Finding(
        name="paging",
        title="The training thread waits for memory from storage" + (f", most in {place}" if place else ""),
        saving_ns=int(weight),
        advice=finding.PAGING,
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}"
        + ("" if faults is None else f"; {faults:,} of its page faults waited for storage"),
        where=place,
    )


def _page_faults(context: Context) -> _PageFaults:
    counters, thread = counters_of(context), context.get(host_steps).thread
    use = next((use for use in thread_use(context.trace.target) if use.thread == thread), None)
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


def processors(context: Context) -> Iterator[Finding]:
    """Yields a finding if the training thread is ready to run but gets too little CPU time."""
    uses = thread_use(context.trace.target)
    own = next((use for use in uses if use.thread == context.get(host_steps).thread), None)
    if own is None or not own.samples:
        return
    window = window_ns(context.trace)
    ready, had = own.running / own.samples, own.cpu_ns / window
    share = ready - had - context.get(_page_faults).unseen
    weight = share * total_ns(context)
    if share < LEAST_SHARE or not is_enough(context, weight, int(share * own.samples)):
        return
    busy = [use for use in uses if use.cpu_ns > BUSY * window or use is own]
    cores = sum(use.cpu_ns for use in uses) / window
    noun = "thread" if len(busy) == 1 else "threads"
    yield Finding(
        name="no_processor",
        title=f"The training thread is ready to run but has no CPU: {len(busy)} busy {noun} on {cores:.1f} cores",
        saving_ns=int(weight),
        advice=_advice(busy, cores),
        evidence=f"{per_step(context, weight)}; the thread was ready to run or running in {100 * ready:.0f} % of "
        f"{own.samples} samples, and had the CPU for {100 * had:.0f} % of the time",
        where=f"thread {context.trace.target.threads.get(own.thread, own.thread)}",
    )


def _advice(busy: list[ThreadUse], cores: float) -> str:
    which = (
        f"Use fewer threads (torch.set_num_threads, OMP_NUM_THREADS): {len(busy)} are busy on {cores:.1f} cores. "
        if len(busy) > 1
        else ""
    )
    return (
        f"{which}Look for a CPU limit of the container or service (cgroup quota), for an affinity to few cores "
        "(taskset, cpuset, Slurm's --cpus-per-task), and for other programs on the machine."
    )


def total_ns(context: Context) -> int:
    """Returns the time (ns) of all steps, the basis of findings' shares; at least 1."""
    return context.get(_total_ns)


def _total_ns(context: Context) -> int:
    return max(context.get(host_steps).total_ns, 1)


def per_step(context: Context, weight: float) -> str:
    """Formats a time as one per step: "12.3 ms of each step (31 %)"."""
    window, total = context.get(host_steps), total_ns(context)
    share = f"{100 * weight / total:.0f} %"
    if not window.told:
        return f"{format_duration(weight)} ({share} of the trace)"
    return f"{format_duration(weight / len(window.start))} of each step ({share})"


def margin(context: Context, weight: float) -> str:
    """Formats the uncertainty of a share: "±3 points" if it comes from samples."""
    if is_exact(context):
        return "by exact calls"
    count = max(len(context.get(moments)), 1)
    share = min(max(weight / total_ns(context), 0.0), 1.0)
    return f"±{196 * math.sqrt(share * (1 - share) / count):.0f} points"


def is_exact(context: Context) -> bool:
    """Returns whether all calls of Python were recorded, rather than samples."""
    return not context.trace.table("python_function")["self_samples"].any()


def idleness(context: Context, share: float) -> str:
    """Formats for how much of a time the thread did not run; "" if calls were recorded, which do not show it."""
    return "" if is_exact(context) else f"; the thread slept or waited in {100 * share:.0f} % of it"


def is_enough(context: Context, weight: float, count: int) -> bool:
    """Returns whether so much time, in so many moments, is worth a finding."""
    return weight >= LEAST * total_ns(context) and count >= LEAST_MOMENTS


def processor_share(context: Context) -> float:
    """Returns the share of the training thread's ready time in which it had a processor; 1 if unknown."""
    use = next((use for use in thread_use(context.trace.target) if use.thread == context.get(host_steps).thread), None)
    if use is None or not use.running or not use.samples:
        return 1.0
    return min(use.cpu_ns / window_ns(context.trace) / (use.running / use.samples), 1.0)
