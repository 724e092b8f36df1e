"""The Python call stack of each operator.

Theory of operation
    A file may contain the stack itself ("Call stack" of the operator's arguments: frames from the innermost to the
    outermost, separated by ";"). Otherwise the stack consists of the Python frames (python_function) that were running
    on the operator's thread when it started, written in the same way.

    Backward operators run on threads of autograd's own, without Python frames. They have the stack of the forward
    operator whose gradient they compute, which shows their origin in the user's code; so have the operators inside
    them. Those without a forward operator (accumulating gradients, say) have the stack of the call that started the
    backward pass, on the thread that was waiting for it. This applies only to threads without any Python frames: the
    thread's own frames take precedence.

    Stacks are numbered: a frame's stack is its own name and its caller's stack. All frames of one depth are
    numbered at once, so that nothing is done per frame, and texts are made on request.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.arrays.intervals import containing
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import Ints, Ints32
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.structure.activity_links import ops as ops_tree
from kineto_trace.structure.event_arguments import argument_texts
from kineto_trace.structure.fwd_bwd import forward_backward
from kineto_trace.structure.library_calls import functions_named
from kineto_trace.structure.nesting import Nested
from kineto_trace.structure.python_frames import python_tree

NO_STACK = -1
SEPARATOR = ";"
ARGUMENT = "Call stack"
_BACKWARD = re.compile(r"(?:^|/)torch/autograd/[^:]*: (backward|_engine_run_backward|grad)$")


@dataclass(frozen=True, slots=True)
class CallStacks:
    """The stacks of operators.

    of_op: per row of cpu_op the number of its stack, or NO_STACK.
    texts: of the stacks, if the file contains them.

    Otherwise stack n is the frame called names[n] (number into Trace.strings), called by stack callers[n].
    """

    of_op: Ints
    names: Ints
    callers: Ints
    texts: tuple[str, ...]

    def text(self, trace: Trace, number: int) -> str | None:
        """Returns the frames of a stack, innermost first, separated by ";"; None for NO_STACK."""
        if number == NO_STACK:
            return None
        if self.texts:
            return self.texts[number]
        frames = []
        while number != NO_STACK:
            frames.append(trace.strings[int(self.names[number])])
            number = int(self.callers[number])
        return SEPARATOR.join(frames)


def recorded_stacks(context: Context) -> CallStacks:
    """Returns the stacks recorded in the file."""
    numbers, texts = argument_texts(context, "cpu_op", ARGUMENT)
    known = np.array([bool(text) for text in texts] + [False])
    nothing = np.empty(0, np.int64)
    return CallStacks(np.where(known[numbers], numbers, NO_STACK), nothing, nothing, tuple(texts))


def call_stacks(context: Context) -> CallStacks:
    """Returns the stacks recorded in the file, or if there are none, those of the Python frames."""
    told = context.get(recorded_stacks)
    if (told.of_op != NO_STACK).any():
        return replace(told, of_op=_of_forward_ops(context, told.of_op))
    ops, python = context.trace.table("cpu_op"), context.trace.table("python_function")
    nested = context.get(python_tree)
    name, parent, depth = python["name"][nested.order], nested.tree.parent, nested.tree.depth
    stack = np.full(len(python) + 1, NO_STACK, np.int64)  # the last one is for "no caller"
    names, callers, count = [], [], 0
    by_depth = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=-1)) + 2))
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        places = by_depth[first:last]
        above = stack[parent[places]]
        groups = group([above, name[places]])
        stack[places] = groups.number + count
        names.append(name[places][groups.first].astype(np.int64))
        callers.append(above[groups.first])
        count += len(groups)
    inside = nested.innermost(ops["thread"], ops["start"])
    nothing = np.empty(0, np.int64)
    of_op = _of_forward_ops(context, stack[inside])
    missing = np.flatnonzero((of_op == NO_STACK) & ~np.isin(ops["thread"], unique_values(python["thread"])))
    of_op[missing] = stack[_waiting_for_backward(context, nested, python["name"][nested.order], ops["start"][missing])]
    return CallStacks(of_op, np.concatenate([nothing, *names]), np.concatenate([nothing, *callers]), ())


def _of_forward_ops(context: Context, of_op: Ints) -> Ints:
    """Returns the stacks of operators; those inside backward operators have that of the forward operator."""
    links = forward_backward(context.trace.tables)
    if not len(links.backward_rows):
        return of_op.copy()
    table, tree = context.trace.table("cpu_op"), context.get(ops_tree)
    own = of_op.copy()
    own[links.backward_rows] = np.where(
        own[links.backward_rows] == NO_STACK, of_op[links.forward_rows], own[links.backward_rows]
    )
    # autograd's operators around a backward operator
    around = np.flatnonzero((table["forward_thread"] > 0) & (own == NO_STACK))
    key = table["forward_thread"].astype(np.uint64) << np.uint64(40) ^ table["sequence"].astype(np.uint64)
    own[around] = lookup(key[around], key[links.backward_rows], own[links.backward_rows], NO_STACK)
    sorted_own, parent, depth = own[tree.row], tree.nested.tree.parent, tree.nested.tree.depth
    for level in range(1, int(depth.max(initial=0)) + 1):
        places = np.flatnonzero((depth == level) & (sorted_own == NO_STACK))
        sorted_own[places] = sorted_own[parent[places]]
    own[tree.row] = sorted_own
    return own


def _waiting_for_backward(context: Context, nested: Nested, name: Ints32, time: Ints) -> Ints:
    """Returns for each time the innermost Python frame of the thread that runs a backward pass then; -1: none.

    nested: the Python frames.
    name: of each of them, by place.
    """
    passes = np.flatnonzero(functions_named(context, _BACKWARD)[name])
    if not len(passes) or not len(time):
        return np.full(len(time), -1, np.int64)
    passes = passes[np.argsort(nested.events.start[passes], kind="stable")]
    begin, end = nested.events.start[passes], nested.tree.end[passes]
    at = containing(begin, end, time)
    running = at >= 0
    found = np.full(len(time), -1, np.int64)
    found[running] = nested.innermost(nested.events.track[passes[at[running]]], time[running])
    return found
