"""What the host did in each gap of a GPU: gaps cut into pieces, each with one cause and what shows it.

Theory of operation
    A gap (idle_gaps.py) ends with an activity. From the launching call on, up to the activity's start, the time is that
    of the launch if it is short, otherwise the call itself is slow (host, in that call) and then the queue. Before the
    first activity in the trace the queue explains nothing: what was launched before the recording began is not
    recorded, and may run then. Before the call, the host is at work. What counts is the launching thread; where it has
    nothing, the thread of the steps (the thread of the backward pass waits for it then). At each moment, the first of
    these that is true is the cause:

    data loading (annotation, operator or frame of the DataLoader) · a collective on the host · CUDA allocating or
    releasing memory · a call that waits for the GPU · a wait for the GIL in an operator (gil_waits.py) · an operator or
    call (launch-bound) · a Python function, told by what it waited for if it did (sleep, lock, file or network,
    logging, GIL, …) · an annotation · unknown

    In a gap that began while the host waited for the GPU, operators, launches, annotations and what is unknown count
    for that synchronisation, since without it they would have run while the GPU was busy; a Python function counts only
    if it takes at least half of the gap and a millisecond. In a gap whose launch is not in the trace, only what blocks
    the host is believed.

    A function that releases pageable memory after a copy (pageable_releases.py) is staging, as is the copy's call.

    Pieces are divided among the functions of recorded Python calls, or of samples; a piece without a sample is like
    others before the same activity (structure/python/python_moments.py).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.idle.host_activity import (
    ALLOCATES,
    ANNOTATED,
    COMMUNICATES,
    LOADS,
    WAITS,
    WANTS_GIL,
    WORKS,
    host_activity,
    names_at,
)
from kineto_trace.analysis.idle.idle_gaps import QUEUED, SYNCHRONISATION, UNKNOWN, IdleGaps, idle_gaps
from kineto_trace.analysis.idle.pageable_releases import pageable_releases
from kineto_trace.arrays.active_sets import ActiveSets, cut
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING, calls, gpu
from kineto_trace.structure.python.library_calls import FrameKind
from kineto_trace.structure.python.python_frames import PythonFrames, python_frames
from kineto_trace.structure.python.python_moments import frames_in
from kineto_trace.structure.training_thread import training_thread

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
assert len(_OF_KIND) == len(FrameKind)

# Why a piece is unknown.
REASONS = (
    "",
    "the launch that ended the gap is not in the trace",
    "the trace has no calls of the runtime or driver, so what launched the work is not known: record these",
    "no Python stacks were recorded: kinetoctl trace --with-stack shows them (torch.profiler: with_stack=True)",
    "no sample of the Python stacks fell into these gaps: kinetoctl trace --stack-hz takes more of them",
    "the launching thread ran no Python function, operator or call",
    "no earlier work of this GPU is in the trace: it may still have run what was launched before the recording began",
)
EXPLAINED, NO_LAUNCH, NO_CALLS, NO_STACKS, NO_SAMPLE, NO_EVENT, NOTHING_EARLIER = range(len(REASONS))

PAGEABLE = re.compile(r"Pageable", re.IGNORECASE)  # copies: the call itself reads or writes that memory
LATENCY_NS = 50_000  # from a launching call to the start of its activity on an idle GPU: 5 to 20 us without a profiler
LONG_NS = 1_000_000  # a Python function that runs so long after a synchronisation is a cause of its own

# What would have run while the GPU was busy, had the host not waited for it.
_HIDDEN_WITHOUT_WAIT = (OPERATORS, ANNOTATION, LAUNCH_LATENCY, UNEXPLAINED, SYNC)

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class IdlePieces(NamedTuple):
    """Pieces of gaps, times in Unix ns. Those of idle_pieces are all gaps together, in the order of (device, start).

    gap: place in IdleGaps. cause: number into IDLE_CAUSES. name: number into Trace.strings of the operator, call,
    annotation or Python function that shows the cause; frame: row of python_function if it is one; NOTHING: none.
    reason: number into REASONS.
    """

    gap: Ints
    start: Ints
    end: Ints
    cause: npt.NDArray[np.uint8]
    name: Ints
    frame: Ints
    reason: npt.NDArray[np.uint8]

    @property
    def length(self) -> Ints:
        """Returns the length of each piece, in ns."""
        return self.end - self.start


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


def _parts(
    gap: Ints, start: Ints, end: Ints, cause: npt.NDArray[np.uint8] | int, name: Ints | None = None
) -> IdlePieces:
    lasting = end > start
    count = len(gap)
    full = np.full(count, cause, np.uint8) if isinstance(cause, int) else cause
    names = np.full(count, NOTHING) if name is None else name
    return IdlePieces(
        gap[lasting], start[lasting], end[lasting], full[lasting], names[lasting],
        np.full(count, NOTHING)[lasting], np.zeros(count, np.uint8)[lasting],
    )  # fmt: skip


def _launches(context: Context, gaps: IdleGaps, launched: Ints, returned: Ints) -> list[IdlePieces]:
    """The time of each gap from its launching call on."""
    called, number = context.get(calls), np.arange(len(gaps))
    until_start = gaps.end - launched
    short = until_start <= LATENCY_NS
    latency = np.where(gaps.cause == QUEUED, KERNEL_GAPS, LAUNCH_LATENCY).astype(np.uint8)
    op_names = np.append(context.trace.table("cpu_op")["name"].astype(np.int64), NOTHING)
    own = np.append(called.name.astype(np.int64), NOTHING)[gaps.launch]
    op = op_names[np.append(called.op, NOTHING)[gaps.launch]]
    slow = returned - launched > LATENCY_NS  # then the call's own name tells more than that of its operator
    name = np.where(slow | (op < 0), own, op)
    pageable = np.append(matches(context.trace.strings, PAGEABLE)[context.get(gpu).name], False)[gaps.after]
    staged = np.where(pageable, STAGING, OPERATORS).astype(np.uint8)
    return [
        _parts(number[short], launched[short], gaps.end[short], latency[short], name[short]),
        _parts(number[~short], launched[~short], returned[~short], staged[~short], name[~short]),
        _parts(number[~short], returned[~short], gaps.end[~short], IN_QUEUE, name[~short]),
    ]


# ------------------------------------------------------------ before the launch


class _Work(NamedTuple):
    """Pieces of the time before launches. mask: what the two threads did (bits below). thread: the launching one."""

    gap: Ints
    start: Ints
    end: Ints
    mask: Ints
    thread: Ints

    def take(self, rows: npt.NDArray[Any]) -> "_Work":
        """Returns these pieces."""
        return _Work(*(column[rows] for column in self))


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
    """Cuts pieces where what their thread does changes, and adds that to their masks. thread: of each, or of all."""
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
    silent = (told == UNEXPLAINED) | (told == LOADING)  # functions of the user's tell more of data loading
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


# ------------------------------------------------------------ Python


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
