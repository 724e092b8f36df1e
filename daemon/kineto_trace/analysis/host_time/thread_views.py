"""Views of threads, the process and its settings: what ran, what waited for a CPU, and what limits or slows them.

The figures of the kernel (model/kernel_counters.py) come first: they cover every thread and all of the time. Samples
add what the kernel does not know: whether a thread waited for the GIL or held it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.base.array_types import Floats, Ints
from kineto_trace.base.quantities import times
from kineto_trace.errors import ViewError
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor, vendor_of_properties
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import UNKNOWN, KernelCounters
from kineto_trace.model.line_counts import WAITS
from kineto_trace.model.trace import Trace
from kineto_trace.structure.python_frames import ThreadUse, idle_reasons, is_native, thread_use, window_ns
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NOTED_WAIT_PCT = 5.0  # of the CPU time that threads wanted
NOTED_THROTTLING_PCT = 5.0  # of the periods of a CPU quota
MIN_COVERED = 0.95  # of the window; below it the views have a note
NO_COUNTERS = "the Linux kernel's counters are not in this trace: kinetod records them, other tools do not"
NO_SETTINGS = "the program's settings are not in this trace: kinetod records them, other tools do not"
PER_THREAD = "torch keeps autocast, grad mode and inference mode per thread, so they are not recorded"
Value = bool | int | float | str

SLOWS, MAY_SLOW = "slows", "may slow"
FEW_CORES = 4
_TF32_SINCE = 8  # major compute capability
_ON = ("1", "true", "yes", "on", "y")
_CONVOLUTION = ("aten::cudnn_convolution", "aten::miopen_convolution")


def counters_of(context: Context) -> KernelCounters | None:
    """Returns the kernel's counters of the process; None if they were not recorded."""
    return context.get(_counters)


def _counters(context: Context) -> KernelCounters | None:
    return KernelCounters.parse(context.trace.target.kernel_counters)


@view(
    "threads",
    columns(
        ("thread", "int", "", "system thread id"),
        ("name", "text", "", "name in Python, otherwise the name in the Linux kernel"),
        ("python", "bool", "", "whether Python code was seen running in it; null: not sampled"),
        ("cpu_us", "float", "us", "CPU time"),
        ("cpu_pct", "float", "%", "CPU time as a share of the trace; 100 is one core all the time"),
        ("cpu_wait_us", "float", "us", "time in which it was ready to run but waited for a CPU"),
        ("cpu_wait_pct", "float", "%", "share of the trace in which it was ready to run but waited for a CPU"),
        (
            "blocked_pct",
            "float",
            "%",
            "rest of its time in the trace: it slept, or waited for a lock, data or a device",
        ),
        (
            "voluntary_switches",
            "int",
            "",
            "number of times it gave up its CPU to wait; null: it ended before the trace did",
        ),
        ("involuntary_switches", "int", "", "number of times it was preempted; null: it ended before the trace did"),
        ("minor_faults", "int", "", "page faults that needed no storage; null: it ended before the trace did"),
        ("major_faults", "int", "", "page faults that waited for storage; null: it ended before the trace did"),
        (
            "samples",
            "int",
            "",
            "number of samples; threads without Python are sampled only when they have used CPU time",
        ),
        ("running", "int", "", "samples at which it had run most of the time since the previous sample"),
        ("waiting", "int", "", "samples in which it waited for the GIL"),
        ("idle", "int", "", "samples in which it was off the CPU for another reason"),
        ("has_gil", "int", "", "samples in which it held the GIL"),
        ("idle_for", "text", "", "what its idle samples waited for: lock, sleep, poll, io, child, driver, memory"),
    ),
)
def threads(context: Context) -> Answer:
    """What each thread did, including threads without Python; those with the most CPU time first.

    CPU time, waiting for a CPU, switches and page faults are the Linux kernel's counters. Threads that did nothing are
    left out. The columns from `samples` on come from sampled stacks.
    """
    trace = context.trace
    uses = {use.thread: use for use in thread_use(trace.target)}
    found = counters_of(context)
    rows = _thread_rows(found, uses, window_ns(trace))
    for row in rows:
        row["name"] = trace.target.threads.get(row["thread"])
    notes = [] if rows else ["the trace has no thread samples, so what the threads did is unknown"]
    if found is None:
        return threads.answer(rows, [*notes, NO_COUNTERS] if rows else notes)
    return threads.answer(rows, [*_limits_noted(found), *_coverage_noted(context, found)])


