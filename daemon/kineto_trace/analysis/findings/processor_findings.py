"""Findings about the host's processors: the threads and worker processes that have none while the GPU waits."""

from collections.abc import Iterator

import numpy as np

from kineto_trace.analysis.causes.time_causes import time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.replayed_savings import replayed
from kineto_trace.analysis.host_time.thread_views import CROWDED, counters_of, share_without_cpu
from kineto_trace.analysis.replay.step_replay import Change
from kineto_trace.base.quantities import times
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import KernelCounters
from kineto_trace.structure.activity_links import calls

_MORE_CORES = (
    "Give the job more cores: look for an affinity to few of them (taskset, cpuset, Slurm's --cpus-per-task, a "
    "launcher that binds ranks to cores) and for a CPU quota of the container."
)
BUSY = 0.02  # of a core, or of the wait for one: a process that counts as busy
_HOST_WORKS = ("operators", "launch_latency", "python", "gil", "blocked", "unknown", "data_loading")


def workers_without_cores(context: Context) -> Iterator[Finding]:
    """Child processes that are ready to make batches and have no CPU: more of them would not help."""
    found, waits = counters_of(context), context.get(time_causes).total("data_loading")
    if found is None or not waits:
        return
    ran, waited = found.children["cpu_ns"], found.children["wait_ns"]
    length = found.children["last_ns"] - found.children["first_ns"]
    busy = (ran >= 0) & (waited >= 0) & (length > 0)
    busy &= ran + waited >= BUSY * length
    ready = float((ran + waited)[busy].sum())
    if not ready or float(waited[busy].sum()) < CROWDED * ready:
        return
    share = float(waited[busy].sum()) / ready
    cores = float((ran[busy] / length[busy]).sum())
    processes = times(int(busy.sum()), "busy process", "busy processes")
    yield Finding(
        name="workers_without_cores",
        title=f"Worker processes wait for a CPU: {processes} share {_limit(found)}",
        saving_ns=int(waits * share),
        advice=f"{_MORE_CORES} More workers do not help.",
        evidence=f"the processes had {cores:.1f} cores together, and in {100 * share:.0f} % of the time in which they "
        "could have run they had none",
        causes=("data_loading",),
    )


def host_without_cores(context: Context) -> Iterator[Finding]:
    """Threads that launch work, and have no CPU while the GPU waits for them."""
    found, share = counters_of(context), context.get(share_without_cpu)
    idle = context.get(time_causes).total(*_HOST_WORKS)
    if found is None or not idle or not share:
        return
    finding = Finding(
        name="host_without_cores",
        title=f"The threads that launch work wait for a CPU: they share {_limit(found)}",
        saving_ns=int(idle * share),
        advice=_MORE_CORES,
        evidence=f"in {100 * share:.0f} % of the time in which they could have run they had no CPU",
        causes=_HOST_WORKS,
    )
    yield replayed(context, finding, Change(pace=np.full(len(context.get(calls)), 1 - share)))


def _limit(found: KernelCounters) -> str:
    """Returns which cores there are."""
    if 0 < found.usable_cores < found.host_cores:
        return f"{found.usable_cores} of the host's {found.host_cores} cores, which is all that this process may use"
    if found.quota_cores:
        return f"{found.quota_cores:g} cores, the CPU quota of the control group {found.quota_group}"
    return "the host's cores, which other programs use, too"
