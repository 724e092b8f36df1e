"""What the host did in each gap of a GPU: gaps cut into pieces, each with one cause and its evidence.

Theory of operation
    A gap (idle_gaps.py) ends with an activity. From the launching call on, up to the activity's start, the time is that
    of the launch if it is short, otherwise the call itself is slow (host, in that call) and then the queue. Before the
    first activity in the trace the queue explains nothing: work launched before the recording began is not recorded,
    and may run then. Before the call, the host is at work: on the launching thread, or if that has no events, on the
    thread of the steps (the thread of the backward pass waits for it then). At each moment, the first of these that is
    true is the cause:

    data loading (annotation, operator or frame of the DataLoader) · a collective on the host · CUDA allocating or
    releasing memory · a call that waits for the GPU · a wait for the GIL in an operator · an operator or
    call (launch-bound) · a Python function, by what it waited for if it did (sleep, lock, file or network, logging,
    GIL, …) · an annotation · unknown

    In a gap that began while the host waited for the GPU, operators, launches, annotations and unknown time count for
    that synchronisation, since without it they would have run while the GPU was busy; a Python function counts only if
    it takes at least half of the gap and a millisecond. In a gap whose launch is not in the trace, only calls that
    block the host count.

    A function that releases pageable memory after a copy is staging, as is the copy's call.

    Pieces are divided among the functions of recorded Python calls, or of samples; a piece without a sample is like
    others before the same activity (structure/python_frames.py).

Also finds when a thread without Python, such as autograd's, waited for the GIL inside an operator.
    Autograd's thread runs no Python of its own, but takes the GIL to release tensors that Python objects hold, and for
    hooks. Its stack is not sampled, so nothing shows directly that it waits then. Yet autograd itself computes nothing
    between the operators and calls of a node (in evaluate_function) and is done with it in microseconds; and a thread
    that wants the GIL can ask a holder that runs Python for it only once per switch interval, which is 5 ms. So a span
    of that length or longer is such a wait, if all of these hold:

    - the training thread was seen to wait for the GIL, too, and is in the backward at that time;
    - no sample saw Python on the thread, and those that saw it off the CPU saw it wait for a lock;
    - by the thread's CPU time it cannot have run in these spans;
    - other threads held the GIL in so many samples that there is room for all of these waits.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.idle_gaps import (
    ALLOCATING,
    BLOCKING,
    BLOCKING_COPY,
    QUEUED,
    SYNCHRONISATION,
    UNKNOWN,
    IdleGaps,
    idle_gaps,
)
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import ActiveSets, Union, active_sets, ascending, cut, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Ints, Ints32, UInts8
from kineto_trace.kernel_traits.kernel_types import communication_op_names, data_loading_names, matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, OP_TABLES
from kineto_trace.structure.activity_links import (
    EVALUATE_FUNCTION,
    MEMCPY,
    calls,
    gpu,
    ops,
    step_names,
    training_thread,
)
from kineto_trace.structure.library_calls import FrameKind
from kineto_trace.structure.nesting import Nested, nest_tables
from kineto_trace.structure.python_frames import (
    PythonFrames,
    ThreadUse,
    callee_samples,
    frames_in,
    is_native,
    line_samples,
    python_frames,
    thread_use,
    window_ns,
)

IDLE_CAUSES = (
    "data_loading", "host_communication", "allocation", "synchronisation", "operators", "python", "gil", "blocked",
    "lock", "sleep", "input_output", "garbage_collection", "logging", "staging", "annotation", "launch_latency",
    "kernel_gaps", "queued", "unknown",
)  # fmt: skip
(
    LOADING, HOSTCOMMUNICATES, ALLOCATION, SYNC, OPERATORS, PYTHON, _GIL, _BLOCKED, _LOCK, _SLEEP, _IO, _GC, _LOGGING,
    STAGING, ANNOTATION, LAUNCH_LATENCY, KERNEL_GAPS, IN_QUEUE, UNEXPLAINED,
) = range(len(IDLE_CAUSES))  # fmt: skip
_OF_KIND = np.array(  # cause of each kind of Python frame
    [PYTHON, _GIL, _BLOCKED, OPERATORS, _LOCK, _SLEEP, _IO, _GC, _LOGGING, LOADING, HOSTCOMMUNICATES]
)
SLOWEST = 2.0  # bytes per ns, minimum speed of a release: 6 were measured
LEAST_NS = 1_000_000
LEAST_SAMPLES = 3
NORMAL_95 = 1.96  # standard deviations
_TO_DEVICE = re.compile(r"Pageable -> Device|HtoD.{0,200}Pageable", re.IGNORECASE)
_COPIES = re.compile(r".*\.(?:to|cuda|copy_|xpu|npu)")
_NEVER = Union(np.empty(0, np.int64), np.empty(0, np.int64))
# Bits for the activity of a thread: data loading, a collective, CUDA's allocation, a call that waits for the GPU, any
# operator or call, an annotation, a wait for the GIL in an operator.
LOADS, COMMUNICATES, ALLOCATES, WAITS, WORKS, ANNOTATED, WANTS_GIL = (1 << number for number in range(7))
_LAUNCHED = re.compile(r"^(?:nccl|rccl|xccl|hccl):")  # collectives that the host launches but does not run itself
# Why a piece is unknown.
REASONS = (
    "",
    "the launch that ended the gap is not in the trace",
    "the trace has no runtime or driver calls, so it is unknown what launched the work: record these calls",
    "no Python stacks were recorded: use kinetoctl trace --with-stack (torch.profiler: with_stack=True)",
    "no stack sample fell into these gaps: sample more often with kinetoctl trace --stack-hz",
    "the launching thread was in no Python function, operator or call",
    "the trace has no earlier work of this GPU, which may still have run work launched before the recording began",
)
EXPLAINED, NO_LAUNCH, NO_CALLS, NO_STACKS, NO_SAMPLE, NO_EVENT, NOTHING_EARLIER = range(len(REASONS))
PAGEABLE = re.compile(r"Pageable", re.IGNORECASE)  # copies whose call itself reads or writes that memory
LATENCY_NS = 50_000  # from a launching call to the start of its activity on an idle GPU: 5 to 20 us without a profiler
LONG_NS = 1_000_000  # a Python function that runs this long after a synchronisation is a cause of its own
# Causes that would have passed while the GPU was busy, had the host not waited for it.
_HIDDEN_WITHOUT_WAIT = (OPERATORS, ANNOTATION, LAUNCH_LATENCY, UNEXPLAINED, SYNC)
SHORTEST_NS = 4_500_000  # sys.getswitchinterval() is 5 ms
LEAST_STRETCHES = 3
LOCKED = 0.9  # of a thread's samples off the CPU, those that waited for a lock
OFF_CPU = 0.8  # of the spans, by the thread's CPU time


class IdlePieces(NamedTuple):
    """Pieces of gaps, times in Unix ns. Those of idle_pieces are all gaps together, in the order of (device, start).

    gap: place in IdleGaps.
    cause: number into IDLE_CAUSES.
    name: number into Trace.strings of the operator, call, annotation or Python function that shows the cause, or
        NOTHING.
    frame: row of python_function if it is one, or NOTHING.
    reason: number into REASONS.
    """

    gap: Ints
    start: Ints
    end: Ints
    cause: UInts8
    name: Ints
    frame: Ints
    reason: UInts8

    @property
    def length(self) -> Ints:
        """Returns the length of each piece, in ns."""
        return self.end - self.start


class _Work(NamedTuple):
    """Pieces of the time before launches. mask: the activity of the two threads (bits below). thread: the launching
    one.
    """

    gap: Ints
    start: Ints
    end: Ints
    mask: Ints
    thread: Ints

    def take(self, rows: AnyArray) -> "_Work":
        """Returns these pieces."""
        return _Work(*(column[rows] for column in self))


class _Named(NamedTuple):
    """Nested events and their names (numbers into Trace.strings) by place."""

    nested: Nested
    name: Ints32


# When the host released the pageable memory of a batch that it had copied to the GPU.
# `batch = batch.to(device)` gives up the batch on the host once it is copied. If a worker of the DataLoader made it, it
# is shared memory, which the kernel releases page by page: a batch of 100 MB takes 20 ms. With pin_memory=True the
# loader's own thread copies and releases it, ahead; without, the training thread does, with no operator and no call.
# So that is the time from the operator of such a copy to the next operator or call of the training thread, if
# - the DataLoader makes the batches;
# - the thread is in the same call of a function all the time, and runs;
# - it is no longer than a slow release of so many bytes;
# - samples saw that function, at a line that copies, outside of the copying method and of any other call, at least as
# many as correspond to that time.
def pageable_releases(context: Context) -> Union:
    """Returns when the training thread released such memory (Unix ns); empty without all of the evidence."""
    frames = context.get(python_frames)
    if not frames.samples or not context.get(data_loading_names).any():
        return _NEVER
    start, end, size = _after_copies(context)
    place = frames.innermost(np.full(len(start), context.get(training_thread), np.uint32), start)
    stays = (place >= 0) & (place == frames.innermost(np.full(len(end), context.get(training_thread), np.uint32), end))
    chosen = stays & (end - start >= LEAST_NS) & (end - start <= size / SLOWEST)
    name = np.append(frames.name, -1)[place]
    for function in unique_values(name[chosen]).tolist():
        own = chosen & (name == function)
        seen = _outside_of_calls(context, frames, function)
        expected = int((end - start)[own].sum()) / frames.period_ns
        if seen < LEAST_SAMPLES or expected > seen + NORMAL_95 * np.sqrt(seen):
            chosen &= ~own
    return union(start[chosen], end[chosen])


def _after_copies(context: Context) -> tuple[Ints, Ints, Ints]:
    """Returns for copies from pageable memory the end of their operator, the thread's next beginning, and bytes."""
    activity, called, tree, main = context.get(gpu), context.get(calls), context.get(ops), context.get(training_thread)
    names = matches(context.trace.strings, _TO_DEVICE)
    copies = np.flatnonzero((activity.kind == MEMCPY) & (activity.call >= 0) & names[activity.name])
    copies = copies[called.thread[activity.call[copies]] == main]
    of_thread = tree.nested.of_thread(main)
    outermost = of_thread.tree.parent < 0
    mine = called.thread == main
    work = union(
        np.concatenate([of_thread.events.start[outermost], called.start[mine]]),
        np.concatenate([of_thread.tree.end[outermost], called.end[mine]]),
    )
    at = np.searchsorted(work.start, called.start[activity.call[copies]], side="right") - 1
    within, last = np.unique(at, return_index=True)
    known = (within >= 0) & (within + 1 < len(work.start))
    within, rows = within[known], activity.row[copies[last[known]]]
    return work.end[within], work.start[within + 1], context.trace.table("gpu_memcpy")["bytes"][rows].astype(np.int64)


