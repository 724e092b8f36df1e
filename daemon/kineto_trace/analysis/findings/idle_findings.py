"""Findings of why GPUs were idle. A saving never exceeds the time that view time_causes assigns to its causes.

Theory of operation
    Time in which the host ran, or was held up in, one Python function is a finding that names the function, its file
    and line, with advice that fits what it did there (sleep, lock, file, log, …). So is time in one annotation, and
    time after one operator that waits for the GPU. The rest of a cause is one finding together.

Functions of the user that native code calls back, and the time that its callers spend around them.
    A compiled program calls the host back (jax.pure_callback): it copies values to the host, makes arrays of them,
    calls the function, and copies its result. Samples show some of that in the function, and the rest in the line that
    waits for the program, in native code. Both disappear without the callback, so they are one finding.

    The caller's time counts for the function if

    - frames of a library lie between both, called at the line of the caller that has its time;
    - the caller's samples at that line are in one callee that is not a Python function;
    - most of its time lies in gaps of the kinds of which the function has most; the kind of a gap is given by the GPU
      activities before and after it. Only time in these gaps counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.cause_views import CAUSES, GPU_CAUSES, Detail, detail_text, time_causes
from kineto_trace.analysis.finding import COLLECTIVES_OF_THE_HOST, Finding
from kineto_trace.analysis.findings.common_findings import (
    function_at,
    heaviest_op,
    location_suffix,
    longest_names,
    measured_times,
    op_name,
    operators_and_launches,
    with_replay,
)
from kineto_trace.analysis.findings.gpu_work_findings import main_origin, non_training_time, small_kernels
from kineto_trace.analysis.host_findings.threads import other_python
from kineto_trace.analysis.host_time.cpu_shortage import CROWDED, neighbours_text, share_without_cpu
from kineto_trace.analysis.host_time.thread_views import counters_of
from kineto_trace.analysis.idle_gaps import BLOCKING, IdleGaps, idle_gaps
from kineto_trace.analysis.idle_pieces import (
    IDLE_CAUSES,
    NO_CALLS,
    NO_EVENT,
    NO_LAUNCH,
    NO_SAMPLE,
    NO_STACKS,
    NOTHING_EARLIER,
    REASONS,
    idle_pieces,
)
from kineto_trace.analysis.overview.gpu_figures import gpu_abilities
from kineto_trace.analysis.step_replay import ReplayChange, allocating_calls, step_replay
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Flags, Ints
from kineto_trace.base.quantities import format_duration, times
from kineto_trace.kernel_traits.kernel_types import data_loading_names
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import KernelCounters
from kineto_trace.structure.activity_links import KERNEL, calls, gpu, training_thread, vendor_words
from kineto_trace.structure.python_frames import callee_samples, line_samples, python_frames

LEAST_OF_WINDOW = 0.005  # below this share, a function is part of the rest
SAID = 0.8  # of idle time: if a change gains less, the evidence says so
TOP = 3  # functions, operators and annotations of one cause that are separate findings
# What the host does in a function, and the advice.
_IN_FUNCTION = {
    "sleep": ("sleeps", "Take the sleep out of the loop, or sleep in a separate thread."),
    "lock": (
        "waits for a lock, a queue or another thread",
        "Let the thread that holds the lock (view threads) work ahead, so that its queue is never empty, or move its "
        "work to another process.",
    ),
    "input_output": (
        "waits for a file, a socket or a process",
        "Do I/O in another thread or process, or ahead of time: a prefetching loader, asynchronous "
        "checkpoints, local copies of remote files.",
    ),
    "logging": (
        "prints or logs",
        "Print and log only every N steps, and through a queue (logging.handlers.QueueHandler); do not format tensors "
        "in the loop, since that also waits for the GPU.",
    ),
    "garbage_collection": (
        "collects garbage",
        "Take gc.collect() out of the loop; call gc.freeze() before the loop, and collect only every N steps.",
    ),
    "gil": (
        "waits for Python's global interpreter lock (GIL)",
        "Move the work of other Python threads (view threads) to other processes, or into code that releases the GIL.",
    ),
    "blocked": (
        "is off the CPU",
        "Take the wait out of the loop, or do it ahead of time in another thread. kinetoctl trace --with-stack=trace "
        "names the call that waits (sleep, lock, file, network, another process).",
    ),
    "python": (
        "runs Python code",
        "Make this function faster, do its work ahead of time in another thread or process, or do it on the GPU.",
    ),
}
_NAMED = (*_IN_FUNCTION, "annotation")
_NO_READ = (
    "Do not read results from the GPU in the loop (.item(), .cpu(), print, a condition on a tensor, nonzero): collect "
    "them on the GPU and read them only every N steps, or copy with non_blocking=True and wait later."
)
_NO_WAIT = (
    "Take {synchronize}, and waits for streams and events, out of the loop: work on the GPU stays in order without "
    "them. To measure times, use {event}, and read the times only every N steps."
)
LEAST_GAPS = 3
MOST = 0.5  # share of a kind's time in Python that is the function's, and of the caller's time in such kinds
NATIVE = 0.9  # of the caller's samples at the line that are in one callee
LEAST_SAMPLES = 3
_MORE_CORES = (
    "Give the job more cores: check its CPU affinity (taskset, cpuset, Slurm's --cpus-per-task, a launcher that binds "
    "ranks to cores) and the CPU quota of its container."
)
BUSY = 0.02  # of a core, or of the wait for one: a process with more counts as busy
_HOST_WORKS = ("operators", "launch_latency", "python", "gil", "blocked", "unknown", "data_loading")


class Callback(NamedTuple):
    """function, caller: parts of the cause "python". share: of the caller's time that disappears with the function."""

    function: Detail
    caller: Detail
    share: float


