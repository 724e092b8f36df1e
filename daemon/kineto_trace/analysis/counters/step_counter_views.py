"""The view of hardware counters by training step, and by what the steps do."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.counters.groupings import PHASES, by_phase
from kineto_trace.analysis.counters.hardware_counter_views import as_columns, counter_rows, notes
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS, interval_means, sampled_counters
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, steps, whole_steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

ALL, AVERAGE = "all", "average"
NO_STEPS = "the trace has no training steps with work on a GPU that has samples"

Ints = npt.NDArray[np.int64]


class GpuSteps(NamedTuple):
    """Steps on one GPU (Unix ns): from the start of the first activity that a step launched to that of the next step.

    The last one ends with its last activity. Steps without GPU work are left out.
    """

    number: Ints
    start: Ints
    end: Ints


def gpu_steps(context: Context, device: int) -> GpuSteps:
    """Returns the steps that were recorded as a whole, or all of them if none was."""
    found = context.get(whole_steps)
    found = found if len(found) else context.get(steps)
    activity, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero((activity.device == device) & (activity.call >= 0))
    step = found.at(called.start[activity.call[rows]]) if len(found) and len(rows) else np.full(len(rows), -1)
    rows, step = rows[step >= 0], step[step >= 0]
    first = np.full(len(found), np.iinfo(np.int64).max)
    last = np.full(len(found), np.iinfo(np.int64).min)
    np.minimum.at(first, step, activity.start[rows])
    np.maximum.at(last, step, activity.end[rows])
    worked = np.flatnonzero(last >= first)
    start, end = first[worked], last[worked]
    following = np.flatnonzero(np.diff(found.number[worked]) == 1)  # others have something between them
    end[following] = np.maximum(start[following + 1], start[following])
    return GpuSteps(found.number[worked], start, end)


@view(
    "step_counters",
    columns(
        ("step", "text", "", 'step number; "average": of all steps; "all": a phase over all steps'),
        (
            "phase",
            "text",
            "",
            "loading, forward, backward, optimizer or other, by the launch of the work; missing: all",
        ),
        ("device", "int", "", "GPU index in the process"),
        (
            "time_us",
            "float",
            "us",
            "time of the step on the GPU, idle time included; of a phase, of its GPU activities",
        ),
        ("counter", "text", "", "what is measured; missing: no counter has a value here"),
        ("unit", "text", "", "of the value"),
        ("value", "float", "", "mean over the step; of a phase, while its work ran alone on the GPU"),
        ("sampled_pct", "float", "%", "share of the step with samples; missing for phases"),
        ("error", "float", "", "of a phase the 95 % interval of the value, plus or minus; a step's value is exact"),
        ("why", "text", "", "why there is no value"),
    ),
    nothing=NO_COUNTERS,
)
def step_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by training step and by phase of the steps.

    A step lasts, on the GPU, from its first activity to that of the next step, or to its own last one. Its value is the
    mean over that time, exact but for the two samples at its ends. The mean of all steps comes first. A phase has the
    GPU work that was launched in it; its values are found as in the view kernel_counters.

    Options:
    - counter: only counters whose name contains this text, in any case.
    """
    tracks = [track for track in context.get(sampled_counters) if counter.casefold() in track.label.casefold()]
    told, rows = notes(context), list[dict[str, Any]]()
    for track in tracks:
        found = context.get(_steps_by_device).get(track.device)
        if found is None or not len(found.number):
            continue
        count = len(found.number)
        each = interval_means(track, found.start, found.end, np.arange(count), count)
        whole = interval_means(track, found.start, found.end, np.zeros(count, np.int64), 1)
        took = np.append(found.end - found.start, (found.end - found.start).sum())
        names = [*map(str, found.number.tolist()), AVERAGE]
        mean, covered = np.append(each.mean, whole.mean), np.append(each.covered_ns, whole.covered_ns)
        for place, name in enumerate(names):
            rows.append(
                {
                    "step": name,
                    "phase": None,
                    "device": track.device,
                    "time_us": took[place] / (1000 * count if name == AVERAGE else 1000),
                    "counter": track.label,
                    "unit": track.unit or None,
                    "value": mean[place],
                    "sampled_pct": 100 * covered[place] / max(int(took[place]), 1),
                    "error": None,
                    "why": None if covered[place] else "no sample lies in it",
                }
            )
    if tracks and not rows:
        told.append(NO_STEPS)
    means = [row for row in rows if row["step"] == AVERAGE]
    if tracks and len(context.get(steps)):
        means += _phases(context, counter)
    rows = means + sorted((row for row in rows if row["step"] != AVERAGE), key=lambda row: int(row["step"]))
    return Answer(as_columns(step_counters, rows), told)


def _steps_by_device(context: Context) -> dict[int, GpuSteps]:
    return {device: gpu_steps(context, device) for device in {track.device for track in context.get(sampled_counters)}}


def _phases(context: Context, counter: str) -> list[dict[str, Any]]:
    return [
        {"step": ALL, "phase": PHASES[group], "sampled_pct": None, **{key: each[key] for key in _OF_PHASE}}
        for device in context.get(by_phase)
        for row, group in enumerate(device.group.tolist())
        for each in counter_rows(device, row, counter)
    ]


_OF_PHASE = ("device", "time_us", "counter", "unit", "value", "error", "why")
