"""Two traces beside each other: all their events by name, as HTA's TraceDiff does."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.diff.name_totals import CALLS, NAME, Side, by_name, measured
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.errors import ViewError
from kineto_trace.kernel_traits.kernel_types import short_name
from kineto_trace.model.context import Context
from kineto_trace.model.trace import OP_TABLES
from kineto_trace.structure.activity_links import calls, gpu, steps
from kineto_trace.view_api.result import Result, columns
from kineto_trace.view_api.view import Answer, view

NS_PER_US = 1000
EventsOn = Literal["all", "cpu", "gpu"]
MEASURES = {"total": "sum of the durations"}

Ints = npt.NDArray[np.int64]


def diff_events(baseline: Context, other: Context, *, other_step: int | None = None, **options: Any) -> Result:
    """Compares all events by name: see the view diff_event_names. Raises ViewError.

    other_step: the step of the other trace, if it differs.
    """
    own = options if other_step is None else {**options, "step": other_step}
    partials = [(0, diff_event_names.partial(baseline, **options)), (1, diff_event_names.partial(other, **own))]
    return diff_event_names.combine(partials, **options)


def _events(partials: Sequence[tuple[int, Side]]) -> Answer:
    return Answer(by_name(partials, MEASURES, ("total",)))


@view(
    "diff_event_names",
    columns(*NAME, *CALLS, *measured("total", "us", "sum of the durations")),
    reduce=_events,
)
def diff_event_names(
    context: Context,
    *,
    device: EventsOn = "all",
    step: int | None = None,
    short_names: bool = False,
) -> Side:
    """All events of two traces by name: their number, their total time, and what changed.

    Options:
    - device: "cpu" for operators, annotations and calls; "gpu" for kernels, copies and fills; "all" for both.
    - step: only events that began in this training step (N of ProfilerStep#N); GPU work counts by its launching call.
      Without it, all events count.
    - short_names: drop template arguments, parameters and return types of kernels, so that their variants share a row
      (HTA's use_short_name).
    """
    return side_of(context, *_all(context, device, step), short_names)


def side_of(context: Context, name: npt.NDArray[np.int32], duration: Ints, short_names: bool) -> Side:
    """What these events of one trace contribute. name: numbers of their names; duration: ns."""
    strings = context.trace.strings
    if short_names:
        used = unique_values(name)
        shorter = [short_name(strings[number]) for number in used.tolist()]
        strings, at = sorted(set(shorter)), {text: number for number, text in enumerate(sorted(set(shorter)))}
        name = np.array([at[text] for text in shorter], np.int32)[np.searchsorted(used, name)]
    groups = group([name])
    names = [strings[number] for number in name[groups.first].tolist()]
    total = groups.sums(duration) / NS_PER_US
    return Side(names, {"calls": groups.sizes().astype(np.float64), "total": total})


def _all(context: Context, device: EventsOn, step: int | None) -> tuple[npt.NDArray[np.int32], Ints]:
    activity, called = context.get(gpu), context.get(calls)
    names, durations, times = [np.empty(0, np.int32)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    if device != "gpu":
        for kind in OP_TABLES:
            table = context.trace.table(kind)
            names.append(table["name"])
            durations.append(table["duration"])
            times.append(table["start"])
        names.append(called.name)
        durations.append(called.end - called.start)
        times.append(called.start)
    if device != "cpu":
        names.append(activity.name)
        durations.append(activity.end - activity.start)
        times.append(np.where(activity.call >= 0, np.append(called.start, 0)[activity.call], activity.start))
    name, duration, time = np.concatenate(names), np.concatenate(durations), np.concatenate(times)
    if step is None:
        return name, duration
    found = context.get(steps)
    rows = np.flatnonzero(found.number == step)
    if not len(rows):
        raise ViewError(f"view diff_event_names: the trace has no step {step}; there are: {found.number.tolist()}")
    inside = np.zeros(len(time), np.bool_)
    for row in rows.tolist():
        inside |= (time >= found.start[row]) & (time < found.end[row])
    return name[inside], duration[inside]
