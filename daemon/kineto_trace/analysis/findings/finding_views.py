"""Findings: their rules, what they leave out, and the view of them.

Lists what to change first: each finding with the time it would save, and the evidence.

Theory of operation
    A finding is a cause of lost time that a person can do something about. Its saving is time (ns, over the measured
    steps) that view time_causes assigns to the causes that it would reduce, and never more than that. For kernels it is
    a part of their time, stated with the finding, since the time of a better kernel is not in the trace. Savings of
    different causes add up; those of kernels may overlap with each other.

    If something can be left out of the steps (a wait, a function, an allocation), the steps are replayed without it
    (analysis/step_replay.py), which gives its saving. Savings are shares of the time that the steps take without being
    recorded.

    Each finder yields findings, or none. Findings that save less than LEAST of the steps' time are left out, and so is
    everything in warm-up steps. A process with several GPUs is judged by their mean. Time that can perhaps not be saved
    at all comes last.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kineto_trace.analysis.cause_views import CAUSES, GPU_CAUSES, gpu_causes, time_causes
from kineto_trace.analysis.distributed.what_if_views import communication_split
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.common_findings import (
    SMALL_COLLECTIVES,
    longest_names,
    measured_times,
    operators_and_launches,
    recording_note,
    small_collectives,
    with_replay,
    without_recording,
)
from kineto_trace.analysis.findings.gpu_work_findings import (
    COMPUTING,
    double_precision,
    exposed_pinned_copies,
    is_part_of_one,
    layout_changes,
    non_training_findings,
    optimizer_kernels,
    small_kernels_of_functions,
    unbenchmarked_convolutions,
)
from kineto_trace.analysis.findings.idle_findings import (
    allocation,
    annotations,
    data_loading,
    host_bound,
    host_functions,
    host_without_cores,
    kernel_gaps,
    queued,
    synchronisation,
    unknown,
    waiting_for_ranks,
    workers_without_cores,
)
from kineto_trace.analysis.findings.kernel_findings import (
    compute_bound,
    elementwise,
    latency_bound,
    memory_bound,
    no_tensor_cores,
    small_grids,
    throttled_clock,
)
from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.analysis.host_findings.host_finding_rules import USES_OF_TORCH, host_findings
from kineto_trace.analysis.host_findings.standing import standing
from kineto_trace.analysis.host_findings.threads import compiled_pieces, neighbours_note, total_ns
from kineto_trace.analysis.idle_gaps import QUEUED, idle_gaps
from kineto_trace.analysis.idle_pieces import IDLE_CAUSES, PAGEABLE, gil_wait_time, idle_pieces
from kineto_trace.analysis.step_replay import ReplayChange, step_replay
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import AnyArray, Ints
from kineto_trace.base.quantities import format_duration, share, times
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import DOUBTED
from kineto_trace.structure.activity_links import KERNEL, MEMCPY, gpu, vendor_words
from kineto_trace.structure.call_forests import SEPARATOR, call_stacks
from kineto_trace.structure.library_calls import code_place
from kineto_trace.structure.python_frames import python_frames
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

_EVIDENCE = {
    "cpu_op": "the trace has no operators",
    "python_function": "the trace has no Python functions",
}  # by activity type
HOST_BOUND, GRAPH_BREAKS, GIL = "host_bound", "graph_breaks", "gil"
PARTS_OF_LAUNCHES = (SMALL_COLLECTIVES, GRAPH_BREAKS, GIL, "host_without_cores")
COMPILING = ("recompilation", "compiled_in_the_loop")
BY_SAMPLES = 1.5  # times the time of compiling by few samples: compiling may take this long
LEAST = 0.005  # of the time of the measured steps
MIN_STEPS = 3  # for an uncertainty
NORMAL_95 = 1.96  # standard deviations
LEAST_NS = 500_000  # drivers' slices take 1 to 6 ms
LEAST_SLICES, LEAST_NAMES = 10, 3
ALIKE = 0.15  # of the length: slices differ by less
MOSTLY = 0.6  # of the candidates must have about the same length


@dataclass(frozen=True, slots=True)
class TraceFindings:
    """The findings of a trace, the largest saving first.

    window_ns: the time of the measured steps.
    steps: their number; 0 if the trace has none.
    left_out: a note on steps that were left out.
    recording: a note on the cost of recording.
    neighbours: a note on other programs that take the CPUs.
    """

    findings: tuple[Finding, ...]
    window_ns: int
    steps: int
    left_out: str | None
    recording: str | None
    neighbours: str | None = None


@view(
    "findings",
    columns(
        ("place", "int", "", "position of the finding; 1 saves the most"),
        ("finding", "text", "", "short name of this kind of finding"),
        ("title", "text", "", "what is wrong"),
        ("saving_us", "float", "us", "time that the change would save, over all measured steps"),
        ("saving_pct", "float", "%", "share of the time of all measured steps"),
        ("saving_per_step_us", "float", "us", "saving_us per training step"),
        (
            "uncertainty_pct",
            "float",
            "%",
            "95 % confidence interval of saving_pct (plus or minus), from how much its causes vary between steps; "
            "missing with fewer than 3 steps",
        ),
        ("advice", "text", "", "what to do"),
        ("evidence", "text", "", "what was observed, and what the estimate of the saving assumes"),
        ("op", "text", "", "operator with most of this time"),
        ("call_stack", "text", "", "Python frames around that operator, innermost first"),
        ("kernels", "texts", "", "kernels or copies that take most of this time"),
        ("where", "text", "", "function, file and line of the program's own code, for findings about the host"),
        ("guess", "bool", "", "whether the possible saving is unknown; such findings come last"),
    ),
)
def findings_view(context: Context, *, top: int = 10) -> Answer:
    """What to change first, with the time that each change would save and the evidence.

    The view looks for GPU idle time by cause (view time_causes; Python functions, annotations and operators by name),
    threads that are short of CPU, communication and copies that no computation hides, other programs that take turns on
    the GPU, models that run without a backward pass in a training program, layout changes of images, matrix products
    without tensor cores, double precision, elementwise kernels that could be fused, many small kernels of one function
    or of the optimizer, and kernels that leave part of the GPU idle. With hardware counters (kinetoctl trace
    --counters), which take precedence over estimates, it also finds kernels that are bound by memory, tensor cores or
    latency, and clocks that are held down. The savings of functions, waits, allocations and small kernels come from
    replaying the steps on the host and the GPU without them; other savings never exceed the time that view time_causes
    assigns to their cause. All are shares of the time that the steps take when they are not recorded, if that is known.
    The advice suits the GPUs of the trace. Atypical first steps, and findings that would save less than half a per
    cent, are left out; findings whose possible saving is unknown come last. Without a GPU, the view looks for time that
    the host loses: in the program's own functions, in data loading, in the optimizer, and in threads that compete for
    the GIL or the CPUs. If nothing moves, the view only shows where the program waits.

    Options:
    - top: the maximum number of findings.
    """
    found = context.get(findings)
    chosen = found.findings[: max(top, 0)]
    ops, strings = context.trace.table("cpu_op"), context.trace.strings
    notes = [note for note in context.trace.notes if note.startswith(DOUBTED)]
    notes += [] if context.get(idle_gaps).windows else [NO_GPU]
    if not found.findings:
        notes.append(f"no finding would save {100 * LEAST:g} % or more of the steps' time")
        notes += [
            f"{missing}, so the causes that they would show cannot be found: record {kind}"
            for kind, missing in _EVIDENCE.items()
            if not len(context.trace.table(kind))
        ]
    notes += [note for note in (found.left_out, found.recording, found.neighbours) if note]
    if len(chosen) < len(found.findings):
        notes.append(f"{len(found.findings) - len(chosen)} more: kinetoctl report --view findings")
    if len(chosen) > 1:
        notes.append("the savings overlap, so do not add them up")
    return Answer(
        {
            "place": list(range(1, len(chosen) + 1)),
            "finding": [finding.name for finding in chosen],
            "title": [finding.title for finding in chosen],
            "saving_us": [finding.saving_ns / 1e3 or None for finding in chosen],
            "saving_pct": [100 * finding.saving_ns / max(found.window_ns, 1) or None for finding in chosen],
            "saving_per_step_us": [
                finding.saving_ns / 1e3 / found.steps if found.steps else None for finding in chosen
            ],
            "uncertainty_pct": [uncertainty(context, finding) for finding in chosen],
            "advice": [finding.advice for finding in chosen],
            "evidence": [finding.evidence for finding in chosen],
            "op": [strings[int(ops["name"][finding.op])] if finding.op >= 0 else None for finding in chosen],
            "call_stack": [stack_of(context, finding) for finding in chosen],
            "kernels": [list(finding.kernels) for finding in chosen],
            "where": [finding.where or None for finding in chosen],
            "guess": [finding.guess for finding in chosen],
        },
        notes,
    )


# Detects another program that takes turns on a GPU, by the slices of time that this program misses.
# Programs that share a GPU without MPS or MIG run by turns, each for a slice of time that the driver has set (some 2
# ms). A missed slice appears as a kernel that takes a slice longer than others of its name and grid, or as launched
# work that waits for a slice while the device does nothing. Both have nearly the same length, whatever the kernel,
# which distinguishes them from kernels with more to do and from waits for events. Matrix products prove nothing, since
# some have the same grid whatever their size; they are assumed to lose as large a part of their time as the other
# kernels.
def time_slices(context: Context) -> Iterator[Finding]:
    """Yields a finding on time slices in which another program had the GPU."""
    activity, took = context.get(gpu), context.get(measured_times)
    products = context.get(gpu_causes) == GPU_CAUSES.index("matrix_products")
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication & ~products & (took > 0))
    kernels = context.trace.table("kernel")
    grid = [kernels[name][activity.row[rows]] for name in ("grid_x", "grid_y", "grid_z")]
    excess = _excess([activity.name[rows], *grid], (activity.end - activity.start)[rows])
    late, excess = rows[excess >= LEAST_NS], excess[excess >= LEAST_NS]
    gaps = context.get(idle_gaps)
    waits = np.flatnonzero((gaps.cause == QUEUED) & (gaps.length >= LEAST_NS))
    lost = np.concatenate([excess, gaps.length[waits]])
    if len(lost) < LEAST_SLICES or len(late) + len(waits) < LEAST_SLICES:
        return
    slice_ns = float(np.median(lost))
    alike = np.abs(lost - slice_ns) <= ALIKE * slice_ns
    names = unique_values(activity.name[np.concatenate([late, gaps.after[waits]])[alike]])
    if np.count_nonzero(alike) < max(LEAST_SLICES, MOSTLY * len(lost)) or len(names) < LEAST_NAMES:
        return
    chosen = np.zeros(len(activity), np.bool_)
    chosen[late] = True
    devices = max(len(context.get(time_causes).devices), 1)
    # matrix products, whose durations prove nothing, lose as much of their time as other kernels
    works, others = int(took[activity.kind == KERNEL].sum()), int(took[rows].sum())
    of_kernels = np.arange(len(lost)) < len(late)
    saving = int(lost[alike & of_kernels].sum() * (works / max(others, 1)) + lost[alike & ~of_kernels].sum()) // devices
    words = vendor_words(context)
    yield Finding(
        name="gpu_shared",
        title="Another program takes turns with this one on the GPU",
        saving_ns=saving,
        advice=f"Find the other process (kinetoctl top and {words.status} list the processes on each GPU), and run it "
        f"on another GPU or at another time. Where programs must share a GPU, {words.sharing}.",
        evidence=f"{times(int(alike.sum()), 'time slice')} of {format_duration(slice_ns)} were lost: "
        f"{times(len(late), 'kernel')} took that much longer than similar ones, and launched work had to wait that "
        f"long {times(len(waits), 'time')}; if matrix products lost as large a share of their time, the total is "
        f"{format_duration(saving)}",
        causes=(*COMPUTING, "queued", "kernel_gaps", "launch_latency"),
        kernels=longest_names(context, chosen),
    )


def _excess(keys: list[AnyArray], length: Ints) -> Ints:
    """Returns how much longer each kernel took than the median one with these keys."""
    found = group(keys)
    order = np.lexsort((length, found.number))
    sizes = found.sizes()
    first = np.cumsum(sizes) - sizes
    median = length[order][first + sizes // 2]
    longer: Ints = length - median[found.number]
    return longer


def findings(context: Context) -> TraceFindings:
    """Returns all findings of one trace."""
    found = context.get(time_causes)
    window = found.steps.measured_ns
    if stands := tuple(standing(context)):
        return TraceFindings(stands, window, found.steps.steps, None, None)
    every = [_capped(context, finding) for finder in FINDERS for finding in finder(context)]
    every = _without_parts(finding for finding in every if not is_part_of_one(context, finding))
    every = [without_recording(context, finding) for finding in _without_compiling(context, every)]
    every = [finding for finding in every if finding.saving_ns > LEAST * window]
    every.sort(key=lambda finding: (finding.guess, -finding.saving_ns))
    notes = found.steps.note(), recording_note(context), neighbours_note(context)
    return TraceFindings(tuple(every), window, found.steps.steps, *notes)


def uncertainty(context: Context, finding: Finding) -> float | None:
    """Returns the 95 % interval of a finding's share of the time (plus or minus, in %), by its spread over the steps.

    At most 100, since no share can be further off. None with fewer than three steps, or if the finding names no causes.
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
    """Returns the findings, where time in launches excludes what another finding names the cause of."""
    every = list(findings)
    part = sum(finding.saving_ns for finding in every if finding.name in PARTS_OF_LAUNCHES)
    found = []
    for finding in every:
        less = min(part, finding.saving_ns) if finding.name == HOST_BOUND else 0
        part -= less
        evidence = f"{finding.evidence}; {format_duration(less)} of it is counted in another finding" if less else ""
        found.append(replace(finding, saving_ns=finding.saving_ns - less, evidence=evidence) if less else finding)
    return found