def host_functions(context: Context) -> Iterator[Finding]:
    """Yields GPU idle time while the host is in one Python function."""
    found = context.get(time_causes)
    least = LEAST_OF_WINDOW * found.steps.measured_ns
    for cause, (does, advice) in _IN_FUNCTION.items():
        left = found.total(cause)
        parts = _largest(context, cause, least)
        back = callbacks(context, parts) if cause == "python" else []
        for part in parts:
            time, around = _with_round_trip(context, part, back)
            if time <= least:
                continue  # the rest of a caller
            left -= time
            if cause == "gil" and part.frame < 0 and context.get(step_replay) is not None:
                continue  # autograd's waits belong to the GIL finding, which replays the steps
            yield Finding(
                name=f"host_{cause}",
                title=f"The GPU is idle while the host {does} in {detail_text(context, part, short=True)}",
                saving_ns=time,
                advice=advice,
                evidence=f"{format_duration(time)} of the GPU's idle time in "
                f"{times(part.pieces, 'stretch', 'stretches')}, seen in "
                f"{_told_by(context, part)}{around}" + (_holder(context) if cause == "gil" else ""),
                causes=(cause,),
                frame=part.frame,
                where=(detail_text(context, part) or "") if part.frame >= 0 else "",
            )
        if left > least:
            yield Finding(
                name=f"host_{cause}",
                title=f"The GPU is idle while the host {does} in many Python functions",
                saving_ns=left,
                advice=advice,
                evidence=f"{format_duration(left)} of the GPU's idle time in functions with less than half a per cent "
                "each",
                causes=(cause,),
            )


def _with_round_trip(context: Context, part: Detail, trips: Sequence[Callback]) -> tuple[int, str]:
    """Returns the time of a part (ns) with the native code around it, or without another part's share; and the
    reason.
    """
    devices = len(context.get(time_causes).devices)
    time = part.time_ns // devices
    for trip in trips:
        moved = int(trip.caller.time_ns * trip.share) // devices
        if part == trip.caller:
            return time - moved, ""
        if part == trip.function:
            return time + moved, (
                f"; {format_duration(moved)} of it is in native code that {detail_text(context, trip.caller)} calls "
                "and that calls this function, in gaps between the same GPU activities"
            )
    return time, ""


def _told_by(context: Context, part: Detail) -> str:
    """Returns how the time of this part of a cause was determined."""
    if part.frame < 0:
        return "pauses between autograd operators at least as long as Python's switch interval"
    return "stack samples" if context.get(python_frames).samples else "recorded calls"


