"""Findings of why GPUs were idle. Each saves the time that view time_causes gives to its causes, not more.

Theory of operation
    Time in which the host ran, or was held up in, one Python function is a finding that names the function, its file
    and line, with an advice for what it did there (sleep, lock, file, log, …). So is time in one annotation, and time
    after one operator that waits for the GPU. What is left of a cause beside these few is one finding together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kineto_trace.analysis.causes.cause_views import what
from kineto_trace.analysis.causes.time_causes import CAUSES, GPU_CAUSES, Detail, time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.aside_functions import aside_time
from kineto_trace.analysis.findings.gpu_abilities import gpu_abilities
from kineto_trace.analysis.findings.launch_origins import main_origin
from kineto_trace.analysis.findings.measured_work import (
    Flags,
    Ints,
    called_in,
    function_at,
    heaviest_op,
    longest,
    measured_times,
    op_name,
)
from kineto_trace.analysis.findings.replayed_savings import operators_and_launches, replayed
from kineto_trace.analysis.findings.round_trips import CalledBack, round_trips
from kineto_trace.analysis.findings.small_kernel_findings import small_kernels
from kineto_trace.analysis.host_findings.remedies import COLLECTIVES_OF_THE_HOST
from kineto_trace.analysis.host_findings.threads import other_python
from kineto_trace.analysis.idle.idle_gaps import BLOCKING, IdleGaps, idle_gaps
from kineto_trace.analysis.idle.idle_pieces import (
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
from kineto_trace.analysis.replay.step_replay import Change, allocating_calls, step_replay
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.quantities import ms, times
from kineto_trace.kernel_traits.kernel_types import data_loading_names
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.structure.gpu_devices import vendor_words
from kineto_trace.structure.python.python_frames import python_frames
from kineto_trace.structure.training_thread import training_thread

LEAST_OF_WINDOW = 0.005  # below this, a function is part of what is left
SAID = 0.8  # of idle time: where a change gains less than that, the evidence says so
TOP = 3  # functions, operators and annotations of one cause that are findings of their own

# What the host does in a function, and what to do about it.
_IN_FUNCTION = {
    "sleep": ("it sleeps", "Take the sleep out of the loop, or wait on a thread of its own."),
    "lock": (
        "it waits for a lock, a queue or another thread",
        "Find who holds the lock (view threads): let the other thread work ahead into a queue that is never empty, or "
        "do its work in another process.",
    ),
    "input_output": (
        "it waits for a file, a socket or a process",
        "Do input and output on another thread or process, or ahead of time: a prefetching loader, asynchronous "
        "checkpoints, local copies of remote files.",
    ),
    "logging": (
        "it prints or logs",
        "Print and log every so many steps, and from a queue (logging.handlers.QueueHandler); do not format tensors in "
        "the loop, which also waits for the GPU.",
    ),
    "garbage_collection": (
        "it collects garbage",
        "Take gc.collect() out of the loop; freeze what exists before it (gc.freeze()), and collect every so many "
        "steps.",
    ),
    "gil": (
        "it waits for Python's global lock (GIL)",
        "Move the work of other Python threads (view threads) to processes, or to code that releases the lock.",
    ),
    "blocked": (
        "it is off the CPU",
        "See what this line waits for (sleep, lock, file, network, another process): kinetoctl trace "
        "--with-stack=trace names the call. Take it out of the loop, or do it ahead on another thread.",
    ),
    "python": (
        "it runs Python",
        "Make this function faster, do its work ahead on another thread or process, or do it on the GPU.",
    ),
}
_NAMED = (*_IN_FUNCTION, "annotation")


def host_functions(context: Context) -> Iterator[Finding]:
    """GPU idle while the host is in one Python function."""
    found = context.get(time_causes)
    least = LEAST_OF_WINDOW * found.steps.measured_ns
    for cause, (does, advice) in _IN_FUNCTION.items():
        left = found.total(cause)
        parts = _largest(context, cause, least)
        back = round_trips(context, parts) if cause == "python" else []
        for part in parts:
            time, around = _with_round_trip(context, part, back)
            if time <= least:
                continue  # what is left of a caller
            left -= time
            if cause == "gil" and part.frame < 0 and context.get(step_replay) is not None:
                continue  # autograd's waits are told by the finding of the GIL, which runs the steps again
            yield Finding(
                name=f"host_{cause}",
                title=f"The GPU waits for the host in {what(context, part)}: {does}",
                saving_ns=time,
                advice=advice,
                evidence=f"{ms(time)} of the GPU's idle time in {times(part.pieces, 'stretch', 'stretches')}, told by "
                f"{_told_by(context, part)}{around}" + (_holder(context) if cause == "gil" else ""),
                causes=(cause,),
                frame=part.frame,
            )
        if left > least:
            yield Finding(
                name=f"host_{cause}",
                title=f"The GPU waits for the host in many Python functions: {does}",
                saving_ns=left,
                advice=advice,
                evidence=f"{ms(left)} of the GPU's idle time in functions with less than half a per cent each",
                causes=(cause,),
            )


def _with_round_trip(context: Context, part: Detail, trips: Sequence[CalledBack]) -> tuple[int, str]:
    """The time of a part (ns) with that of the native code around it, or without what goes with another; and why."""
    devices = len(context.get(time_causes).devices)
    time = part.time_ns // devices
    for trip in trips:
        moved = int(trip.caller.time_ns * trip.share) // devices
        if part == trip.caller:
            return time - moved, ""
        if part == trip.function:
            return time + moved, (
                f"; {ms(moved)} of it in native code of {what(context, trip.caller)}, which calls the function back: "
                "in gaps of the same kind, between the same work of the GPU"
            )
    return time, ""


def _told_by(context: Context, part: Detail) -> str:
    """Names what the time of this part of a cause was told by."""
    if part.frame < 0:
        return "autograd, which stands still between operators for Python's switch interval or more"
    return "samples of the stacks" if context.get(python_frames).samples else "recorded calls"


def _holder(context: Context) -> str:
    """Tells which function of another thread ran most meanwhile; "" if none did."""
    holder, part = other_python(context)
    return f"; {holder} ran in {100 * part:.0f} % of the samples of its thread" if holder else ""


def _largest(context: Context, cause: str, least: float) -> list[Detail]:
    """Returns the parts of a cause with the most time that have a name."""
    number, found = CAUSES.index(cause), context.get(time_causes)
    parts = [part for part in found.details if part.cause == number and part.name >= 0]
    return [part for part in parts[:TOP] if part.time_ns > least * len(found.devices)]


def annotations(context: Context) -> Iterator[Finding]:
    """GPU idle while the host is in an annotated range, outside of operators."""
    found = context.get(time_causes)
    for part in _largest(context, "annotation", LEAST_OF_WINDOW * found.steps.measured_ns):
        time = part.time_ns // len(found.devices)
        yield Finding(
            name="host_annotation",
            title=f"The GPU waits for the host in {what(context, part)}, outside of operators",
            saving_ns=time,
            advice="The host runs other code than operators there. Python stacks (kinetoctl trace --with-stack, "
            "torch.profiler with_stack=True) name the function.",
            evidence=f"{ms(time)} of the GPU's idle time in {times(part.pieces, 'stretch', 'stretches')}",
            causes=("annotation",),
        )


def host_bound(context: Context) -> Iterator[Finding]:
    """GPU idle because the host is in operators and launches: the launch-bound case.

    It saves what a faster host gains beside other findings. After each call that waits for the GPU, the host is late
    however fast it is: what goes with the waits is theirs.
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
    where = f", {ms(top.time_ns / len(gaps.windows))} of it in {what(context, top)}" if top else ""
    finding = Finding(
        name="host_bound",
        title="The GPU waits for the host to launch work" + (f", most of it for {origin}" if origin else ""),
        saving_ns=saving,
        advice=context.get(gpu_abilities).fewer_launches(),
        evidence=f"{times(len(chosen), 'gap')}, {ms(saving)} idle{where}; {times(count, 'kernel')} of {mean / 1e3:.3g} "
        "us on average",
        causes=causes,
        op=op,
        kernels=longest(context, kernels),
        where=place,
    )
    small = context.get(small_kernels)
    work, thread = small.work if small is not None else None, context.get(training_thread)
    others = Change(left_out=context.get(aside_time), work=work, thread=thread)
    gain, waits = _gained(context, finding, others), context.get(_waits_with_gaps)
    if waits.any():
        gain = min(gain, _gained(context, finding, others._replace(unwaited=waits)))
    less = f"; a faster host would gain {ms(gain)} of that beside other findings" if gain < SAID * saving else ""
    known = context.get(step_replay) is not None
    yield replace(finding, saving_ns=gain, evidence=f"{finding.evidence}{less}", replayed=known)


