"""What to change first: each finding with the time that it would give, and the evidence.

Theory of operation
    A finding is a cause of lost time that a person can do something about. Its saving is time (ns, over the measured
    steps) that view time_causes gives to the causes that it would take away, and never more than these have. For
    kernels it is a part of their time that is stated with the finding, since what another kernel would take is not in
    the trace. Savings of different causes add up; those of kernels may overlap with each other.

    What can be left out of the steps (a wait, a function, an allocation) is left out, and the steps are run again
    (analysis/replay): that is its saving. Savings are shares of the time that the steps take without being recorded.

    Each finder gives findings, or none. What saves less than LEAST of the steps' time is left out, and so is all that
    happens in the steps of the warm-up. A process with several GPUs is judged by their mean. What may not be saved at
    all comes last.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kineto_trace.analysis.causes.time_causes import CAUSES, time_causes
from kineto_trace.analysis.distributed.communication_split import communication_split
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.aside_functions import covered, functions_aside
from kineto_trace.analysis.findings.collective_findings import SMALL_COLLECTIVES, small_collectives
from kineto_trace.analysis.findings.counter_findings import compute_bound, latency_bound, memory_bound, throttled_clock
from kineto_trace.analysis.findings.gpu_work_findings import (
    double_precision,
    exposed_pinned_copies,
    layout_changes,
    unmeasured_convolutions,
)
from kineto_trace.analysis.findings.idle_findings import (
    allocation,
    annotations,
    data_loading,
    host_bound,
    host_functions,
    kernel_gaps,
    queued,
    synchronisation,
    unknown,
    waiting_for_ranks,
)
from kineto_trace.analysis.findings.kernel_findings import elementwise, no_tensor_cores, small_grids
from kineto_trace.analysis.findings.measured_work import longest, measured_times
from kineto_trace.analysis.findings.processor_findings import host_without_cores, workers_without_cores
from kineto_trace.analysis.findings.replayed_savings import (
    operators_and_launches,
    recording_note,
    replayed,
    without_recording,
)
from kineto_trace.analysis.findings.small_kernel_findings import optimizer_kernels, small_kernels_of_functions
from kineto_trace.analysis.findings.time_slices import time_slices
from kineto_trace.analysis.host_findings.host_figures import total_ns
from kineto_trace.analysis.host_findings.host_finding_rules import USES_OF_TORCH, host_findings
from kineto_trace.analysis.host_findings.torch_use import compiled_pieces
from kineto_trace.analysis.idle.gil_waits import gil_wait_time
from kineto_trace.analysis.idle.idle_pieces import IDLE_CAUSES, PAGEABLE, idle_pieces
from kineto_trace.analysis.replay.step_replay import Change, step_replay
from kineto_trace.arrays.intervals import union
from kineto_trace.base.quantities import ms, share, times
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import MEMCPY, gpu
from kineto_trace.structure.call_stacks import SEPARATOR, call_stacks
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.structure.python.python_frames import python_frames

HOST_BOUND, GRAPH_BREAKS, GIL = "host_bound", "graph_breaks", "gil"
PARTS_OF_LAUNCHES = (SMALL_COLLECTIVES, GRAPH_BREAKS, GIL, "host_without_cores")
COMPILING = ("recompilation", "compiled_in_the_loop")
BY_SAMPLES = 1.5  # times what few samples say of compiling may be what it takes
LEAST = 0.005  # of the time of the measured steps
MIN_STEPS = 3  # for an uncertainty
NORMAL_95 = 1.96  # deviations


@dataclass(frozen=True, slots=True)
class TraceFindings:
    """The findings of a trace, the largest saving first.

    window_ns: the time of the measured steps. steps: their number; 0: the trace has none. left_out: what is to be said
    of steps that were left out. recording: what is to be said of the cost of recording.
    """

    findings: tuple[Finding, ...]
    window_ns: int
    steps: int
    left_out: str | None
    recording: str | None


def findings(context: Context) -> TraceFindings:
    """Returns all findings of one trace."""
    found = context.get(time_causes)
    window = found.steps.measured_ns
    every = [_capped(context, finding) for finder in FINDERS for finding in finder(context)]
    every = _without_parts(finding for finding in every if not covered(context, finding))
    every = [without_recording(context, finding) for finding in _without_compiling(context, every)]
    every = [finding for finding in every if finding.saving_ns > LEAST * window]
    every.sort(key=lambda finding: (finding.guess, -finding.saving_ns))
    return TraceFindings(tuple(every), window, found.steps.steps, found.steps.note(), recording_note(context))


def uncertainty(context: Context, finding: Finding) -> float | None:
    """Returns the 95 % interval of a finding's share of the time (plus or minus, in %), by its spread over the steps.

    At most 100, since a share is no further off. None with fewer than three steps, or if the finding names no causes.
    """
    found = context.get(time_causes)
    causes = finding.causes
    total = found.total(*causes)
    if found.steps.steps < MIN_STEPS or not total:
        return None
    numbers = [CAUSES.index(cause) for cause in causes]
    of_step = found.time_ns[:, numbers][:, :, ~found.steps.left_out].sum(axis=(0, 1)) / len(found.devices)
    error = NORMAL_95 * float(of_step.std(ddof=1)) * float(np.sqrt(found.steps.steps))
    return min(100 * error * finding.saving_ns / total / found.steps.measured_ns, 100.0)


def _without_parts(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings, the host's time in launches without what another one names the cause of."""
    every = list(findings)
    part = sum(finding.saving_ns for finding in every if finding.name in PARTS_OF_LAUNCHES)
    found = []
    for finding in every:
        less = min(part, finding.saving_ns) if finding.name == HOST_BOUND else 0
        part -= less
        evidence = f"{finding.evidence}; {ms(less)} of it is in another finding" if less else ""
        found.append(replace(finding, saving_ns=finding.saving_ns - less, evidence=evidence) if less else finding)
    return found