def _holder(context: Context) -> str:
    """Returns which function of another thread ran most during the waits; "" if none did."""
    holder, part = other_python(context)
    return f"; {holder} ran in {100 * part:.0f} % of that thread's samples" if holder else ""


def _largest(context: Context, cause: str, least: float) -> list[Detail]:
    """Returns the parts of a cause with the most time that have a name."""
    number, found = CAUSES.index(cause), context.get(time_causes)
    parts = [part for part in found.details if part.cause == number and part.name >= 0]
    return [part for part in parts[:TOP] if part.time_ns > least * len(found.devices)]


def annotations(context: Context) -> Iterator[Finding]:
    """Yields GPU idle time while the host is in an annotated range, outside any operator."""
    found = context.get(time_causes)
    for part in _largest(context, "annotation", LEAST_OF_WINDOW * found.steps.measured_ns):
        time = part.time_ns // len(found.devices)
        yield Finding(
            name="host_annotation",
            title=f"The GPU waits for the host in {detail_text(context, part)}, outside any operator",
            saving_ns=time,
            advice="Record Python stacks to see the function (kinetoctl trace --with-stack, torch.profiler "
            "with_stack=True). The host runs code other than operators there.",
            evidence=f"{format_duration(time)} of the GPU's idle time in {times(part.pieces, 'stretch', 'stretches')}",
            causes=("annotation",),
        )


def host_bound(context: Context) -> Iterator[Finding]:
    """Yields GPU idle time while the host is in operators and launches: the launch-bound case.

    The saving is what a faster host gains in addition to other findings. After each call that waits for the GPU, the
    host is late however fast it is: that time belongs to the waits.
    """
    causes = ("operators", "launch_latency")
    saving = context.get(time_causes).total(*causes)
    if not saving:
        return
    activity = context.get(gpu)
    kernels = (activity.kind == KERNEL) & ~activity.communication & (context.get(measured_times) > 0)
    count = int(np.count_nonzero(kernels))
    mean = float((activity.end - activity.start)[kernels].mean()) if count else 0.0
    gaps, chosen = _gaps_of(context, causes)
    op = heaviest_op(context, gaps.op[chosen], gaps.length[chosen])
    ended = chosen[gaps.after[chosen] >= 0]
    origin, place = main_origin(context, gaps.after[ended], gaps.length[ended])
    top = next(iter(_largest(context, "operators", 0)), None)
    where = f", {format_duration(top.time_ns / len(gaps.windows))} of it in {detail_text(context, top)}" if top else ""
    finding = Finding(
        name="host_bound",
        title="The GPU waits for the host to launch work" + (f", most of it for {origin}" if origin else ""),
        saving_ns=saving,
        advice=context.get(gpu_abilities).fewer_launches(),
        evidence=f"{times(len(chosen), 'gap')}, {format_duration(saving)} idle{where}; {times(count, 'kernel')} of "
        f"{format_duration(mean)} on average",
        causes=causes,
        op=op,
        kernels=longest_names(context, kernels),
        where=place,
    )
    small = context.get(small_kernels)
    work, thread = small.work if small is not None else None, context.get(training_thread)
    others = ReplayChange(left_out=context.get(non_training_time), work=work, thread=thread)
    gain, waits = _gained(context, finding, others), context.get(_waits_with_gaps)
    if waits.any():
        gain = min(gain, _gained(context, finding, others._replace(unwaited=waits)))
    less = (
        f"; a faster host would save {format_duration(gain)} of that in addition to the other findings"
        if gain < SAID * saving
        else ""
    )
    known = context.get(step_replay) is not None
    yield replace(finding, saving_ns=gain, evidence=f"{finding.evidence}{less}", replayed=known)


def _gained(context: Context, finding: Finding, others: ReplayChange) -> int:
    """Returns what operators and launches that take no time would save (ns) in addition to other changes.

    If that is unknown, returns the idle time.
    """
    faster = with_replay(context, finding, others._replace(faster=context.get(operators_and_launches)))
    return faster.saving_ns - (with_replay(context, finding, others).saving_ns if faster.replayed else 0)