_FROM_KERNEL = ("cpu_wait_us", "cpu_wait_pct", "blocked_pct")
_EVENTS = ("voluntary_switches", "involuntary_switches", "minor_faults", "major_faults")
_SAMPLED = ("samples", "running", "waiting", "idle", "has_gil")
_COLUMNS = ("thread", "python", "cpu_us", "cpu_pct", *_FROM_KERNEL, *_EVENTS, *_SAMPLED, "idle_for")


def _thread_rows(found: KernelCounters | None, uses: dict[int, ThreadUse], window: int) -> list[dict[str, Any]]:
    """Returns one row for each thread that ran, waited for a CPU or was sampled."""
    counted = found.by_thread() if found is not None else {}
    events = _events(found) if found is not None else {}
    lives = found.life_of() if found is not None else {}
    rows = []
    for thread in counted.keys() | uses.keys():
        use = uses.get(thread)
        row: dict[str, Any] = dict.fromkeys(_COLUMNS)
        row["thread"] = thread
        if found is not None and thread in counted:
            first, last = lives.get(thread, (int(found.times[0]), int(found.times[-1])))
            row |= _shares(counted[thread][0], counted[thread][1], found.duration_ns, last - first)
            row |= events.get(thread, {})
        elif use is not None:
            row |= {"cpu_us": use.cpu_ns / 1000, "cpu_pct": 100 * use.cpu_ns / window}
        if use is not None:
            row |= {"python": not is_native(use), **{name: getattr(use, name) for name in _SAMPLED}}
            row["idle_for"] = idle_reasons([getattr(use, name, 0) for name in WAITS])
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["cpu_us"], -(row["cpu_wait_us"] or 0), row["thread"]))


def _shares(cpu_ns: int, wait_ns: int, duration_ns: int, lived_ns: int) -> dict[str, float]:
    return {
        "cpu_us": cpu_ns / 1000,
        "cpu_pct": 100 * cpu_ns / duration_ns,
        "cpu_wait_us": wait_ns / 1000,
        "cpu_wait_pct": 100 * wait_ns / duration_ns,
        "blocked_pct": max(100 * (lived_ns - cpu_ns - wait_ns) / duration_ns, 0.0),
    }


def _events(found: KernelCounters) -> dict[int, dict[str, int]]:
    columns_ = [found.events[name].tolist() for name in _EVENTS]
    return {
        thread: dict(zip(_EVENTS, row, strict=True))
        for thread, row in zip(found.events["thread"].tolist(), zip(*columns_, strict=True), strict=True)
    }


@view(
    "thread_times",
    columns(
        ("start_us", "float", "us", "start of the interval, relative to the start of the trace"),
        ("duration_us", "float", "us", "length of the interval"),
        ("thread", "int", "", "system thread id"),
        ("name", "text", "", "name in Python, otherwise the name in the Linux kernel"),
        ("cpu_pct", "float", "%", "share of the interval in which it ran"),
        ("cpu_wait_pct", "float", "%", "share of the interval in which it was ready to run but waited for a CPU"),
        (
            "blocked_pct",
            "float",
            "%",
            "rest: it slept, or waited for a lock, data or a device; null: it began in this interval",
        ),
        ("switches", "int", "", "number of times it was scheduled on a CPU"),
    ),
)
def thread_times(context: Context, *, thread: str = "") -> Answer:
    """What each thread did over time, in intervals of about 0.1 s; threads that neither ran nor waited are left out.

    Options:
    - thread: only threads whose name contains this text.
    """
    found, names = counters_of(context), context.trace.target.threads
    if found is None:
        return thread_times.answer([], [NO_COUNTERS])
    rows = found.rows
    chosen = np.ones(len(rows["thread"]), np.bool_)
    if thread:
        chosen = np.isin(rows["thread"], [tid for tid, name in names.items() if thread in name])
        if not chosen.any():
            raise ViewError(f"view thread_times: no thread that ran has {thread!r} in its name; see the view threads")
    interval = rows["interval"][chosen]
    length = np.diff(found.times)[interval]
    cpu, wait = (100 * rows[name][chosen] / length for name in ("cpu_ns", "wait_ns"))
    tids = rows["thread"][chosen].tolist()
    lives, starts = found.life_of(), found.times[interval].tolist()
    begun = [tid in lives and start < lives[tid][0] for tid, start in zip(tids, starts, strict=True)]
    blocked = np.maximum(100 - cpu - wait, 0.0).tolist()
    values = {
        "start_us": (found.times[interval] - context.trace.window_start_ns) / 1000,
        "duration_us": length / 1000,
        "thread": tids,
        "name": [names.get(tid) for tid in tids],
        "cpu_pct": cpu,
        "cpu_wait_pct": wait,
        "blocked_pct": [None if began else rest for began, rest in zip(begun, blocked, strict=True)],
        "switches": rows["switches"][chosen],
    }
    return Answer(values, _coverage_noted(context, found))


