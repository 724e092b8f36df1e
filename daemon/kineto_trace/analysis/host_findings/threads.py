"""Time in which the training thread does not get to run its code.

Another thread has the GIL, Python collects garbage, or no processor is free.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings import remedies
from kineto_trace.analysis.host_findings.host_figures import is_enough, margin, per_step, total_ns
from kineto_trace.analysis.host_time.host_moments import host_steps, lost_to_host, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.thread_views import counters_of
from kineto_trace.analysis.host_time.user_lines import commonest_place
from kineto_trace.analysis.idle.gil_waits import gil_wait_time
from kineto_trace.arrays.intervals import Union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.quantities import ms, times
from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.structure.python.library_calls import CallKind
from kineto_trace.structure.python.python_samples import RUNNING, state_counts
from kineto_trace.structure.python.thread_use import ThreadUse, thread_use, window_ns

LEAST_SHARE = 0.05  # of the time of the training thread: less is how running is told from the CPU time
LONGEST_FAULT_NS = 2_000_000  # a sample tells longer ones
PINS = "/torch/utils/data/_utils/pin_memory.py"  # its thread is torch's own
BUSY = 0.02  # of a core: a thread that counts as busy


def gil(context: Context) -> Iterator[Finding]:
    """Waiting for the GIL, and who had it."""
    found = context.get(moments)
    lost = found.weight * found.waiting * context.get(lost_to_host)
    weight, count = float(lost.sum()), int(np.count_nonzero(lost))
    in_backward = context.get(gil_wait_time)
    if not is_enough(context, weight + in_backward.length(), count + len(in_backward.start)):
        return
    holder, share = other_python(context)
    yield Finding(
        name="gil",
        title="The training thread waits for Python's lock (GIL)" + (f", which {holder} holds" if holder else ""),
        saving_ns=int(weight),
        advice=remedies.PINNING if PINS in holder else remedies.HOLDER_OF_THE_GIL,
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}"
        + (f"; {holder} ran in {100 * share:.0f} % of the samples of its thread" if holder else "")
        + _waits_of_autograd(in_backward),
        where=holder,
    )


def _waits_of_autograd(waits: Union) -> str:
    if not len(waits.start):
        return ""
    return (
        f"; the thread of the backward waits for it {times(len(waits.start), 'time')}, {ms(waits.length())}: autograd "
        "stands still between operators for Python's switch interval or more"
    )


def other_python(context: Context) -> tuple[str, float]:
    """The function that ran most in other threads, with its thread's name, and the share of its thread's samples."""
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
    """Python's garbage collector runs on the training thread, whether the program called it or not."""
    found = context.get(moments)
    lost = found.weight * found.collecting * context.get(lost_to_host)
    weight, count = float(lost.sum()), int(np.count_nonzero(lost))
    if not is_enough(context, weight, count):
        return
    place = str(commonest_place(context, np.flatnonzero(lost > 0), lost[lost > 0]) or "")
    yield Finding(
        name="garbage_collector",
        title="Python's garbage collector runs in the steps" + (f", most in {place}" if place else ""),
        saving_ns=int(weight),
        advice=remedies.REMEDIES[CallKind.GARBAGE],
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}",
        where=place,
    )


def paging(context: Context) -> Iterator[Finding]:
    """Memory that is read from storage: what samples see while the model trains, and what is too short for them."""
    found, classes = context.get(moments), context.get(moment_classes)
    table, row = context.trace.table("python_function"), context.get(thread_slices).row[found.place]
    seen = np.maximum(state_counts(table)[row].sum(axis=1), 1)
    trains = np.isin(classes.kind, (Class.FORWARD, Class.UNLINKED, Class.BACKWARD, Class.OPTIMIZER))
    lost = found.weight * np.minimum(table["idle_memory"][row] / seen, 1) * trains * context.get(lost_to_host)
    faults, unseen = context.get(_page_faults)
    weight, count = float(lost.sum()) + unseen * total_ns(context), int(np.count_nonzero(lost))
    if faults is not None and faults < max(count, 1):
        return  # without faults that read from storage it waited for another thread that maps memory
    if not is_enough(context, weight, count + int(unseen * (faults or 0))):
        return
    place = str(commonest_place(context, np.flatnonzero(lost > 0), lost[lost > 0]) or "")
    yield Finding(
        name="paging",
        title="The training thread waits for memory from storage" + (f", most in {place}" if place else ""),
        saving_ns=int(weight),
        advice=remedies.PAGING,
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}"
        + ("" if faults is None else f"; {faults:,} of its page faults waited for storage"),
        where=place,
    )


class _PageFaults(NamedTuple):
    """major: number of the training thread's faults that waited for storage; None: unknown.

    unseen: the share of the time that it was blocked without a sample that says so, which many short faults make.
    """

    major: int | None
    unseen: float


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
    """The training thread is ready to run, but has less CPU time than that."""
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