def _waits_with_gaps(context: Context) -> Flags:
    """Returns which of parts.Calls wait for the GPU so that it runs dry: those in findings of synchronisation."""
    gaps, pieces = context.get(idle_gaps), context.get(idle_pieces)
    blocking = gaps.blocking[unique_values(pieces.gap[pieces.cause == IDLE_CAUSES.index("synchronisation")])]
    waits = np.zeros(len(context.get(calls)), np.bool_)
    waits[blocking[blocking >= 0]] = True
    return waits


def _gaps_of(context: Context, causes: Sequence[str]) -> tuple[IdleGaps, Ints]:
    """Returns all gaps, and the places of those with any piece of these causes."""
    pieces = context.get(idle_pieces)
    numbers = [IDLE_CAUSES.index(cause) for cause in causes]
    return context.get(idle_gaps), unique_values(pieces.gap[np.isin(pieces.cause, numbers)])


def _no_wait(context: Context) -> str:
    words = vendor_words(context)
    return _NO_WAIT.format(synchronize=words.synchronize, event=words.event)


def _only_waits(context: Context, shown: str | None) -> bool:
    """Returns whether a synchronisation is a call outside of operators, in a program that has operators."""
    return shown is not None and BLOCKING.match(shown) is not None and len(context.trace.table("cpu_op")) > 0


def synchronisation(context: Context) -> Iterator[Finding]:
    """Yields calls that wait for the GPU, which runs dry until the host continues: one finding per waiting operator."""
    gaps, called = context.get(idle_gaps), context.get(calls)
    pieces, found = context.get(idle_pieces), context.get(time_causes)
    sync = pieces.cause == IDLE_CAUSES.index("synchronisation")
    for part in _largest(context, "synchronisation", 0):
        own = unique_values(pieces.gap[sync & (pieces.name == part.name)])
        op = heaviest_op(context, gaps.op[own], gaps.length[own])
        blocking = gaps.blocking[own]
        blocking = blocking[blocking >= 0]
        call = context.trace.strings[int(called.name[blocking[0]])] if len(blocking) else detail_text(context, part)
        shown = detail_text(context, part)
        frame = function_at(
            context, called.thread[blocking], (called.start[blocking] + called.end[blocking]) // 2, blocking * 0 + 1
        )
        time = part.time_ns // len(found.devices)
        finding = Finding(
            name="synchronisation",
            title=f"{shown} waits for the GPU, which then waits for the host",
            saving_ns=time,
            advice=_no_wait(context) if _only_waits(context, shown) else _NO_READ,
            evidence=f"{call} {times(max(len(blocking), 1), 'time')}{location_suffix(context, frame)}; the GPU "
            f"was idle for {format_duration(time)} afterwards",
            causes=("synchronisation",),
            frame=frame,
            op=op if op_name(context, op) == shown else -1,
        )
        waits = np.zeros(len(called), np.bool_)
        waits[blocking] = True
        yield with_replay(context, finding, ReplayChange(unwaited=waits))


def _cause(cause: str, name: str, title: str, advice: str, *more: str) -> Callable[[Context], Iterator[Finding]]:
    """Returns a finder for one cause, or for several together."""

    def finder(context: Context) -> Iterator[Finding]:
        found = context.get(time_causes)
        saving = found.total(cause, *more)
        if not saving:
            return
        gaps, chosen = _gaps_of(context, [each for each in (cause, *more) if each not in GPU_CAUSES])
        top = next(iter(_largest(context, cause, 0)), None)
        took = top.time_ns / len(found.devices) if top else 0.0
        mostly = f", {format_duration(took)} of it in {detail_text(context, top)}" if top else ""
        yield Finding(
            name=name,
            title=title,
            saving_ns=saving,
            advice=advice,
            evidence=f"{times(len(chosen), 'gap')}, {format_duration(saving)} idle{mostly}",
            causes=(cause, *more),
            op=heaviest_op(context, gaps.op[chosen], gaps.length[chosen]),
            frame=top.frame if top else -1,
            where=(detail_text(context, top) or "") if top and top.frame >= 0 and took >= saving / 2 else "",
        )

    return finder