def _outside_of_calls(context: Context, frames: PythonFrames, function: int) -> int:
    """Counts a function's samples at lines that copy, without those in the copying methods and other calls."""
    names = context.trace.table("python_function")["name"]
    lines, callees = line_samples(context.trace), callee_samples(context.trace)
    mine, inner = names[lines.row] == function, names[callees.row] == function
    copying = np.array([_COPIES.fullmatch(name) is not None for name in callees.names], np.bool_)
    at = unique_values(callees.line[inner & copying[callees.name]]) if len(callees.names) else callees.line
    seen = int(lines.busy[mine & np.isin(lines.line, at)].sum())
    return seen - int(callees.counts[inner & np.isin(callees.line, at)].sum())


def idle_pieces(context: Context) -> IdlePieces:
    """Returns the pieces of all gaps."""
    gaps = context.get(idle_gaps)
    called = context.get(calls)
    launched = np.where(gaps.launch >= 0, called.start[gaps.launch], gaps.end) if len(called) else gaps.end
    returned = np.where(gaps.launch >= 0, called.end[gaps.launch], gaps.end) if len(called) else gaps.end
    launched, returned = (np.clip(moment, gaps.start, gaps.end) for moment in (launched, returned))
    parts = [*_launches(context, gaps, launched, returned), *_before_launches(context, gaps, launched)]
    parts = [_by_gap(context, gaps, part) for part in parts]
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.lexsort((joined[1], joined[0]))
    return IdlePieces(*(column[order] for column in joined))