@view(
    "process_use",
    columns(
        ("seconds", "float", "s", "time span covered by the Linux kernel's counters"),
        ("cpu_cores", "float", "cores", "CPU time of all threads per second"),
        ("cpu_wait_cores", "float", "cores", "time per second in which threads were ready to run but waited for a CPU"),
        ("usable_cores", "int", "cores", "cores on which the process is allowed to run (affinity)"),
        ("host_cores", "int", "cores", "cores of the host"),
        ("quota_cores", "float", "cores", "CPU quota of the tightest control group; null: none"),
        ("throttled_pct", "float", "%", "share of the quota's periods in which it was used up"),
        ("other_cores", "float", "cores", "CPU time of all other processes on the host per second"),
        ("minor_faults", "float", "1/s", "page faults that needed no storage, per second"),
        ("major_faults", "float", "1/s", "page faults that waited for storage, per second"),
        ("read_bytes", "float", "bytes/s", "read from storage, per second; null: unknown"),
        ("written_bytes", "float", "bytes/s", "written to storage, now or later, per second; null: unknown"),
        ("read_chars", "float", "bytes/s", "read by system calls, also from memory, pipes and sockets; null: unknown"),
        ("written_chars", "float", "bytes/s", "written by system calls, also to pipes and sockets; null: unknown"),
    ),
)
def process_use(context: Context) -> Answer:
    """How the process used the host's CPUs, memory pages and storage, and what limits it; one row.

    All figures are the Linux kernel's counters for the process, without its child processes (DataLoader workers).
    """
    found = counters_of(context)
    if found is None:
        return Answer({column: [] for column in _USE}, [NO_COUNTERS])
    seconds = found.duration_ns / 1e9

    def rate(name: str, unit: float = 1.0) -> float | None:
        total = found.process_total(name)
        return None if total is None else total / (unit * seconds)

    cpu, busy = rate("cpu_ns", 1e9), rate("host_busy_ns", 1e9)
    row = {
        "seconds": seconds,
        "cpu_cores": cpu,
        "cpu_wait_cores": int(found.rows["wait_ns"].sum()) / (1e9 * seconds),
        "usable_cores": found.usable_cores if found.usable_cores != UNKNOWN else None,
        "host_cores": found.host_cores if found.host_cores != UNKNOWN else None,
        "quota_cores": found.quota_cores or None,
        "throttled_pct": throttled_pct(found),
        "other_cores": None if cpu is None or busy is None else max(busy - cpu, 0.0),
        **{name: rate(name) for name in _RATES},
    }
    return Answer({name: [value] for name, value in row.items()}, _limits_noted(found))


_RATES = ("minor_faults", "major_faults", "read_bytes", "written_bytes", "read_chars", "written_chars")
_CORES = ("cpu_cores", "cpu_wait_cores", "usable_cores", "host_cores", "quota_cores", "throttled_pct", "other_cores")
_USE = ("seconds", *_CORES, *_RATES)


