"""What the rules of findings share: time in measured steps, and the names of what took most of it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.measured_steps import measured_steps
from kineto_trace.arrays.intervals import union
from kineto_trace.arrays.row_groups import sums
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.structure.python.python_frames import python_frames

TOP_KERNELS = 3

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def measured_times(context: Context) -> Ints:
    """Returns for each GPU activity how much of it (ns) lies in measured steps."""
    activity, steps = context.get(gpu), context.get(measured_steps)
    chosen = ~steps.left_out
    return union(steps.start[chosen], steps.end[chosen]).within(activity.start, activity.end)


def longest(context: Context, chosen: Flags) -> tuple[str, ...]:
    """Returns the names of the chosen GPU activities with the most time."""
    activity, took = context.get(gpu), context.get(measured_times)
    total = sums(activity.name[chosen].astype(np.int64), took[chosen], len(context.trace.strings))
    best = np.argsort(-total, kind="stable")[:TOP_KERNELS]
    return tuple(context.trace.strings[number] for number in best.tolist() if total[number] > 0)


def op_name(context: Context, row: int) -> str:
    """Returns the name of a row of cpu_op; "" for -1."""
    return context.trace.strings[int(context.trace.table("cpu_op")["name"][row])] if row >= 0 else ""


def heaviest_op(context: Context, rows: Ints, weights: npt.NDArray[Any]) -> int:
    """Returns a row of the operator whose name has the most weight: the row with the most of it. -1: no operator."""
    known = rows >= 0
    if not known.any():
        return -1
    rows, weights = rows[known], weights[known]
    names = context.trace.table("cpu_op")["name"][rows]
    total = sums(names, weights, len(context.trace.strings))
    mine = names == int(np.argmax(total))
    return int(rows[mine][np.argmax(weights[mine])])


def function_at(context: Context, thread: npt.NDArray[Any], moment: Ints, weights: npt.NDArray[Any]) -> int:
    """Returns a row of python_function: the user's function with the most weight at these moments. -1: none."""
    frames = context.get(python_frames)
    place = frames.innermost(thread.astype(np.uint32), moment)
    user = np.where(place >= 0, frames.user[place], -1) if len(frames.row) else place
    known = user >= 0
    if not known.any():
        return -1
    user, weights = user[known], weights[known]
    names = frames.name[user]
    mine = names == int(np.argmax(sums(names, weights, len(context.trace.strings))))
    return int(frames.row[user[mine][np.argmax(weights[mine])]])


def called_in(context: Context, frame: int) -> str:
    """Returns where a row of python_function is in the user's code, to be put behind what it called; "" for -1."""
    if frame < 0:
        return ""
    table = context.trace.table("python_function")
    return f", called in {code_place(context.trace.strings[int(table['name'][frame])], int(table['line'][frame]))}"