def _gained(context: Context, finding: Finding, others: Change) -> int:
    """What operators and launches that take no time save (ns) beside other changes; idle time where that is unknown."""
    faster = replayed(context, finding, others._replace(faster=context.get(operators_and_launches)))
    return faster.saving_ns - (replayed(context, finding, others).saving_ns if faster.replayed else 0)


def _waits_with_gaps(context: Context) -> Flags:
    """Tells which of parts.Calls wait for the GPU so that it runs dry: what findings of synchronisation count."""
    gaps, pieces = context.get(idle_gaps), context.get(idle_pieces)
    blocking = gaps.blocking[unique_values(pieces.gap[pieces.cause == IDLE_CAUSES.index("synchronisation")])]
    waits = np.zeros(len(context.get(calls)), np.bool_)
    waits[blocking[blocking >= 0]] = True
    return waits


def _gaps_of(context: Context, causes: Sequence[str]) -> tuple[IdleGaps, Ints]:
    """Returns all gaps, and the places of those that have any piece of these causes."""
    pieces = context.get(idle_pieces)
    numbers = [IDLE_CAUSES.index(cause) for cause in causes]
    return context.get(idle_gaps), unique_values(pieces.gap[np.isin(pieces.cause, numbers)])


_NO_READ = (
    "Do not read results of the GPU in the loop (.item(), .cpu(), print, a condition on a tensor, nonzero): collect "
    "them on the GPU and read them every so many steps, or copy with non_blocking=True and wait later."
)
_NO_WAIT = (
    "Take {synchronize}, and waits for streams and events, out of the loop: work on the GPU keeps its order without "
    "them. To measure times use {event}, and read them every so many steps."
)


