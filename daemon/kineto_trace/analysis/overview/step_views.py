"""The training steps of a trace."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import unknown_without_gpu
from kineto_trace.arrays.row_groups import sums
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import Steps, calls, gpu, steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NO_STEPS = "there are no annotations ProfilerStep#N in the trace"
_SHOWN = 5
_MS = 1000  # us


def incomplete_note(names: Sequence[str], whole: int, longest_us: float) -> str:
    """Describes the steps that the recording cut off. names: of these; whole: how many others there are."""
    listed = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    if not whole:
        return (
            f"no step is complete: the recording began or ended in step {listed}; the longest part recorded is "
            f"{longest_us / _MS:.4g} ms, and a step takes at least as long; shares are those of the parts recorded"
        )
    return f"incomplete and left out of means, because the recording began or ended in them: step {listed}"


@view(
    "profiler_steps",
    columns(
        ("step", "int", "", "step number in the name of the annotation"),
        ("start_ns", "int", "ns", "Unix time when it began on the host"),
        ("complete", "bool", "", "whether all of it was recorded; if not, duration_us is the part that was"),
        ("duration_us", "float", "us", "duration on the host"),
        ("gpu_activities", "int", "", "number of kernels, copies and fills that any thread launched while it ran"),
        ("gpu_us", "float", "us", "sum of their durations"),
    ),
)
def profiler_steps(context: Context) -> Answer:
    """The host annotations "ProfilerStep#N" in the order of their starts.

    Without any GPU activity in the trace, the figures of GPUs are missing, not zero.
    """
    found = context.get(steps)
    answer = Answer(step_values(context), _notes(found))
    return unknown_without_gpu(context, answer, ("gpu_activities", "gpu_us")) if len(found) else answer


def step_values(context: Context) -> dict[str, npt.NDArray[Any]]:
    """The columns of the view profiler_steps; without GPU activity its figures are 0."""
    found, work, called = context.get(steps), context.get(gpu), context.get(calls)
    launched = np.flatnonzero(work.call >= 0)
    launch = called.start[work.call[launched]] if len(launched) else launched
    at = found.at(launch)
    inside = at >= 0
    step = at[inside]
    return {
        "step": found.number,
        "start_ns": found.start,
        "complete": found.complete,
        "duration_us": (found.end - found.start) / 1000,
        "gpu_activities": np.bincount(step, minlength=len(found)),
        "gpu_us": sums(step, (work.end - work.start)[launched[inside]], len(found)) / 1000,
    }


def _notes(found: Steps) -> list[str]:
    if not len(found):
        return [NO_STEPS]
    cut = np.flatnonzero(~found.complete)
    if not len(cut):
        return []
    longest = float((found.end - found.start)[cut].max()) / 1000
    return [incomplete_note([str(number) for number in found.number[cut]], len(found) - len(cut), longest)]