@view(
    "child_processes",
    columns(
        ("pid", "int", "", "process id on the host"),
        ("name", "text", "", "its name in the Linux kernel"),
        ("seconds", "float", "s", "time between the first and the last reading of its counters"),
        ("cpu_pct", "float", "%", "CPU time of all its threads as a share of `seconds`; 100 is one core all the time"),
        (
            "cpu_wait_pct",
            "float",
            "%",
            "time in which its threads were ready to run but waited for a CPU, as a share of `seconds`",
        ),
        ("major_faults", "float", "1/s", "page faults that waited for storage, per second; null: unknown"),
        ("read_bytes", "float", "bytes/s", "what it read from storage, per second; null: unknown"),
    ),
)
def child_processes(context: Context) -> Answer:
    """What each child process used, such as the workers of a DataLoader; those with the largest share of a CPU first.

    A worker near 100 % is busy: more workers would deliver more, if there are free cores. A worker that neither runs
    nor waits for a CPU is waiting for storage, for work, or for the process to take its output. Children that lived for
    less than half a second may be missing.
    """
    found = counters_of(context)
    if found is None:
        return child_processes.answer([], [NO_COUNTERS])
    given = found.children
    seconds = (given["last_ns"] - given["first_ns"]) / 1e9
    rates = {name: _known_rate(given[name], seconds) for name in ("cpu_ns", "wait_ns", "major_faults", "read_bytes")}
    values: dict[str, list[Any]] = {
        "pid": given["pid"].tolist(),
        "name": list(found.child_names),
        "seconds": seconds.tolist(),
        "cpu_pct": [None if rate is None else rate / 1e7 for rate in rates["cpu_ns"]],
        "cpu_wait_pct": [None if rate is None else rate / 1e7 for rate in rates["wait_ns"]],
        "major_faults": rates["major_faults"],
        "read_bytes": rates["read_bytes"],
    }
    order = sorted(range(len(seconds)), key=lambda at: (-(values["cpu_pct"][at] or 0.0), values["pid"][at]))
    notes = [] if order else ["no child process was seen"]
    return Answer({name: [column[at] for at in order] for name, column in values.items()}, notes)


def _known_rate(values: Ints, seconds: Floats) -> list[float | None]:
    pairs = zip(values.tolist(), seconds.tolist(), strict=True)
    return [None if value == UNKNOWN else value / length for value, length in pairs]


def throttled_pct(found: KernelCounters) -> float | None:
    """Returns the share of the quota's periods in which the process was throttled; None without a quota."""
    periods, throttled = found.process_total("quota_periods"), found.process_total("throttled_periods")
    if not found.quota_cores or periods is None or throttled is None:
        return None
    return 100 * throttled / periods if periods else 0.0


def _limits_noted(found: KernelCounters) -> list[str]:
    """Returns notes on limits that keep threads from running."""
    notes = list(found.notes)
    share = throttled_pct(found)
    if share is not None and share >= NOTED_THROTTLING_PCT:
        notes.append(
            f"the CPU quota of the control group {found.quota_group} ({found.quota_cores:g} cores) was used up in "
            f"{share:.0f} % of its periods: its threads then stop until the next period"
        )
    cpu, wait = int(found.rows["cpu_ns"].sum()), int(found.rows["wait_ns"].sum())
    if 100 * wait >= NOTED_WAIT_PCT * max(cpu + wait, 1):
        cores = times(found.usable_cores, "usable core") if found.usable_cores > 0 else "its cores"
        notes.append(
            f"threads waited for a CPU for {100 * wait / max(cpu + wait, 1):.0f} % of the time in which they were "
            f"ready to run: counting other processes, more threads were ready than {cores} could run"
        )
    return notes


def _coverage_noted(context: Context, found: KernelCounters) -> list[str]:
    trace = context.trace
    start, end = max(int(found.times[0]), trace.window_start_ns), min(int(found.times[-1]), trace.window_end_ns)
    covered = max(end - start, 0) / window_ns(trace)
    if covered >= MIN_COVERED:
        return []
    return [f"the Linux kernel's counters cover {100 * covered:.0f} % of the trace; their shares refer to that time"]


# The view of the program's settings when it was recorded, and which of them are known to make it slower.


@view(
    "settings",
    columns(
        (
            "setting",
            "text",
            "",
            "torch.*, dynamo.*, optimizer.*, python.*, and env.* for environment variables that are set",
        ),
        ("value", "text", "", "value when the recording began"),
        ("effect", "text", "", '"slows" or "may slow"; null: not known to cost time'),
        ("judgement", "text", "", "what this value does, if it costs time"),
    ),
)
def settings(context: Context) -> Answer:
    """The settings of torch, Python and the environment when the recording began; those that cost time come first.

    Only environment variables on an allow list are read, so that no secrets are recorded. `torch.num_threads` is what a
    new thread of the program would get. Only optimizers that have stepped are listed; `parameters` counts tensors.
    """
    found, facts = context.trace.target.settings, facts_of(context.trace)
    judged = {name: verdict(name, value, facts) for name, value in found.items()}

    def order(name: str) -> tuple[int, str]:
        told = judged[name]
        return (2 if told is None else 0 if told.effect == SLOWS else 1), name

    names = sorted(found, key=order)
    values = {
        "setting": names,
        "value": [str(found[name]) for name in names],
        "effect": [told.effect if (told := judged[name]) is not None else None for name in names],
        "judgement": [told.text if (told := judged[name]) is not None else None for name in names],
    }
    if not names:
        return Answer(values, [NO_SETTINGS])
    return Answer(values, [PER_THREAD] if "torch.version" in found else [])


