"""Where GPU activities come from: the user's function that asked for them, also for those of the backward pass.

Theory of operation
    An activity's operator says when its work was asked for; a backward operator's is asked for by the forward operator
    that made its node of the graph. The innermost function of the user's at that moment, on the thread of that
    operator, is where it comes from. What is launched in the optimizer's step belongs to the optimizer, whoever calls
    it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.optimizer_steps import optimizer_name, optimizer_steps
from kineto_trace.arrays.intervals import containing
from kineto_trace.arrays.row_groups import sums
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING, calls, gpu, ops
from kineto_trace.structure.fwd_bwd import forward_backward
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.structure.python.python_frames import python_frames

MOST = 0.5  # of the weight in one place: then that one is named

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LaunchOrigins:
    """One value per GPU activity. function: number into Trace.strings of the user's function; NOTHING: unknown."""

    function: Ints
    optimizer: Flags


def launch_origins(context: Context) -> LaunchOrigins:
    """Returns where the activities come from."""
    activity, called, table = context.get(gpu), context.get(calls), context.trace.table("cpu_op")
    op = np.append(context.get(asking_operators), NOTHING)[activity.op]
    of_call = activity.call
    start = np.where(op >= 0, np.append(table["start"], 0)[op], np.append(called.start, 0)[of_call])
    thread = np.where(op >= 0, np.append(table["thread"], 0)[op], np.append(called.thread, 0)[of_call])
    known = (op >= 0) | (of_call >= 0)
    optimizer = known & (containing(*context.get(optimizer_steps), start) >= 0)
    frames = context.get(python_frames)
    place = frames.innermost(thread.astype(np.uint32), start)
    function = np.full(len(activity), NOTHING)
    if len(frames.row):
        user = np.append(frames.user, NOTHING)[place]
        function = np.where(known & (user >= 0), frames.name[user], NOTHING)
    return LaunchOrigins(function, optimizer)


def main_origin(context: Context, rows: Ints, weights: Ints) -> tuple[str, str]:
    """Returns what most of this weight of GPU activities comes from, in short and with its file; "": nothing alone."""
    origins, total = context.get(launch_origins), int(weights.sum())
    if not total:
        return "", ""
    optimizer = origins.optimizer[rows]
    if int(weights[optimizer].sum()) > MOST * total:
        shown = f"the optimizer ({optimizer_name(context)})"
        return shown, shown
    function = origins.function[rows]
    rest = ~optimizer & (function >= 0)
    of_function = sums(function[rest], weights[rest], len(context.trace.strings))
    best = int(np.argmax(of_function)) if len(of_function) else 0
    if not rest.any() or of_function[best] <= MOST * total:
        return "", ""
    place = code_place(context.trace.strings[best])
    return place.short, str(place)


def asking_operators(context: Context) -> Ints:
    """Returns for each row of cpu_op the row that asked for it: of the forward for those of the backward, else itself.

    NOTHING for operators of the backward whose forward is unknown.
    """
    tree, links = context.get(ops), forward_backward(context.trace.tables)
    table = context.trace.table("cpu_op")
    outermost = np.cumsum(tree.nested.tree.parent < 0)[tree.place] if len(table) else np.empty(0, np.int64)
    count = int(outermost.max(initial=0)) + 1
    of_group = np.full(count, NOTHING)
    of_group[outermost[links.backward_rows]] = links.forward_rows
    backward = np.zeros(count, np.bool_)
    backward[outermost[table["forward_thread"] > 0]] = True
    asked: Ints = np.where(backward[outermost], of_group[outermost], np.arange(len(table)))
    return asked
