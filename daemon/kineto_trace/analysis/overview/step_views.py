"""The training steps of a trace."""

import numpy as np

from kineto_trace.arrays.row_groups import sums
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NO_STEPS = "there are no annotations ProfilerStep#N in the trace"


@view(
    "profiler_steps",
    columns(
        ("step", "int", "", "step number in the name of the annotation"),
        ("start_ns", "int", "ns", "Unix time when it began on the host"),
        ("duration_us", "float", "us", "duration on the host"),
        ("gpu_activities", "int", "", "number of kernels, copies and fills that any thread launched while it ran"),
        ("gpu_us", "float", "us", "sum of their durations"),
    ),
)
def profiler_steps(context: Context) -> Answer:
    """The host annotations "ProfilerStep#N" in the order of their starts."""
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
    return Answer(values, () if len(found) else (NO_STEPS,))
