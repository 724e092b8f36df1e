"""The measured steps that findings are about, and replays of them with a change."""

from dataclasses import replace

import numpy as np

from kineto_trace.analysis.cause_views import CAUSES, measured_steps, time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.idle_pieces import IDLE_CAUSES
from kineto_trace.analysis.step_replay import ReplayChange, step_replay
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.arrays.row_groups import sums
from kineto_trace.base.array_types import AnyArray, Flags, Ints
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, ops
from kineto_trace.structure.library_calls import code_place
from kineto_trace.structure.python_frames import python_frames

TOP_KERNELS = 3
NOTED = 1.02  # times the duration without recording: from here on, a note says so


def measured_times(context: Context) -> Ints:
    """Returns for each GPU activity how long (ns) it ran in measured steps."""
    activity, steps = context.get(gpu), context.get(measured_steps)
    chosen = ~steps.left_out
    return union(steps.start[chosen], steps.end[chosen]).within(activity.start, activity.end)


def longest_names(context: Context, chosen: Flags) -> tuple[str, ...]:
    """Returns the names of the chosen GPU activities with the most time."""
    activity, took = context.get(gpu), context.get(measured_times)
    total = sums(activity.name[chosen].astype(np.int64), took[chosen], len(context.trace.strings))
    best = np.argsort(-total, kind="stable")[:TOP_KERNELS]
    return tuple(context.trace.strings[number] for number in best.tolist() if total[number] > 0)


def op_name(context: Context, row: int) -> str:
    """Returns the name of a row of cpu_op; "" for -1."""
    return context.trace.strings[int(context.trace.table("cpu_op")["name"][row])] if row >= 0 else ""


def heaviest_op(context: Context, rows: Ints, weights: AnyArray) -> int:
    """Returns the row of cpu_op with the most weight, of the operator name with the most weight; -1 if there
    is none.
    """
    known = rows >= 0
    if not known.any():
        return -1
    rows, weights = rows[known], weights[known]
    names = context.trace.table("cpu_op")["name"][rows]
    total = sums(names, weights, len(context.trace.strings))
    mine = names == int(np.argmax(total))
    return int(rows[mine][np.argmax(weights[mine])])


def function_at(context: Context, thread: AnyArray, moment: Ints, weights: AnyArray) -> int:
    """Returns a row of python_function: the user's function with the most weight at these moments; -1 if none."""
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


def location_suffix(context: Context, frame: int) -> str:
    """Returns a suffix that names where in the user's code a row of python_function is; "" for -1."""
    if frame < 0:
        return ""
    table = context.trace.table("python_function")
    return f", called in {code_place(context.trace.strings[int(table['name'][frame])], int(table['line'][frame]))}"


def with_replay(context: Context, finding: Finding, change: ReplayChange, causes: tuple[str, ...] = CAUSES) -> Finding:
    """Returns the finding with the saving by a replay with the change; unchanged if the steps cannot be replayed.

    causes: whose time it may reduce.
    """
    replay = context.get(step_replay)
    if replay is None:
        return finding
    saving = int(replay.share(change) * context.get(time_causes).steps.measured_ns)
    return replace(finding, saving_ns=saving, causes=causes, replayed=True)


def operators_and_launches(context: Context) -> Union:
    """Returns when the host was in operators or launching calls, on any thread that launches work."""
    called, activity, table, tree = (
        context.get(calls),
        context.get(gpu),
        context.trace.table("cpu_op"),
        context.get(ops),
    )
    launching = unique_values(activity.call[activity.call >= 0])
    outermost = np.zeros(len(table["start"]), np.bool_)
    outermost[tree.row[tree.nested.tree.parent < 0]] = True
    outermost &= np.isin(table["thread"], unique_values(called.thread[launching]))
    return union(
        np.concatenate([table["start"][outermost], called.start[launching]]),
        np.concatenate([table.end()[outermost], called.end[launching]]),
    )


def without_recording(context: Context, finding: Finding) -> Finding:
    """Returns the finding with its saving as a share of the steps' time without the cost of recording.

    Recording costs host time and so causes part of the GPU's idle time; the remaining times are larger shares of the
    rest.
    """
    replay = context.get(step_replay)
    if replay is None or finding.replayed or replay.slowdown <= 1:
        return finding
    factor = replay.slowdown
    if finding.causes and set(finding.causes) <= set(IDLE_CAUSES):
        idle = max(replay.recorded_ns - replay.busy_ns, 1)
        factor *= max(replay.base_ns - replay.busy_ns, 0) / idle
    window = context.get(time_causes).steps.measured_ns
    return replace(finding, saving_ns=min(int(finding.saving_ns * factor), window))


def recording_note(context: Context) -> str | None:
    """Returns a note on the cost of recording, if it is known and large enough."""
    replay = context.get(step_replay)
    if replay is None or replay.slowdown < NOTED:
        return None
    target = context.trace.target
    at_least = "" if target.step_ratio else "at least "
    return (
        f"iterations took {at_least}{target.known_step_ratio:.2f} times as long while they were recorded; savings are "
        "shares of the time that they take otherwise"
    )