def data_loading(context: Context) -> Iterator[Finding]:
    """Yields GPU idle time while the host waits for the next batch, or builds it."""
    for finding in _waiting_for_data(context):
        names = [context.trace.strings[number] for number in np.flatnonzero(context.get(data_loading_names)).tolist()]
        single = [name for name in names if "_SingleProcessDataLoaderIter" in name]
        if single and len(single) == len(names):
            evidence = f"{finding.evidence}; batches are built in the training process itself (num_workers=0)"
            yield replace(finding, evidence=evidence)
        else:
            yield finding


def kernel_gaps(context: Context) -> Iterator[Finding]:
    """Yields short gaps between kernels that were launched ahead of time."""
    for finding in _pausing(context):
        yield replace(finding, advice=context.get(gpu_abilities).shorter_pauses())


def allocation(context: Context) -> Iterator[Finding]:
    """Yields GPU idle time while the runtime allocates or releases memory."""
    words = vendor_words(context)
    ways = [*filter(None, [words.allocator]), f"no {words.empty_cache} in the loop", "lower peak memory"]
    advice = f"Keep the allocator from calling {words.runtime}: {', '.join(ways)}; allocate pinned buffers once."
    for finding in _allocating(context):
        yield with_replay(context, replace(finding, advice=advice), ReplayChange(calls=context.get(allocating_calls)))


def unknown(context: Context) -> Iterator[Finding]:
    """Yields GPU idle time of unknown cause."""
    found = context.get(time_causes)
    number = CAUSES.index("unknown")
    for title, reasons in (
        ("The GPU waits for the host, and the trace does not show why", (NO_STACKS, NO_SAMPLE, NO_EVENT)),
        ("The GPU is idle, and the trace does not show why", (NO_LAUNCH, NO_CALLS)),
        ("The trace does not show what the GPU did at the beginning", (NOTHING_EARLIER,)),
    ):
        parts = [part for part in found.details if part.cause == number and part.reason in reasons]
        if parts:
            time = sum(part.time_ns for part in parts) // len(found.devices)
            why = "; ".join(dict.fromkeys(REASONS[part.reason] for part in parts))
            yield Finding(
                name="unknown_idle",
                title=title,
                saving_ns=time,
                advice=f"{why[:1].upper()}{why[1:]}.",
                evidence=f"{format_duration(time)} of the GPU's idle time; how much of it can be saved is unknown",
                causes=("unknown",),
            )


def callbacks(context: Context, parts: list[Detail]) -> list[Callback]:
    """Returns the callbacks among these parts of the cause "python"; a function or a caller is in one at most."""
    found: list[Callback] = []
    taken: set[Detail] = set()
    for function in parts:
        for caller in parts:
            if caller is function or {caller, function} & taken or not _calls_back(context, caller, function):
                continue
            share = _share_in_gaps(context, caller, function)
            if share >= MOST:
                taken |= {caller, function}
                found.append(Callback(function, caller, share))
    return found


def _calls_back(context: Context, caller: Detail, function: Detail) -> bool:
    """Returns whether the caller's line is in native code, and a library's frames below it call the function."""
    frames, table = context.get(python_frames), context.trace.table("python_function")
    if not frames.samples or min(caller.frame, function.frame) < 0 or caller.device != function.device:
        return False
    place = int(np.flatnonzero(frames.row == function.frame)[0])
    below, at, parent = place, int(frames.nested.tree.parent[place]), frames.nested.tree.parent
    while at >= 0 and frames.user[at] != at:
        below, at = at, int(parent[at])
    if at < 0 or below == place or frames.name[at] != caller.name:
        return False
    return table["call_line"][frames.row[below]] == caller.line and _is_native(context, caller)