def _without_compiling(context: Context, every: Sequence[Finding]) -> list[Finding]:
    """Returns the findings but those of idle time in functions that another one says to compile meanwhile.

    Samples tell the time of compiling, so it is as long as the GPU is idle in that function, if that is about as much.
    """
    names, strings = context.trace.table("python_function")["name"], context.trace.strings
    compiling = {finding.where: finding.saving_ns for finding in every if finding.name in COMPILING and finding.where}
    kept, idle = [], dict[str, int]()
    for finding in every:
        where = str(code_place(strings[int(names[finding.frame])])) if finding.frame >= 0 and compiling else ""
        if finding.saving_ns > BY_SAMPLES * compiling.get(where, 0):
            kept.append(finding)
        else:
            idle[where] = max(idle.get(where, 0), finding.saving_ns)
    return [
        replace(finding, saving_ns=max(finding.saving_ns, idle.get(finding.where, 0)))
        if finding.name in COMPILING
        else finding
        for finding in kept
    ]


def _capped(context: Context, finding: Finding) -> Finding:
    """Returns the finding with a saving of at most the time of its causes."""
    causes = finding.causes
    if not causes:
        return finding
    most = context.get(time_causes).total(*causes)
    return finding if finding.saving_ns <= most else replace(finding, saving_ns=most)


def exposed_communication(context: Context) -> Iterator[Finding]:
    """Collectives on the GPU that no computation hides: transfers at most, and waiting for other ranks apart."""
    activity = context.get(gpu)
    if not activity.communication.any():
        return
    steps = context.get(time_causes).steps
    split = communication_split(context, union(steps.start[~steps.left_out], steps.end[~steps.left_out]))
    seen = f"{ms(split.total)} of collectives, {share(split.exposed, split.total)} of it while the GPU computes nothing"
    kernels = longest(context, activity.communication)
    moving = split.transfer + split.unknown
    unknown = f", {ms(split.unknown)} of it without others alike to compare with" if split.unknown else ""
    yield Finding(
        name="exposed_communication",
        title="Transfers between ranks are not hidden behind computation",
        saving_ns=split.transfer_gain,
        advice="Overlap them: larger or better ordered gradient buckets, gradient accumulation with no_sync(), "
        "prefetching of sharded parameters, reduced precision for gradients. One rank's trace bounds a transfer only "
        "by the shortest collective of its kind and size: the view rank_what_if over the traces of all ranks says what "
        "the job would gain.",
        evidence=f"{seen}; of that at most {ms(moving)} is transfer{unknown}{_limit(split.transfer_gain, moving)}",
        causes=("communication",),
        kernels=kernels,
    )
    yield Finding(
        name="waiting_in_collectives",
        title="The GPU waits in collectives for another rank",
        saving_ns=split.waiting_gain,
        advice="Larger buckets do not help: another rank comes late, or the ranks have unequal work. The view "
        "rank_what_if over the traces of all ranks names it, and says what the job would gain if it were as fast as "
        "the others.",
        evidence=f"{seen}; of that at least {ms(split.waiting)} is beyond the shortest collective of the same kind "
        f"and size, the longest wait {ms(split.longest)}{_limit(split.waiting_gain, split.waiting)}",
        causes=("communication",),
        kernels=kernels,
    )


def _limit(gain: int, time: int) -> str:
    """Says that less can be gained than this time, if it is so."""
    if gain >= 0.9 * time:
        return ""
    return f"; no more than {ms(gain)} can be gained: the rest did not hold the rank up, or its host is no faster"


