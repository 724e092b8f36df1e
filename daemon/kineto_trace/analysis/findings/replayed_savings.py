"""Savings that are found by running the steps again (analysis/replay), and others without what recording cost."""

from dataclasses import replace

import numpy as np

from kineto_trace.analysis.causes.time_causes import CAUSES, time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.idle.idle_pieces import IDLE_CAUSES
from kineto_trace.analysis.replay.step_replay import Change, step_replay
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, ops

NOTED = 1.02  # times as long as without being recorded: then it is said


def replayed(context: Context, finding: Finding, change: Change, causes: tuple[str, ...] = CAUSES) -> Finding:
    """Returns the finding with what the steps, run again with the change, save; unchanged where they cannot be.

    causes: those of which it may take time.
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
    """Returns the finding with its saving as a part of the steps' time without what recording them cost.

    Recording costs time of the host. So of the time in which the GPU is idle a part is due to it, and the rest of the
    time is a larger part of what is left.
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
    """Says what recording cost, if that is known and enough to be said."""
    replay = context.get(step_replay)
    if replay is None or replay.slowdown < NOTED:
        return None
    target = context.trace.target
    at_least = "" if target.step_ratio else "at least "
    return (
        f"iterations took {at_least}{target.known_step_ratio:.2f} times as long while they were recorded; savings are "
        "shares of the time that they take otherwise"
    )