def _is_native(context: Context, caller: Detail) -> bool:
    """Returns whether the caller's own samples at its line are in one callee, which is then not a Python function."""
    names = context.trace.table("python_function")["name"]
    lines, callees = line_samples(context.trace), callee_samples(context.trace)
    own = (names[lines.row] == caller.name) & (lines.line == caller.line)
    inner = (names[callees.row] == caller.name) & (callees.line == caller.line)
    seen = int(lines.counts[own].sum())
    most = np.bincount(callees.name[inner], callees.counts[inner].sum(axis=1)).max(initial=0)
    return bool(seen >= LEAST_SAMPLES and most >= NATIVE * seen)


def _share_in_gaps(context: Context, caller: Detail, function: Detail) -> float:
    """Returns the share of the caller's time in gaps of the kinds of which the function has most."""
    gaps, pieces, activity = context.get(idle_gaps), context.get(idle_pieces), context.get(gpu)
    named = np.append(activity.name.astype(np.int64), NOTHING)
    python = np.flatnonzero((pieces.cause == IDLE_CAUSES.index("python")) & (pieces.name >= 0))
    gap, name, length = pieces.gap[python], pieces.name[python], pieces.length[python]
    kinds = group([gaps.device[gap], named[gaps.before[gap]], named[gaps.after[gap]]])
    of_function, of_caller = name == function.name, name == caller.name
    held = kinds.sums(length * of_function)
    pairs = group([kinds.number[of_function], gap[of_function]])
    often = np.bincount(kinds.number[of_function][pairs.first], minlength=len(kinds)) >= LEAST_GAPS
    told = often & (held >= MOST * kinds.sums(length))
    times: Ints = kinds.sums(length * of_caller)
    return float(times[told].sum() / max(int(times.sum()), 1))


def workers_without_cores(context: Context) -> Iterator[Finding]:
    """Yields child processes that are ready to make batches but have no CPU: more of them would not help."""
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
        evidence=f"together, the processes used {cores:.1f} cores, and waited for a CPU for {100 * share:.0f} % of the "
        "time in which they could have run",
        causes=("data_loading",),
    )


def host_without_cores(context: Context) -> Iterator[Finding]:
    """Yields threads that launch work but have no CPU while the GPU waits for them."""
    found, share = counters_of(context), context.get(share_without_cpu)
    idle = context.get(time_causes).total(*_HOST_WORKS)
    if found is None or not idle or not share:
        return
    crowd = neighbours_text(context)
    finding = Finding(
        name="host_without_cores",
        title=f"The threads that launch work wait for a CPU: they share {_limit(found)}",
        saving_ns=int(idle * share),
        advice=_MORE_CORES,
        evidence=f"they had no CPU for {100 * share:.0f} % of the time in which they could have run"
        f"{crowd and '; '}{crowd}",
        causes=_HOST_WORKS,
    )
    yield with_replay(context, finding, ReplayChange(pace=np.full(len(context.get(calls)), 1 - share)))


def _limit(found: KernelCounters) -> str:
    """Returns a text on the available cores."""
    if 0 < found.usable_cores < found.host_cores:
        return f"{found.usable_cores} of the host's {found.host_cores} cores (CPU affinity)"
    if found.quota_cores:
        return f"{found.quota_cores:g} cores, the CPU quota of the control group {found.quota_group}"
    return "the host's cores with other programs"


_waiting_for_data = _cause(
    "data_loading",
    "data_loading",
    "The GPU waits for the next batch",
    "Load batches ahead of time and in parallel: raise the DataLoader's num_workers and prefetch_factor, and set "
    "persistent_workers and pin_memory. Move decoding and augmentation to the workers or the GPU.",
)
waiting_for_ranks = _cause(
    "host_communication",
    "communication_on_the_host",
    "The GPU waits for a collective on the host",
    COLLECTIVES_OF_THE_HOST,
)
_allocating = _cause(
    "allocation",
    "allocation",
    "The GPU is idle while memory is allocated or released",
    "",
)
_pausing = _cause("kernel_gaps", "kernel_gaps", "The GPU pauses between short kernels launched ahead of time", "")
queued = _cause(
    "queued",
    "queued",
    "Launched work waits in the GPU's queue",
    "The view idle_gaps with cause=queued shows which activities had to wait: for an event of another stream (record "
    "cuda_sync), for another GPU, for the first launch of a graph, or for the profiler.",
)
