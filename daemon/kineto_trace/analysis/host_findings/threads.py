"""Time in which the training thread does not get to run its code.

Another thread has the GIL, Python collects garbage, or no processor is free.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.host_figures import is_enough, margin, per_step, total_ns
from kineto_trace.analysis.host_findings.remedies import REMEDIES
from kineto_trace.analysis.host_time.host_moments import host_steps, lost_to_host, moments, thread_slices
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.analysis.host_time.user_lines import user_lines
from kineto_trace.arrays.row_groups import group
from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.structure.python.library_calls import CallKind
from kineto_trace.structure.python.python_samples import RUNNING, state_counts
from kineto_trace.structure.python.thread_use import ThreadUse, thread_use, window_ns

LEAST_SHARE = 0.05  # of the time of the training thread: less is how running is told from the CPU time
BUSY = 0.02  # of a core: a thread that counts as busy


def gil(context: Context) -> Iterator[Finding]:
    """Waiting for the GIL, and who had it."""
    found = context.get(moments)
    lost = found.weight * found.waiting * context.get(lost_to_host)
    weight, count = float(lost.sum()), int(np.count_nonzero(lost))
    if not is_enough(context, weight, count):
        return
    holder, share = _other_python(context)
    yield Finding(
        name="gil",
        title="The training thread waits for Python's lock (GIL)" + (f", which {holder} holds" if holder else ""),
        saving_ns=int(weight),
        advice="Move the other thread's work to a process of its own (multiprocessing), into code that releases the "
        "GIL, or let it sleep between small pieces of work.",
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}"
        + (f"; {holder} ran in {100 * share:.0f} % of the samples of its thread" if holder else ""),
        where=holder,
    )


def _other_python(context: Context) -> tuple[str, float]:
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
    place = _commonest_place(context, lost)
    yield Finding(
        name="garbage_collector",
        title="Python's garbage collector runs in the steps" + (f", most in {place}" if place else ""),
        saving_ns=int(weight),
        advice=REMEDIES[CallKind.GARBAGE],
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}",
        where=place,
    )


def _commonest_place(context: Context, weight: npt.NDArray[np.float64]) -> str:
    """The user's function and line with the most of this weight of the moments; "": none is known."""
    calls, found, slices = context.get(user_calls), context.get(moments), context.get(thread_slices)
    inner = calls.user_slice[found.place]
    rows = np.flatnonzero((weight > 0) & (inner >= 0))
    if not len(rows):
        return ""
    names = context.trace.table("python_function")["name"][slices.row[inner[rows]]].astype(np.int64)
    lines = context.get(user_lines)[rows]
    groups = group([names, lines])
    best = groups.first[int(np.argmax(groups.sums(weight[rows])))]
    return str(code_place(context.trace.strings[int(names[best])], int(lines[best])))


def processors(context: Context) -> Iterator[Finding]:
    """The training thread is ready to run, but has less CPU time than that."""
    uses = thread_use(context.trace.target)
    own = next((use for use in uses if use.thread == context.get(host_steps).thread), None)
    if own is None or not own.samples:
        return
    window = window_ns(context.trace)
    ready, had = own.running / own.samples, own.cpu_ns / window
    share = ready - had
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