def exposed_pageable_copies(context: Context) -> Iterator[Finding]:
    """Copies from or to memory that is not pinned, which no computation hides, and the host in their calls."""
    activity, found = context.get(gpu), context.get(time_causes)
    pageable = (activity.kind == MEMCPY) & matches(context.trace.strings, PAGEABLE)[activity.name]
    pageable &= context.get(measured_times) > 0
    saving, staging = found.total("pageable_copies", "staging"), found.total("staging")
    if not saving:
        return
    took = int(context.get(measured_times)[pageable].sum()) // len(found.devices)
    number = CAUSES.index("staging")
    released = sum(part.time_ns for part in found.details if part.cause == number and part.frame >= 0)
    released //= len(found.devices)
    idle = "more the GPU is idle while the host"
    calls = f"; {ms(staging - released)} {idle} is in their calls" if staging > released else ""
    if released:
        calls += (
            f"; {ms(released)} {idle} releases the memory of a batch that it has copied, which the DataLoader's own "
            "thread does with pin_memory=True"
        )
    yield Finding(
        name="pageable_copies",
        title="Copies from or to pageable memory keep the GPU waiting",
        saving_ns=saving,
        advice="Pin host memory (DataLoader(pin_memory=True), tensor.pin_memory()) and copy with non_blocking=True.",
        evidence=f"{times(int(np.count_nonzero(pageable)), 'copy', 'copies')}, {ms(took)}, of that "
        f"{ms(saving - staging)} while no kernel runs{calls}",
        causes=("pageable_copies", "staging"),
        kernels=longest(context, pageable),
    )


def on_the_host(context: Context) -> Iterator[Finding]:
    """What the host loses time on. With a GPU only how torch is used: view time_causes explains the idle time."""
    scale = context.get(time_causes).steps.measured_ns / total_ns(context)
    causes = IDLE_CAUSES if len(context.get(gpu)) else ()
    for found in context.get(host_findings):
        if causes and found.name == GRAPH_BREAKS:
            scaled = replace(found, saving_ns=int(found.saving_ns * scale), causes=causes)
            yield _launches_between_pieces(context, scaled)
        elif causes and found.name == GIL and context.get(step_replay) is not None:
            yield _without_gil_waits(context, found)
        elif not causes or found.name in USES_OF_TORCH:
            yield replace(found, saving_ns=int(found.saving_ns * scale), causes=causes)


def _without_gil_waits(context: Context, found: Finding) -> Finding:
    """Waits for the GIL with what the steps, run again, gain if the host does not wait while the GPU is idle.

    So do they without the waits of autograd's thread, which are known one by one, whatever the GPU does.
    """
    pieces, elsewhere = context.get(idle_pieces), context.get(gil_wait_time)
    idle = pieces.cause == IDLE_CAUSES.index("gil")
    waits = union(
        np.concatenate([pieces.start[idle], elsewhere.start]), np.concatenate([pieces.end[idle], elsewhere.end])
    )
    return replayed(context, found, Change(faster=waits))


def _launches_between_pieces(context: Context, found: Finding) -> Finding:
    """Graph breaks with the time in which the GPU waits for the host to launch: one piece would launch ahead."""
    whole = replayed(context, found, Change(faster=context.get(operators_and_launches)))
    saving = int(whole.saving_ns * (1 - 1 / compiled_pieces(context))) if whole.replayed else 0
    return found if saving <= found.saving_ns else replace(whole, saving_ns=saving)


FINDERS: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    functions_aside,
    host_functions,
    annotations,
    host_bound,
    synchronisation,
    data_loading,
    workers_without_cores,
    host_without_cores,
    time_slices,
    waiting_for_ranks,
    allocation,
    exposed_communication,
    small_collectives,
    exposed_pageable_copies,
    exposed_pinned_copies,
    layout_changes,
    no_tensor_cores,
    double_precision,
    elementwise,
    small_kernels_of_functions,
    optimizer_kernels,
    small_grids,
    memory_bound,
    compute_bound,
    latency_bound,
    throttled_clock,
    kernel_gaps,
    queued,
    unmeasured_convolutions,
    unknown,
    on_the_host,
)


def stack_of(context: Context, finding: Finding) -> str | None:
    """Returns the Python frames around what shows a finding best, innermost first; None if there are none."""
    if finding.frame >= 0:
        return SEPARATOR.join(context.trace.strings[name] for name in context.get(python_frames).stack(finding.frame))
    stacks = context.get(call_stacks)
    return stacks.text(context.trace, int(stacks.of_op[finding.op])) if finding.op >= 0 else None
