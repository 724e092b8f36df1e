"""The training steps of a trace."""

import numpy as np

from kineto_trace.arrays.row_groups import sums
from kineto_trace.compat.hta.hta_frame import hta_frame, step_numbers
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view


@view(
    "profiler_steps",
    columns(
        ("step", "int", "", "number in its name"),
        ("start_ns", "int", "ns", "Unix time when it began on the host"),
        ("duration_us", "float", "us", "on the host"),
        ("gpu_activities", "int", "", "kernels, copies and fills launched while it ran, by any thread"),
        ("gpu_us", "float", "us", "sum of their durations"),
    ),
    compat=(Compat.HTA,),
)
def profiler_steps(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """The annotations "ProfilerStep#N" of the host in the order of their starts.

    HTA's figures (get_profiler_steps): the numbers of the steps that are left after it dropped the last one (if there
    are at least two), once each and in order; where a step is there twice, the first row counts.
    """
    found, work, called = context.get(steps), context.get(gpu), context.get(calls)
    launched = np.flatnonzero(work.call >= 0)
    launch = called.start[work.call[launched]] if len(launched) else launched
    order = np.argsort(found.start, kind="stable")
    at = np.searchsorted(found.start[order], launch, side="right") - 1
    inside = (at >= 0) & (launch < found.end[order][at]) if len(found) else np.zeros(len(launch), np.bool_)
    step = order[at[inside]]
    values = {
        "step": found.number,
        "start_ns": found.start,
        "duration_us": (found.end - found.start) / 1000,
        "gpu_activities": np.bincount(step, minlength=len(found)),
        "gpu_us": sums(step, (work.end - work.start)[launched[inside]], len(found)) / 1000,
    }
    if compat is Compat.HTA:
        frame = context.get(hta_frame)
        left = np.unique(step_numbers(context.trace.strings, frame.name))
        first = {number: row for row, number in reversed(list(enumerate(found.number.tolist())))}
        rows = [first[number] for number in left[left >= 0].tolist() if number in first]
        values = {name: column[rows] for name, column in values.items()}
    notes = () if len(values["step"]) else ("there are no annotations ProfilerStep#N in the trace",)
    return Answer(values, notes)