def _without_compiling(context: Context, every: Sequence[Finding]) -> list[Finding]:
    """Returns the findings without idle time in functions that, by another finding, compile in that time.

    Samples show the time of compiling, so the GPU's idle time in that function replaces it, if it is about as long.
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
    """Yields collectives on the GPU that no computation hides: transfers (at most) and waiting for other ranks
    apart.
    """
    activity = context.get(gpu)
    if not activity.communication.any():
        return
    steps = context.get(time_causes).steps
    split = communication_split(context, union(steps.start[~steps.left_out], steps.end[~steps.left_out]))
    seen = (
        f"{format_duration(split.total)} of collectives, {share(split.exposed, split.total)} of it while the GPU "
        "computes nothing"
    )
    kernels = longest_names(context, activity.communication)
    moving = split.transfer + split.unknown
    alone = format_duration(split.unknown)
    unknown = f" ({alone} without similar collectives to compare with)" if split.unknown else ""
    yield Finding(
        name="exposed_communication",
        title="Transfers between ranks are not hidden behind computation",
        saving_ns=split.transfer_gain,
        advice="Overlap them: use larger or better ordered gradient buckets, gradient accumulation with no_sync(), "
        "prefetching of sharded parameters, or lower precision for gradients. The trace of one rank gives only an "
        "upper bound of a transfer (the shortest collective of its kind and size); the view rank_what_if over the "
        "traces of all ranks shows what the job would gain.",
        evidence=f"{seen}; at most {format_duration(moving)} of that is "
        f"transfer{unknown}{_limit(split.transfer_gain, moving)}",
        causes=("communication",),
        kernels=kernels,
    )
    yield Finding(
        name="waiting_in_collectives",
        title="The GPU waits in collectives for another rank",
        saving_ns=split.waiting_gain,
        advice="Find the slow rank with the view rank_what_if over the traces of all ranks, which also shows what the "
        "job would gain if it were as fast as the others. Larger buckets do not help: another rank arrives late, or "
        "the ranks have unequal work.",
        evidence=f"{seen}; at least {format_duration(split.waiting)} of that is waiting (time beyond the shortest "
        f"collective of the same kind and size); the longest wait took {format_duration(split.longest)}"
        f"{_limit(split.waiting_gain, split.waiting)}",
        causes=("communication",),
        kernels=kernels,
    )


def _limit(gain: int, time: int) -> str:
    """Returns a text that less can be gained than this time, if so."""
    if gain >= 0.9 * time:
        return ""
    return (
        f"; at most {format_duration(gain)} can be saved: the rest did not delay this rank, or its host would not "
        "have launched work any sooner"
    )


def exposed_pageable_copies(context: Context) -> Iterator[Finding]:
    """Yields unhidden copies from or to memory that is not pinned, and the host's time in their calls."""
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
    idle = "; the GPU is idle for another"
    in_calls = staging - released
    calls = f"{idle} {format_duration(in_calls)} while the host makes these copies" if in_calls > 0 else ""
    if released:
        calls += (
            f"{idle} {format_duration(released)} while the host frees the memory of batches that it has copied (with "
            "pin_memory=True, a thread of the DataLoader does that)"
        )
    yield Finding(
        name="pageable_copies",
        title="Copies from or to pageable memory keep the GPU waiting",
        saving_ns=saving,
        advice="Pin host memory (DataLoader(pin_memory=True), tensor.pin_memory()) and copy with non_blocking=True.",
        evidence=f"{times(int(np.count_nonzero(pageable)), 'copy', 'copies')} taking {format_duration(took)}, "
        f"{format_duration(saving - staging)} of that while no kernel runs{calls}",
        causes=("pageable_copies", "staging"),
        kernels=longest_names(context, pageable),
    )