def _parts(gap: Ints, start: Ints, end: Ints, cause: UInts8 | int, name: Ints | None = None) -> IdlePieces:
    lasting = end > start
    count = len(gap)
    full = np.full(count, cause, np.uint8) if isinstance(cause, int) else cause
    names = np.full(count, NOTHING) if name is None else name
    return IdlePieces(
        gap[lasting], start[lasting], end[lasting], full[lasting], names[lasting],
        np.full(count, NOTHING)[lasting], np.zeros(count, np.uint8)[lasting],
    )  # fmt: skip


def _launches(context: Context, gaps: IdleGaps, launched: Ints, returned: Ints) -> list[IdlePieces]:
    """Returns the time of each gap from its launching call on."""
    called, number = context.get(calls), np.arange(len(gaps))
    until_start = gaps.end - launched
    short = until_start <= LATENCY_NS
    latency = np.where(gaps.cause == QUEUED, KERNEL_GAPS, LAUNCH_LATENCY).astype(np.uint8)
    op_names = np.append(context.trace.table("cpu_op")["name"].astype(np.int64), NOTHING)
    own = np.append(called.name.astype(np.int64), NOTHING)[gaps.launch]
    op = op_names[np.append(called.op, NOTHING)[gaps.launch]]
    slow = returned - launched > LATENCY_NS  # then the call's own name says more than its operator's
    name = np.where(slow | (op < 0), own, op)
    pageable = np.append(matches(context.trace.strings, PAGEABLE)[context.get(gpu).name], False)[gaps.after]
    staged = np.where(pageable, STAGING, OPERATORS).astype(np.uint8)
    return [
        _parts(number[short], launched[short], gaps.end[short], latency[short], name[short]),
        _parts(number[~short], launched[~short], returned[~short], staged[~short], name[~short]),
        _parts(number[~short], returned[~short], gaps.end[~short], IN_QUEUE, name[~short]),
    ]