# What is known about settings that make a program slower: one rule for each setting.
# A rule describes the effect of a value, never its size: the figures of the trace show that. A setting without a rule,
# or with a value that is as fast as any other, has no verdict.
class Verdict(NamedTuple):
    """effect: SLOWS or MAY_SLOW."""

    effect: str
    text: str


@dataclass(frozen=True, slots=True)
class SettingFacts:
    """What a rule may use besides the value."""

    settings: Mapping[str, Value]
    on_gpu: bool  # the trace has kernels
    tf32: bool | None  # whether the NVIDIA GPUs support it; None if unknown
    convolves: bool  # on a GPU


Rule = Callable[[Value, SettingFacts], Verdict | None]


def facts_of(trace: Trace) -> SettingFacts:
    """Returns what the rules need to know of a trace."""
    nvidia = [each for each in trace.devices if vendor_of_properties(each) in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)]
    majors = [major for device in nvidia if isinstance(major := device.get("computeMajor"), int)]
    return SettingFacts(
        settings=trace.target.settings,
        on_gpu=len(trace.table("kernel")) > 0,
        tf32=all(major >= _TF32_SINCE for major in majors) if majors else None,
        convolves=any(name in trace.strings for name in _CONVOLUTION),
    )


def verdict(name: str, value: Value, facts: SettingFacts) -> Verdict | None:
    """Returns what is known about this value of a setting; None if nothing is."""
    rule = RULES.get(name) or (_updates if name.startswith("optimizer.") else None)
    return rule(value, facts) if rule is not None else None


def _if_on(effect: str, text: str) -> Rule:
    """Returns a rule for a switch that costs time when it is on."""
    return lambda value, _facts: Verdict(effect, text) if _is_on(value) else None


def _if_off(effect: str, text: str) -> Rule:
    return lambda value, _facts: Verdict(effect, text) if value is False or value == "0" else None


def _is_on(value: Value) -> bool:
    return value.strip().lower() in _ON if isinstance(value, str) else bool(value)


def _if_text(effect: str, text: str, *wanted: str) -> Rule:
    """Returns a rule for one of these values, in any case; without values, for any text but an empty one."""

    def rule(value: Value, _facts: SettingFacts) -> Verdict | None:
        found = str(value).strip().lower()
        return Verdict(effect, text.format(value=value)) if (found in wanted if wanted else found) else None

    return rule


def _threads(value: Value, facts: SettingFacts) -> Verdict | None:
    cores = facts.settings.get("python.usable_cores")
    if not isinstance(value, int) or not isinstance(cores, int) or cores < 1:
        return None
    if value > cores:
        return Verdict(
            SLOWS,
            f"operators on the CPU use {value} threads on {times(cores, 'usable core')}, so the threads take turns",
        )
    if value == 1 and cores >= FEW_CORES and not facts.on_gpu:
        return Verdict(
            MAY_SLOW,
            f"operators on the CPU use one of {cores} usable cores; fine if other processes use the rest",
        )
    return None


def _tf32(value: Value, facts: SettingFacts) -> Verdict | None:
    if facts.on_gpu and facts.tf32 and value in ("none", "ieee", "highest", False, "0"):
        return Verdict(MAY_SLOW, "float32 matrix products do not use tensor cores; TF32 is faster but less exact")
    return None


def _benchmark(value: Value, facts: SettingFacts) -> Verdict | None:
    if value is False and facts.convolves:
        return Verdict(
            MAY_SLOW,
            "convolution algorithms are chosen by a heuristic; benchmarking pays off if input shapes stay the same",
        )
    return None


def _updates(value: Value, facts: SettingFacts) -> Verdict | None:
    """Judges how an optimizer updates its parameters; by default all together on a GPU, one by one on a CPU."""
    if value == "for-loop" or (value == "default" and not facts.on_gpu):
        return Verdict(MAY_SLOW, "parameters are updated one by one; foreach=True or fused=True updates them together")
    return None