def host_side_findings(context: Context) -> Iterator[Finding]:
    """Yields what the host loses time on. With a GPU only the use of torch: view time_causes explains the idle time."""
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
    """Returns waits for the GIL with the saving by a replay in which the host does not wait while the GPU is idle.

    The replay also leaves out the waits of autograd's thread, which are known one by one, whatever the GPU does.
    """
    pieces, elsewhere = context.get(idle_pieces), context.get(gil_wait_time)
    idle = pieces.cause == IDLE_CAUSES.index("gil")
    waits = union(
        np.concatenate([pieces.start[idle], elsewhere.start]), np.concatenate([pieces.end[idle], elsewhere.end])
    )
    return with_replay(context, found, ReplayChange(faster=waits))


def _launches_between_pieces(context: Context, found: Finding) -> Finding:
    """Returns graph breaks with the time in which the GPU waits for the host to launch: one piece would launch
    ahead.
    """
    whole = with_replay(context, found, ReplayChange(faster=context.get(operators_and_launches)))
    saving = int(whole.saving_ns * (1 - 1 / compiled_pieces(context))) if whole.replayed else 0
    return found if saving <= found.saving_ns else replace(whole, saving_ns=saving)


def stack_of(context: Context, finding: Finding) -> str | None:
    """Returns the Python frames around what shows a finding best, innermost first; None if there are none."""
    if finding.frame >= 0:
        return SEPARATOR.join(context.trace.strings[name] for name in context.get(python_frames).stack(finding.frame))
    stacks = context.get(call_stacks)
    return stacks.text(context.trace, int(stacks.of_op[finding.op])) if finding.op >= 0 else None


FINDERS: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    non_training_findings,
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
    unbenchmarked_convolutions,
    unknown,
    host_side_findings,
)