def _no_wait(context: Context) -> str:
    words = vendor_words(context)
    return _NO_WAIT.format(synchronize=words.synchronize, event=words.event)


def _only_waits(context: Context, shown: str | None) -> bool:
    """Tells whether a synchronisation is a call outside of operators, in a program that has some."""
    return shown is not None and BLOCKING.match(shown) is not None and len(context.trace.table("cpu_op")) > 0


def synchronisation(context: Context) -> Iterator[Finding]:
    """Calls that wait for the GPU: it runs dry while the host comes back, one finding per operator that waits."""
    gaps, called = context.get(idle_gaps), context.get(calls)
    pieces, found = context.get(idle_pieces), context.get(time_causes)
    sync = pieces.cause == IDLE_CAUSES.index("synchronisation")
    for part in _largest(context, "synchronisation", 0):
        own = unique_values(pieces.gap[sync & (pieces.name == part.name)])
        op = heaviest_op(context, gaps.op[own], gaps.length[own])
        blocking = gaps.blocking[own]
        blocking = blocking[blocking >= 0]
        call = context.trace.strings[int(called.name[blocking[0]])] if len(blocking) else what(context, part)
        shown = what(context, part)
        frame = function_at(
            context, called.thread[blocking], (called.start[blocking] + called.end[blocking]) // 2, blocking * 0 + 1
        )
        time = part.time_ns // len(found.devices)
        finding = Finding(
            name="synchronisation",
            title=f"{shown} waits for the GPU, which then waits for the host",
            saving_ns=time,
            advice=_no_wait(context) if _only_waits(context, shown) else _NO_READ,
            evidence=f"{call} {times(max(len(blocking), 1), 'time')}{called_in(context, frame)}, the GPU idle for "
            f"{ms(time)} after it",
            causes=("synchronisation",),
            frame=frame,
            op=op if op_name(context, op) == shown else -1,
        )
        waits = np.zeros(len(called), np.bool_)
        waits[blocking] = True
        yield replayed(context, finding, Change(unwaited=waits))


