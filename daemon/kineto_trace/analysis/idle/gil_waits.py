"""When a thread without Python, such as autograd's, waited for the GIL inside an operator.

Theory of operation
    Autograd's thread runs no Python of its own, but takes the GIL to release tensors that Python objects hold, and for
    hooks. Its stack is not sampled, so nothing says directly that it waits then. Yet autograd itself computes nothing
    between the operators and calls of a node (in evaluate_function) and is done with it in microseconds; and whoever
    wants the GIL asks a holder that runs Python for it only every switch interval, which is 5 ms. So a stretch of that
    length, or a longer one, is such a wait, if all of this agrees:

    - the training thread was seen to wait for the GIL, too, and is in the backward at that time;
    - no sample saw Python on the thread, and those that saw it off the CPU saw it wait for a lock;
    - by the thread's CPU time it cannot have run in these stretches;
    - other threads held the GIL in so many samples that there is room for all of these waits.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.active_sets import ascending
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, ops
from kineto_trace.structure.fwd_bwd import EVALUATE_FUNCTION
from kineto_trace.structure.python.library_calls import FrameKind
from kineto_trace.structure.python.python_frames import python_frames
from kineto_trace.structure.python.thread_use import ThreadUse, is_native, thread_use, window_ns
from kineto_trace.structure.training_thread import training_thread

SHORTEST_NS = 4_500_000  # sys.getswitchinterval() is 5 ms
LEAST_STRETCHES = 3
LEAST_SAMPLES = 3  # in which the training thread waited for the GIL
LOCKED = 0.9  # of a thread's samples off the CPU, those that waited for a lock
OFF_CPU = 0.8  # of the stretches, by the thread's CPU time
NORMAL_95 = 1.96  # deviations

Ints = npt.NDArray[np.int64]


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
    """The share of the time in which other threads held the GIL, as far as their samples allow."""
    known = [(use.has_gil / use.samples, use.samples) for use in others if use.samples]
    error = np.sqrt(sum(share * (1 - share) / count for share, count in known))
    return min(sum(share for share, _ in known) + NORMAL_95 * float(error), 1.0)


def _candidates(context: Context, uses: list[ThreadUse]) -> Iterator[tuple[int, Union]]:
    """Threads with their stretches, if each by itself could be waits for the GIL."""
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
    """Stretches of at least a switch interval in autograd itself, outside of operators and calls."""
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
