"""The Python call stack of each operator.

Theory of operation
    A file may tell the stack itself ("Call stack" of the operator's arguments: frames from the innermost to the
    outermost, ";" between them). Otherwise the stack is made of the Python frames (python_function) that were
    running on the operator's thread when it started, written in the same way.

    Stacks are numbered: a frame's stack is its own name and its caller's stack. All frames of one depth are
    numbered at once, so that nothing is done per frame, and texts are made of the stacks that are asked for.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.row_groups import group
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.structure.event_arguments import argument_texts
from kineto_trace.structure.nesting import nest_tables

NO_STACK = -1
SEPARATOR = ";"
ARGUMENT = "Call stack"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CallStacks:
    """of_op: per row of cpu_op the number of its stack; NO_STACK: none. texts: of the stacks, if a file tells them.

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


def told_stacks(context: Context) -> CallStacks:
    """Returns the stacks recorded in the file."""
    numbers, texts = argument_texts(context, "cpu_op", ARGUMENT)
    known = np.array([bool(text) for text in texts] + [False])
    nothing = np.empty(0, np.int64)
    return CallStacks(np.where(known[numbers], numbers, NO_STACK), nothing, nothing, tuple(texts))


def call_stacks(context: Context) -> CallStacks:
    """Returns the stacks recorded in the file, or if there are none, those made of the Python frames."""
    told = context.get(told_stacks)
    if (told.of_op != NO_STACK).any():
        return told
    ops, python = context.trace.table("cpu_op"), context.trace.table("python_function")
    nested = nest_tables([python], context.trace.window_end_ns)
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
    return CallStacks(stack[inside], np.concatenate([nothing, *names]), np.concatenate([nothing, *callers]), ())
