"""Events of two traces by name."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import Floats, Ints, Ints32, Objects
from kineto_trace.errors import ViewError
from kineto_trace.kernel_traits.kernel_types import short_name
from kineto_trace.model.context import Context
from kineto_trace.model.trace import OP_TABLES
from kineto_trace.structure.activity_links import calls, gpu, steps
from kineto_trace.view_api.result import Result, ResultColumn, columns
from kineto_trace.view_api.view import Answer, view

NS_PER_US = 1000
EventsOn = Literal["all", "cpu", "gpu"]
MEASURES = {"total": "sum of the durations"}
ADDED, DELETED, INCREASED, DECREASED, UNCHANGED = "added", "deleted", "increased", "decreased", "unchanged"
NAME: tuple[tuple[str, Any, str, str], ...] = (
    ("name", "text", "", "name"),
    ("change", "text", "", "change in the number of calls: added, deleted, increased, decreased or unchanged"),
)
CALLS: tuple[tuple[str, Any, str, str], ...] = (
    ("calls_baseline", "int", "", "number of calls, baseline"),
    ("calls_other", "int", "", "number of calls, other trace"),
    ("calls_delta", "int", "", "other minus baseline"),
)
OPERATORS: Mapping[str, str] = {
    "device_total": "GPU time of the work launched by it and by nested operators",
    "device_self": "GPU time of the work launched by its own calls",
    "host_total": "time on the host",
    "host_self": "host time minus that of nested operators and of its own calls",
}


class Side(NamedTuple):
    """What one trace contributes: names, and one value per name for each measure."""

    names: list[str]
    measures: Mapping[str, Floats]


def diff_events(baseline: Context, other: Context, *, other_step: int | None = None, **options: Any) -> Result:
    """Compares all events by name: see the view diff_event_names. Raises ViewError.

    other_step: the step of the other trace, if it differs.
    """
    own = options if other_step is None else {**options, "step": other_step}
    partials = [(0, diff_event_names.partial(baseline, **options)), (1, diff_event_names.partial(other, **own))]
    return diff_event_names.combine(partials, **options)


def _events(partials: Sequence[tuple[int, Side]]) -> Answer:
    return Answer(by_name(partials, MEASURES, ("total",)))


def side_of(context: Context, name: Ints32, duration: Ints, short_names: bool) -> Side:
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


def _all(context: Context, device: EventsOn, step: int | None) -> tuple[Ints32, Ints]:
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
        raise ViewError(f"view diff_event_names: the trace has no step {step}; available: {found.number.tolist()}")
    inside = np.zeros(len(time), np.bool_)
    for row in rows.tolist():
        inside |= (time >= found.start[row]) & (time < found.end[row])
    return name[inside], duration[inside]


def _suffix(unit: str) -> str:
    return f"_{unit}" if unit else ""


def measure_columns(name: str, unit: str, meaning: str) -> tuple[tuple[str, Any, str, str], ...]:
    """Returns the four columns of one measure."""
    return (
        (f"{name}_baseline{_suffix(unit)}", "float", unit, f"{meaning}, baseline (0 if missing)"),
        (f"{name}_other{_suffix(unit)}", "float", unit, f"{meaning}, other trace (0 if missing)"),
        (f"{name}_delta{_suffix(unit)}", "float", unit, "other minus baseline"),
        (f"{name}_delta_pct", "float", "%", "delta as a share of the baseline; missing if the baseline is 0"),
    )


@view(
    "diff_event_names",
    columns(*NAME, *CALLS, *measure_columns("total", "us", "sum of the durations")),
    reduce=_events,
)
def diff_event_names(
    context: Context,
    *,
    device: EventsOn = "all",
    step: int | None = None,
    short_names: bool = False,
) -> Side:
    """All events of two traces by name: their count, their total time, and what changed.

    Options:
    - device: "cpu" for operators, annotations and calls; "gpu" for kernels, copies and fills; "all" for both.
    - step: only events that began in this training step (N of ProfilerStep#N); GPU work belongs to the step of the call
      that launched it. Without this option, all events count.
    - short_names: drop template arguments, parameters and return types of kernels, so that variants of a kernel share a
      row (HTA's use_short_name).
    """
    return side_of(context, *_all(context, device, step), short_names)


def both_sides(partials: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
    """Returns the contributions of the two traces. Raises ViewError if there are more or fewer."""
    if len(partials) != 2:
        raise ViewError(f"a diff needs exactly two traces, not {len(partials)}: name the baseline and the other trace")
    return partials[0][1], partials[1][1]


def by_name(
    partials: Sequence[tuple[int, Side]], measures: Mapping[str, str], order: Sequence[str]
) -> Mapping[str, Any]:
    """Returns all names of both sides, sorted by change: by the first measure in `order` that changed."""
    first, second = both_sides(partials)
    names = list(dict.fromkeys([*first.names, *second.names]))
    place = {name: number for number, name in enumerate(names)}
    full = []
    for side in (first, second):
        at = [place[name] for name in side.names]
        full.append({key: _spread(side.measures[key], at, len(names)) for key in ("calls", *measures)})
    values: dict[str, Any] = {}
    for key in measures:
        values |= delta_columns(key, "us", full[0][key], full[1][key])
    calls = [side["calls"].astype(np.int64) for side in full]
    values |= {"calls_baseline": calls[0], "calls_other": calls[1], "calls_delta": calls[1] - calls[0]}
    values["change"] = call_count_change(calls[0], calls[1])
    values["name"] = np.array(names, object)
    keys = [np.array(names), *(-np.abs(values[f"{key}_delta_us"]) for key in reversed(order))]
    sorted_rows = np.lexsort(keys) if names else np.empty(0, np.int64)
    return {key: column[sorted_rows] for key, column in values.items()}


def _spread(values: Floats, at: Sequence[int], count: int) -> Floats:
    full = np.zeros(count)
    full[list(at)] = values
    return full


def delta_columns(name: str, unit: str, baseline: Floats, other: Floats) -> dict[str, Floats]:
    """Returns the values of the four columns of one measure."""
    delta = other - baseline
    share = np.full(len(delta), np.nan)
    np.divide(100 * delta, baseline, out=share, where=baseline != 0)
    suffix = _suffix(unit)
    return {
        f"{name}_baseline{suffix}": baseline,
        f"{name}_other{suffix}": other,
        f"{name}_delta{suffix}": delta,
        f"{name}_delta_pct": share,
    }


def call_count_change(baseline: Ints, other: Ints) -> Objects:
    """Returns how the number of calls changed, by HTA's rule (TraceDiff.ops_diff)."""
    found = np.full(len(baseline), UNCHANGED, object)
    found[other > baseline] = INCREASED
    found[other < baseline] = DECREASED
    found[(baseline == 0) & (other > 0)] = ADDED
    found[(other == 0) & (baseline > 0)] = DELETED
    return found


def _schema(measures: Mapping[str, str]) -> tuple[ResultColumn, ...]:
    rows: list[tuple[str, Any, str, str]] = [*NAME, *CALLS]
    for name, meaning in measures.items():
        rows += measure_columns(name, "us", meaning)
    return columns(*rows)


OPERATOR_TOTALS = _schema(OPERATORS)