def _before_launches(context: Context, gaps: IdleGaps, launched: Ints) -> list[IdlePieces]:
    number = np.flatnonzero(launched > gaps.start)
    if not len(number):
        return []
    called, main = context.get(calls), context.get(training_thread)
    launching = np.append(called.thread.astype(np.int64), main)[gaps.launch[number]]
    hosts = {thread: host_activity(context, thread) for thread in {*unique_values(launching).tolist(), main}}
    whole = _Work(number, gaps.start[number], launched[number], np.zeros(len(number), np.int64), launching)
    work = _cut_by(_cut_by(whole, whole.thread, hosts), np.array([main]), hosts)
    return _explained(context, gaps, work)


def _cut_by(work: _Work, thread: Ints, hosts: Mapping[int, ActiveSets]) -> _Work:
    """Cuts pieces where the activity of their thread changes, and adds it to their masks. thread: of each, or
    of all.
    """
    thread = np.broadcast_to(thread, work.gap.shape)
    found = []
    for number in unique_values(thread).tolist():
        own = work.take(thread == number)
        pieces = cut(own.start, own.end, hosts[number].time)
        kept = own.take(pieces.owner)
        found.append(_Work(kept.gap, pieces.start, pieces.end, kept.mask | hosts[number].at(pieces.start), kept.thread))
    return _Work(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _explained(context: Context, gaps: IdleGaps, work: _Work) -> list[IdlePieces]:
    mask = work.mask
    told = np.select(
        [(mask & bit) != 0 for bit in (LOADS, COMMUNICATES, ALLOCATES, WAITS, WANTS_GIL, WORKS)],
        [LOADING, HOSTCOMMUNICATES, ALLOCATION, SYNC, _GIL, OPERATORS],
        UNEXPLAINED,
    ).astype(np.uint8)
    silent = (told == UNEXPLAINED) | (told == LOADING)  # user functions say more about data loading
    known = work.take(~silent)
    names = names_at(
        context,
        known.thread,
        (known.start + known.end) // 2,
        loads=np.zeros(len(known.gap), np.bool_),
        in_call=told[~silent] != HOSTCOMMUNICATES,
    )
    parts = [_parts(known.gap, known.start, known.end, told[~silent], names)]
    if silent.any():
        parts.append(_python(context, gaps, work.take(silent)))
    return parts


def _python(context: Context, gaps: IdleGaps, work: _Work) -> IdlePieces:
    """Explains pieces in which the host loaded data, or ran neither an operator nor a call."""
    frames, main = context.get(python_frames), context.get(training_thread)
    known = unique_values(frames.nested.events.track)
    thread = np.where(np.isin(work.thread, known), work.thread, main)
    divided = [
        _divided(context, gaps, work.take(thread == number), frames, number)
        for number in unique_values(thread).tolist()
    ]
    gap, start, end, mask, frame = (np.concatenate(column) for column in zip(*divided, strict=True))
    has = frame >= 0
    user = np.where(has, frames.user[frame], NOTHING) if len(frames.row) else frame
    shown = np.where(user >= 0, user, frame)
    cause = np.full(len(gap), UNEXPLAINED, np.uint8)
    if len(frames.row):
        cause[has] = _OF_KIND[frames.kind[frame[has]]]
    annotated = ~has & ((mask & (ANNOTATED | LOADS)) != 0)
    cause[annotated] = ANNOTATION
    cause[(mask & LOADS) != 0] = LOADING
    row = np.where(has, frames.row[shown], NOTHING) if len(frames.row) else frame
    names = context.trace.table("python_function")["name"]
    name = np.where(has, names[row], NOTHING).astype(np.int64) if len(names) else np.full(len(gap), NOTHING)
    name[annotated] = names_at(
        context,
        np.full(np.count_nonzero(annotated), main),
        (start + end)[annotated] // 2,
        loads=cause[annotated] == LOADING,
        in_call=np.zeros(np.count_nonzero(annotated), np.bool_),
    )
    reason = np.where(cause == UNEXPLAINED, _why_silent(frames), EXPLAINED).astype(np.uint8)
    functions = group([gap, name])
    took = functions.sums(end - start)[functions.number]
    after_wait = (gaps.cause[gap] == SYNCHRONISATION) & (cause == PYTHON)
    cause[after_wait & ((2 * took < gaps.length[gap]) | (took < LONG_NS))] = SYNC
    released = 2 * context.get(pageable_releases).within(start, end) > end - start
    cause[released & np.isin(cause, (PYTHON, SYNC))] = STAGING
    return IdlePieces(gap, start, end, cause, name, row, reason)


def _why_silent(frames: PythonFrames) -> int:
    if not len(frames.row):
        return NO_STACKS
    return NO_SAMPLE if frames.samples else NO_EVENT


def _divided(
    context: Context, gaps: IdleGaps, work: _Work, frames: PythonFrames, thread: int
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cuts pieces by the frames of a thread: gap, start, end, mask and place of the frame."""
    following = np.append(context.get(gpu).name.astype(np.int64), NOTHING)[gaps.after[work.gap]]
    pieces, frame = frames_in(frames, thread, work.start, work.end, following)
    return work.gap[pieces.owner], pieces.start, pieces.end, work.mask[pieces.owner], frame


def _by_gap(context: Context, gaps: IdleGaps, parts: IdlePieces) -> IdlePieces:
    """Corrects pieces by how their gaps began and ended."""
    of_gap, cause, name, reason = gaps.cause[parts.gap], parts.cause.copy(), parts.name.copy(), parts.reason.copy()
    waited = (of_gap == SYNCHRONISATION) & np.isin(cause, _HIDDEN_WITHOUT_WAIT)
    cause[waited], reason[waited] = SYNC, EXPLAINED
    called = context.get(calls)
    if waited.any():
        blocking = gaps.blocking[parts.gap[waited]]
        op_names = np.append(context.trace.table("cpu_op")["name"].astype(np.int64), NOTHING)
        op = op_names[called.op[blocking]]
        name[waited] = np.where(op >= 0, op, called.name[blocking])
    lost = (of_gap == UNKNOWN) & np.isin(cause, (OPERATORS, ANNOTATION, PYTHON, UNEXPLAINED))
    cause[lost], name[lost] = UNEXPLAINED, NOTHING
    reason[lost] = NO_LAUNCH if len(called) else NO_CALLS
    first = (gaps.before[parts.gap] < 0) & (cause == IN_QUEUE)
    cause[first], name[first], reason[first] = UNEXPLAINED, NOTHING, NOTHING_EARLIER
    frame = np.where(waited | lost | first, NOTHING, parts.frame)
    return IdlePieces(parts.gap, parts.start, parts.end, cause, name, frame, reason)


def host_activity(context: Context, thread: int) -> ActiveSets:
    """Returns the activity of a thread over time (the bits above); outermost operators begin and end where it
    changes.
    """
    trace, called = context.trace, context.get(calls)
    strings, step = trace.strings, context.get(step_names)
    loading = context.get(data_loading_names)
    communicating = context.get(communication_op_names) & ~matches(strings, _LAUNCHED)
    tables = [table.take(table["thread"] == thread) for table in map(trace.table, OP_TABLES)]

    def ranges(*flags: Flags) -> Union:
        """Returns the union of the rows of each table whose names are flagged."""
        rows = [mask[table["name"]] for mask, table in zip(flags, tables, strict=True)]
        start = [table["start"][row] for table, row in zip(tables, rows, strict=True)]
        end = [table.end()[row] for table, row in zip(tables, rows, strict=True)]
        return union(np.concatenate(start), np.concatenate(end))

    own = called.thread == thread
    name = called.name[own]

    def made(names: Flags) -> Union:
        return union(called.start[own][names[name]], called.end[own][names[name]])

    nothing = np.zeros(len(strings), np.bool_)
    operators, every = ranges(~step, nothing), made(~nothing)
    loads = ranges(loading, loading)
    frames = context.get(python_frames)
    if len(frames.row) and not frames.samples:
        events = frames.nested.events
        mine = (events.track == thread) & (frames.kind == FrameKind.DATA)
        loads = union(np.append(loads.start, events.start[mine]), np.append(loads.end, frames.nested.tree.end[mine]))
    found = active_sets(
        [
            loads,
            ranges(communicating, communicating),
            made(matches(strings, ALLOCATING)),
            made(matches(strings, BLOCKING) | matches(strings, BLOCKING_COPY)),
            union(np.append(operators.start, every.start), np.append(operators.end, every.end)),
            ranges(nothing, ~(step | loading | communicating)),
            context.get(gil_waits).get(thread, union(called.start[:0], called.end[:0])),
        ]
    )
    time = ascending(np.concatenate([found.time, _borders(context, thread)]))
    return ActiveSets(time, found.at(time))


def _borders(context: Context, thread: int) -> Ints:
    """Returns when the outermost operators of a thread begin and end: each is to have pieces of its own."""
    tree = context.get(ops)
    events, parent = tree.nested.events, tree.nested.tree.parent
    step = np.append(context.get(step_names)[context.trace.table("cpu_op")["name"][tree.row]], True)
    outermost = (events.track == thread) & step[parent]
    return np.concatenate([events.start[outermost], tree.nested.tree.end[outermost]])


def _annotations(context: Context) -> _Named:
    """Returns all annotations but steps."""
    table = context.trace.table("user_annotation")
    table = table.take(~context.get(step_names)[table["name"]])
    nested = nest_tables([table], context.trace.window_end_ns)
    return _Named(nested, table["name"][nested.order])


def _loaders(context: Context) -> _Named:
    """Returns the events that wait for the next batch."""
    tables = [context.trace.table(kind) for kind in OP_TABLES]
    tables = [table.take(context.get(data_loading_names)[table["name"]]) for table in tables]
    nested = nest_tables(tables, context.trace.window_end_ns)
    return _Named(nested, np.concatenate([table["name"] for table in tables])[nested.order])


def _made_calls(context: Context) -> _Named:
    tables = [context.trace.table(kind) for kind in API_TABLES]
    nested = nest_tables(tables, context.trace.window_end_ns)
    return _Named(nested, np.concatenate([table["name"] for table in tables])[nested.order])


def names_at(context: Context, thread: Ints, moment: Ints, *, loads: Flags, in_call: Flags) -> Ints:
    """Returns the name (string number) of what a thread, or else the thread of the steps, was in, or NOTHING.

    That is the operator, otherwise the annotation, otherwise the call.

    loads: data loading takes precedence.
    in_call: no annotations.
    """
    main = np.full(len(moment), context.get(training_thread))

    def of(named: _Named) -> Ints:
        found = np.full(len(moment), NOTHING)
        for each in (thread, main):
            missing = np.flatnonzero(found == NOTHING)
            if len(named.name) and len(missing):
                place = named.nested.innermost(each[missing].astype(np.uint32), moment[missing])
                found[missing] = np.where(place >= 0, named.name[place], NOTHING)
        return found

    tree = context.get(ops)
    annotated = of(context.get(_annotations))
    op = of(_Named(tree.nested, context.trace.table("cpu_op")["name"][tree.row]))
    found = np.where(op >= 0, op, np.where(in_call, NOTHING, annotated))
    if loads.any():
        loader = of(context.get(_loaders))
        found = np.where(loads, np.where(loader >= 0, loader, np.where(annotated >= 0, annotated, op)), found)
    return np.where(found == NOTHING, of(context.get(_made_calls)), found) if (found == NOTHING).any() else found


def gil_waits(context: Context) -> Mapping[int, Union]:
    """Returns by thread when it waited for the GIL in operators (Unix ns); threads that never did are left out."""
    main, uses = context.get(training_thread), thread_use(context.trace.target)
    own = next((use for use in uses if use.thread == main), None)
    if own is None or own.waiting < LEAST_SAMPLES or not len(context.get(python_frames).row):
        return {}
    found = dict(_candidates(context, uses))
    window = window_ns(context.trace)
    waited = window * own.waiting / own.samples + sum(each.length() for each in found.values())
    return found if waited <= window * _held_at_most(use for use in uses if use.thread != main) else {}


def gil_wait_time(context: Context) -> Union:
    """Returns the time of these waits of all threads together."""
    parts = context.get(gil_waits).values()
    nothing = np.empty(0, np.int64)
    return union(
        np.concatenate([nothing, *(part.start for part in parts)]),
        np.concatenate([nothing, *(part.end for part in parts)]),
    )


def _held_at_most(others: Iterator[ThreadUse]) -> float:
    """Returns the upper limit of other threads' share of time with the GIL, by their samples."""
    known = [(use.has_gil / use.samples, use.samples) for use in others if use.samples]
    error = np.sqrt(sum(share * (1 - share) / count for share, count in known))
    return min(sum(share for share, _ in known) + NORMAL_95 * float(error), 1.0)


def _candidates(context: Context, uses: list[ThreadUse]) -> Iterator[tuple[int, Union]]:
    """Yields threads with their spans, if each by itself could be waits for the GIL."""
    tree = context.get(ops)
    for use in uses:
        locked = is_native(use) and use.idle_lock > 0 and use.idle_lock >= LOCKED * use.idle
        if not locked or use.thread == context.get(training_thread):
            continue
        start, end = _stretches(context, use.thread)
        took = int((end - start).sum())
        outermost = (tree.nested.events.track == use.thread) & (tree.nested.tree.parent < 0)
        working = int((tree.nested.tree.end - tree.nested.events.start)[outermost].sum())
        if len(start) >= LEAST_STRETCHES and working - use.cpu_ns >= OFF_CPU * took:
            yield use.thread, Union(start, end)


def _stretches(context: Context, thread: int) -> tuple[Ints, Ints]:
    """Returns spans of at least a switch interval in autograd itself, outside of operators and calls."""
    tree, called, frames = context.get(ops), context.get(calls), context.get(python_frames)
    track, own = tree.nested.events.track == thread, called.thread == thread
    call = union(called.start[own], called.end[own])
    edges = ascending(
        np.concatenate([tree.nested.events.start[track], tree.nested.tree.end[track], call.start, call.end])
    )
    length = np.diff(edges)
    chosen = np.flatnonzero(length >= SHORTEST_NS)
    start, end = edges[chosen], edges[chosen + 1]
    middle = (start + end) // 2
    names, table = context.trace.strings, context.trace.table("cpu_op")["name"]
    place = tree.nested.innermost(np.full(len(middle), thread, np.uint32), middle).tolist()
    running = np.array(
        [at >= 0 and names[int(table[tree.row[at]])].startswith(EVALUATE_FUNCTION) for at in place], np.bool_
    )
    frame = frames.innermost(np.full(len(middle), context.get(training_thread), np.uint32), middle)
    running &= (frame >= 0) & (frames.kind[frame] == FrameKind.BACKWARD)
    running &= call.within(start, end) == 0
    return start[running], end[running]


assert len(_OF_KIND) == len(FrameKind)