def _cause(cause: str, name: str, title: str, advice: str, *more: str) -> Callable[[Context], Iterator[Finding]]:
    """Returns the finder of one cause, or of several together."""

    def finder(context: Context) -> Iterator[Finding]:
        found = context.get(time_causes)
        saving = found.total(cause, *more)
        if not saving:
            return
        gaps, chosen = _gaps_of(context, [each for each in (cause, *more) if each not in GPU_CAUSES])
        top = next(iter(_largest(context, cause, 0)), None)
        mostly = f", {ms(top.time_ns / len(found.devices))} of it in {what(context, top)}" if top else ""
        yield Finding(
            name=name,
            title=title,
            saving_ns=saving,
            advice=advice,
            evidence=f"{times(len(chosen), 'gap')}, {ms(saving)} idle{mostly}",
            causes=(cause, *more),
            op=heaviest_op(context, gaps.op[chosen], gaps.length[chosen]),
            frame=top.frame if top else -1,
        )

    return finder


_waiting_for_data = _cause(
    "data_loading",
    "data_loading",
    "The GPU waits for the next batch",
    "Load in parallel and ahead: DataLoader with more num_workers, persistent_workers, prefetch_factor and "
    "pin_memory; move decoding and augmentation to the workers or the GPU.",
)


def data_loading(context: Context) -> Iterator[Finding]:
    """GPU idle while the host waits for the next batch, or makes it."""
    for finding in _waiting_for_data(context):
        names = [context.trace.strings[number] for number in np.flatnonzero(context.get(data_loading_names)).tolist()]
        single = [name for name in names if "_SingleProcessDataLoaderIter" in name]
        if single and len(single) == len(names):
            evidence = f"{finding.evidence}; batches are made in the training process itself (num_workers=0)"
            yield replace(finding, evidence=evidence)
        else:
            yield finding


def kernel_gaps(context: Context) -> Iterator[Finding]:
    """Short gaps between kernels that were launched ahead."""
    for finding in _pausing(context):
        yield replace(finding, advice=context.get(gpu_abilities).shorter_pauses())


waiting_for_ranks = _cause(
    "host_communication",
    "communication_on_the_host",
    "The GPU waits for a collective of the host",
    COLLECTIVES_OF_THE_HOST,
)
_allocating = _cause(
    "allocation",
    "allocation",
    "The GPU waits while memory is allocated or released",
    "",
)


def allocation(context: Context) -> Iterator[Finding]:
    """GPU idle while the runtime allocates or releases memory."""
    words = vendor_words(context)
    ways = [*filter(None, [words.allocator]), f"no {words.empty_cache} in the loop", "less peak memory"]
    advice = f"Keep the allocator from going back to {words.runtime}: {', '.join(ways)}; allocate pinned buffers once."
    for finding in _allocating(context):
        yield replayed(context, replace(finding, advice=advice), Change(calls=context.get(allocating_calls)))


_pausing = _cause("kernel_gaps", "kernel_gaps", "The GPU pauses between short kernels that were launched ahead", "")
queued = _cause(
    "queued",
    "queued",
    "Launched work waits in the GPU's queue",
    "View idle_gaps with cause=queued shows before which activity. Work waits there for an event of another stream "
    "(record cuda_sync), for another GPU, for the first launch of a graph, or for the profiler.",
)


def unknown(context: Context) -> Iterator[Finding]:
    """GPU idle, and the trace does not tell why, or not what the host did then."""
    found = context.get(time_causes)
    number = CAUSES.index("unknown")
    for title, reasons in (
        ("The GPU waits for the host, and the trace does not tell what it does", (NO_STACKS, NO_SAMPLE, NO_EVENT)),
        ("The GPU is idle, and the trace does not tell why", (NO_LAUNCH, NO_CALLS)),
        ("The trace does not show what the GPU did at first", (NOTHING_EARLIER,)),
    ):
        parts = [part for part in found.details if part.cause == number and part.reason in reasons]
        if parts:
            time = sum(part.time_ns for part in parts) // len(found.devices)
            yield Finding(
                name="unknown_idle",
                title=title,
                saving_ns=time,
                advice="; ".join(dict.fromkeys(REASONS[part.reason] for part in parts)) + ".",
                evidence=f"{ms(time)} of the GPU's idle time; how much of it can be saved is not known",
                causes=("unknown",),
            )