def _counted(text: str) -> Rule:
    return lambda value, _facts: (
        Verdict(MAY_SLOW, text.format(times(value, "time"))) if isinstance(value, int) and value > 0 else None
    )


_WAITS_FOR_EACH_LAUNCH = "each launch waits until its kernel has ended: host and GPU never work at the same time"
_THROUGH_HOST = "GPUs exchange data over a slower path than they could"

RULES: Mapping[str, Rule] = {
    "torch.num_threads": _threads,
    "torch.anomaly_mode": _if_on(
        SLOWS, "a stack is recorded for every operator, and the backward pass checks every result for NaN"
    ),
    "torch.deterministic_algorithms": _if_on(
        MAY_SLOW, "slower kernels are used where the faster ones are not deterministic"
    ),
    "torch.cudnn_deterministic": _if_on(
        MAY_SLOW, "slower convolution algorithms are used where the faster ones are not deterministic"
    ),
    "torch.cudnn_benchmark": _benchmark,
    "torch.cudnn_enabled": _if_off(MAY_SLOW, "convolutions and recurrent layers run without cuDNN or MIOpen"),
    "torch.mkldnn_enabled": _if_off(MAY_SLOW, "operators on the CPU run without oneDNN"),
    "torch.matmul_precision": _tf32,
    "torch.float32_matmul_precision": _tf32,
    "dynamo.graph_breaks": _counted("torch.compile has split the program {}; TORCH_LOGS=graph_breaks shows where"),
    "dynamo.recompiles": _counted("torch.compile has recompiled code {}; TORCH_LOGS=recompiles shows why"),
    "python.dev_mode": _if_on(SLOWS, "Python's development mode checks every allocation"),
    "python.tracemalloc": _if_on(SLOWS, "tracemalloc records a stack for every Python allocation"),
    "python.monitoring_tools": _if_text(SLOWS, "every Python call also runs a tool: {value}"),
    "env.CUDA_LAUNCH_BLOCKING": _if_on(SLOWS, _WAITS_FOR_EACH_LAUNCH),
    "env.HIP_LAUNCH_BLOCKING": _if_on(SLOWS, _WAITS_FOR_EACH_LAUNCH),
    "env.AMD_SERIALIZE_KERNEL": _if_text(SLOWS, _WAITS_FOR_EACH_LAUNCH, "1", "2", "3"),
    "env.PYTORCH_NO_CUDA_MEMORY_CACHING": _if_text(
        SLOWS, "every allocation goes to the GPU runtime, which stalls the GPU"
    ),
    "env.CUDA_CACHE_DISABLE": _if_on(MAY_SLOW, "kernels are recompiled whenever the program starts"),
    "env.NVIDIA_TF32_OVERRIDE": _tf32,
    "env.TORCH_DISTRIBUTED_DEBUG": _if_text(SLOWS, "ranks compare each collective before they start it", "detail"),
    "env.TORCH_NCCL_BLOCKING_WAIT": _if_on(SLOWS, "wait() blocks the host until the collective has ended"),
    "env.TORCHDYNAMO_DISABLE": _if_on(MAY_SLOW, "torch.compile does nothing"),
    "env.TORCH_COMPILE_DISABLE": _if_on(MAY_SLOW, "torch.compile does nothing"),
    "env.PYTORCH_JIT": _if_off(MAY_SLOW, "TorchScript runs as plain Python"),
    "env.NCCL_P2P_DISABLE": _if_on(MAY_SLOW, _THROUGH_HOST),
    "env.NCCL_SHM_DISABLE": _if_on(MAY_SLOW, _THROUGH_HOST),
    "env.NCCL_IB_DISABLE": _if_on(MAY_SLOW, "hosts exchange data without InfiniBand or RoCE"),
    "env.NCCL_ALGO": _if_text(MAY_SLOW, "NCCL cannot choose the algorithm of each collective"),
    "env.NCCL_PROTO": _if_text(MAY_SLOW, "NCCL cannot choose the protocol of each collective"),
    "env.JAX_DISABLE_JIT": _if_on(SLOWS, "JAX runs each operation separately"),
    "env.JAX_DEBUG_NANS": _if_on(SLOWS, "JAX checks every result for NaN"),
    "env.PYTHONMALLOC": _if_text(SLOWS, "Python checks every allocation", "debug", "malloc_debug", "pymalloc_debug"),
}
