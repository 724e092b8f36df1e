"""What Python did at any moment of a thread: the innermost function of the user, and what it was waiting for.

Theory of operation
    library_calls.py tells whose code a frame is, and what a library's frame does (sleep, wait for a lock, read a file,
    log, …); it counts for the innermost function of the user that called it, and of several such frames the more
    telling kind counts (data loading before a lock). Data loading also counts for what it calls, a collate
    function of the user's for example. Where stacks were sampled, C functions have no frames: a function that was seen
    off the CPU in most of its own samples waited for the GIL, or was blocked; the system calls of these samples tell by
    what. A function of torch.distributed that is blocked waits for a collective.

    Sampled stacks are true at the moments of their samples alone, which are taken to be equally spread over the
    stretch in which the innermost frame stayed the same.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.active_sets import ascending
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from kineto_trace.structure.nesting import Nested, nest_tables
from kineto_trace.structure.python.library_calls import CallKind, FrameKind, function_kinds
from kineto_trace.structure.python.python_samples import IDLE, WAITING, sample_period_ns, state_counts

Ints = npt.NDArray[np.int64]
NOTHING = -1
_IDLE_COLUMNS = (("idle_sleep",), ("idle_lock",), ("idle_poll", "idle_io", "idle_child"))


@dataclass(frozen=True, slots=True)
class PythonFrames:
    """The frames of all threads in the order of their tree (places of `nested`).

    row: of python_function; name: number into Trace.strings. user: place of the innermost function of the user's at
    this frame; NOTHING: none. kind: FrameKind. samples: whether the frames come from samples; period_ns: the
    time between two of them.
    """

    nested: Nested
    row: Ints
    name: Ints
    user: Ints
    kind: npt.NDArray[np.uint8]
    samples: bool
    period_ns: int

    def innermost(self, thread: npt.NDArray[np.uint32], moment: Ints) -> Ints:
        """Returns the place of the innermost frame of a thread at each moment; NOTHING: none."""
        if not len(self.row):
            return np.full(len(moment), NOTHING)
        return self.nested.innermost(thread, moment).astype(np.int64)

    def stack(self, row: int) -> list[int]:
        """Returns the names (numbers of strings) of a row of python_function and its callers, innermost first."""
        place, names = int(np.flatnonzero(self.row == row)[0]), []
        while place >= 0:
            names.append(int(self.name[place]))
            place = int(self.nested.tree.parent[place])
        return names

    def changes(self, thread: int) -> Ints:
        """Returns the times, ascending, at which a frame of this thread begins or ends."""
        own = self.nested.events.track == thread
        return ascending(np.concatenate([self.nested.events.start[own], self.nested.tree.end[own]]))


def python_tree(context: Context) -> Nested:
    """Returns all rows of python_function as a tree."""
    return nest_tables([context.trace.table("python_function")], context.trace.window_end_ns)


def python_frames(context: Context) -> PythonFrames:
    """Returns the frames of a trace."""
    trace = context.trace
    table = trace.table("python_function")
    nested = context.get(python_tree)
    row = nested.order.astype(np.int64)
    names, kinds = table["name"][row], context.get(function_kinds)
    is_user, own = kinds.user[names], kinds.frame[names]
    samples = bool((table["self_samples"] > 0).any())
    user, kind = _inherited(nested, is_user, own)
    if samples:
        kind = np.where(kind == FrameKind.RUNNING, _sampled(table, row, kinds.call[names]), kind)
    period = (
        sample_period_ns(trace) or int(np.median(table["duration"] // np.maximum(table["samples"], 1)))
        if samples
        else 0
    )
    return PythonFrames(nested, row, names.astype(np.int64), user, kind, samples, period)


def _sampled(table: Table, row: Ints, call: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Returns what threads did in these rows of python_function, by most of the samples in which they ran themselves.

    Whether a caller was off the CPU in its own samples says nothing of what it calls.
    """
    counts = state_counts(table)[row]
    most = 2 * counts > counts.sum(axis=1, keepdims=True)
    idle = most[:, IDLE]
    asleep, locked, io = (
        idle & (2 * sum(table[name][row] for name in names) > counts[:, IDLE]) for names in _IDLE_COLUMNS
    )
    return np.select(
        [idle & (call == CallKind.COLLECTIVE), asleep, locked, io, idle, most[:, WAITING]],
        [
            FrameKind.COLLECTIVE,
            FrameKind.SLEEP,
            FrameKind.LOCK,
            FrameKind.INPUT_OUTPUT,
            FrameKind.BLOCKED,
            FrameKind.GIL,
        ],
        FrameKind.RUNNING,
    ).astype(np.uint8)


def _inherited(
    nested: Nested, is_user: npt.NDArray[np.bool_], own: npt.NDArray[np.uint8]
) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Returns the innermost function of the user's at each frame, and the most telling kind below it."""
    parent, depth = nested.tree.parent.astype(np.int64), nested.tree.depth
    user = np.where(is_user, np.arange(len(parent)), NOTHING)
    kind = own.copy()
    by_depth = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=-1)) + 2))
    for first, last in zip(bounds[1:-1], bounds[2:], strict=True):
        places = by_depth[first:last]
        above = parent[places]
        inherits = ~is_user[places]
        user[places[inherits]] = user[above[inherits]]
        passed = np.where(inherits | (kind[above] == FrameKind.DATA), kind[above], FrameKind.RUNNING)
        kind[places] = np.maximum(kind[places], passed)
    return user, kind
