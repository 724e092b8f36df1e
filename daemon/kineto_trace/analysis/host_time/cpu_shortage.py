"""Why threads that are ready to run get no CPU, by the kernel's counters, and who else used the cores."""

from collections import Counter
from enum import StrEnum

import numpy as np

from kineto_trace.analysis.host_time.thread_views import NOTED_THROTTLING_PCT, counters_of, throttled_pct
from kineto_trace.base.quantities import times
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import KernelCounters
from kineto_trace.structure.activity_links import calls

CROWDED = 0.25  # share of the time without a CPU while threads or processes could have run
LEAST_WAIT = 0.05  # of the trace
LEAST_NEIGHBOURS = 0.25  # cores
TOO_MANY = 1.5  # times the cores: threads that compete with each other, whoever else runs
MOST_NAMES, LEAST_NAMED = 3, 0.05  # cores
CROWDED_OUT = "other processes used"


class Shortage(StrEnum):
    """What keeps threads that are ready to run from getting a CPU."""

    UNKNOWN = "unknown"
    QUOTA = "quota"
    AFFINITY = "affinity"
    THREADS = "threads"
    NEIGHBOURS = "neighbours"


def cpu_shortage(context: Context) -> Shortage:
    """Returns what keeps the process's threads from running, if some wait for a CPU.

    - QUOTA comes first: its periods say when it was used up.
    - AFFINITY: who else runs on these cores is not known.
    - THREADS, if many more than the cores want to run: they keep each other waiting, whoever else runs.
    - NEIGHBOURS: other processes ran.
    """
    found = counters_of(context)
    if found is None or found.host_cores <= 0:
        return Shortage.UNKNOWN
    throttled = throttled_pct(found)
    if throttled is not None and throttled >= NOTED_THROTTLING_PCT:
        return Shortage.QUOTA
    if 0 < found.usable_cores < found.host_cores:
        return Shortage.AFFINITY
    wanted = sum(min((cpu + wait) / found.duration_ns, 1.0) for cpu, wait, _ in found.by_thread().values())
    length = np.maximum(found.children["last_ns"] - found.children["first_ns"], 1)
    known = np.maximum(found.children["cpu_ns"], 0) + np.maximum(found.children["wait_ns"], 0)
    wanted += float((known / length).sum())
    others = neighbours_cores(found)
    if others is not None and others >= LEAST_NEIGHBOURS and wanted < TOO_MANY * found.host_cores:
        return Shortage.NEIGHBOURS
    return Shortage.THREADS if wanted > found.host_cores else Shortage.UNKNOWN


def neighbours_cores(found: KernelCounters) -> float | None:
    """Returns the CPU time per second of all processes but this one and its children; None if unknown."""
    own, busy = found.process_total("cpu_ns"), found.process_total("host_busy_ns")
    if own is None or busy is None:
        return None
    return max(busy - own - int(np.maximum(found.children["cpu_ns"], 0).sum()), 0) / found.duration_ns


def neighbours_text(context: Context) -> str:
    """Returns who else used the cores: "other processes used 1.3 of the host's 2 cores (cc 0.9 in 3 processes)".

    "" if threads wait for a CPU for another reason.
    """
    found = counters_of(context)
    if found is None or context.get(cpu_shortage) is not Shortage.NEIGHBOURS:
        return ""
    spent = Counter[str]()
    for name, cpu_ns in zip(found.neighbour_names, found.neighbours["cpu_ns"].tolist(), strict=True):
        spent[name] += cpu_ns
    count = Counter(found.neighbour_names)
    named = ", ".join(
        f"{name} {cpu_ns / found.duration_ns:.1f}{f' in {count[name]} processes' if count[name] > 1 else ''}"
        for name, cpu_ns in spent.most_common(MOST_NAMES)
        if cpu_ns >= LEAST_NAMED * found.duration_ns
    )
    return (
        f"{CROWDED_OUT} {neighbours_cores(found) or 0.0:.1f} of the host's {times(found.host_cores, 'core')}"
        f"{f' ({named})' if named else ''}"
    )


def share_without_cpu(context: Context) -> float:
    """Returns the share of the time in which threads that launch work could have run, but waited for a CPU.

    0.0 if that is less than a quarter of it or 5 % of the trace, or unknown.
    """
    found = counters_of(context)
    if found is None:
        return 0.0
    launching = set(context.get(calls).thread.tolist())
    waits = [(cpu, wait) for thread, (cpu, wait, _) in found.by_thread().items() if thread in launching]
    cpu, waited = (sum(column) for column in zip(*waits, strict=True)) if waits else (0, 0)
    if waited < max(CROWDED * (cpu + waited), LEAST_WAIT * found.duration_ns):
        return 0.0
    return waited / max(cpu + waited, 1)
