"""Two traces beside each other: operators, kernels and steps by name, with what changed.

Theory of operation
    Each view makes of every trace a small table by name; its reduce puts exactly two of them beside each other.
    `compare` does that for two contexts: compare(diff_operators, baseline, other).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.op_times import op_times
from kineto_trace.arrays.row_groups import group
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, gpu, steps
from kineto_trace.view_api.result import Result, ResultColumn, columns
from kineto_trace.view_api.view import Answer, View, view

ADDED, DELETED, INCREASED, DECREASED, UNCHANGED = "added", "deleted", "increased", "decreased", "unchanged"
NS_PER_US = 1000

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Side(NamedTuple):
    """What one trace contributes: names, and for each measure one value per name."""

    names: list[str]
    measures: Mapping[str, Floats]


def measured(name: str, unit: str, meaning: str) -> tuple[tuple[str, Any, str, str], ...]:
    """Returns the four columns of one measure."""
    return (
        (f"{name}_baseline{_suffix(unit)}", "float", unit, f"{meaning}, baseline (0 if it is missing)"),
        (f"{name}_other{_suffix(unit)}", "float", unit, f"{meaning}, other trace (0 if it is missing)"),
        (f"{name}_delta{_suffix(unit)}", "float", unit, "other less baseline"),
        (f"{name}_delta_pct", "float", "%", "delta as a share of the baseline; missing if the baseline is 0"),
    )


def _suffix(unit: str) -> str:
    return f"_{unit}" if unit else ""


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
    "device_total": "GPU time launched by it and by the operators inside it",
    "device_self": "GPU time launched by its own calls",
    "host_total": "time on the host",
    "host_self": "host time minus that of the operators inside it and of its own calls",
}
KERNELS: Mapping[str, str] = {"total": "time on the GPU", "mean": "mean time on the GPU"}


def compare(of: View, baseline: Context, other: Context, **options: Any) -> Result:
    """Returns one of the views below for two traces. Raises ViewError for unknown options."""
    return of.combine([(0, of.partial(baseline, **options)), (1, of.partial(other, **options))], **options)


def diff_ops(baseline: Context, other: Context) -> Result:
    """Compares operators by name: see the view diff_operators."""
    return compare(diff_operators, baseline, other)


def diff_kernels(baseline: Context, other: Context) -> Result:
    """Compares kernels by name: see the view diff_kernel_names."""
    return compare(diff_kernel_names, baseline, other)


def diff_steps(baseline: Context, other: Context) -> Result:
    """Compares training steps in order: see the view diff_step_times."""
    return compare(diff_step_times, baseline, other)


def _two(partials: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
    if len(partials) != 2:
        raise ViewError(f"a diff needs exactly two traces, not {len(partials)}: name the baseline and the other trace")
    return partials[0][1], partials[1][1]


def by_name(
    partials: Sequence[tuple[int, Side]], measures: Mapping[str, str], order: Sequence[str]
) -> Mapping[str, Any]:
    """All names of both sides; the largest change of the first measure of `order` that changed comes first."""
    first, second = _two(partials)
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
    values["change"] = change(calls[0], calls[1])
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


def change(baseline: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
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
        rows += measured(name, "us", meaning)
    return columns(*rows)


def _operators(partials: Sequence[tuple[int, Side]]) -> Answer:
    return Answer(by_name(partials, OPERATORS, ("device_total", "host_total")))


@view("diff_operators", _schema(OPERATORS), reduce=_operators)
def diff_operators(context: Context) -> Side:
    """Operators of two traces by name: the calls and times of both, and what changed.

    Times are sums over all calls, as in the view `operators`. A name that is missing in one trace has zeros there. Rows
    with the largest change of device time come first, then those with the largest change of host time.
    """
    table, times = context.trace.table("cpu_op"), context.get(op_times)
    groups = group([table["name"]])
    measures = {name: groups.sums(getattr(times, name)) / NS_PER_US for name in OPERATORS}
    names = [context.trace.strings[number] for number in table["name"][groups.first].tolist()]
    return Side(names, {"calls": groups.sizes().astype(np.float64), **measures})


def _kernels(partials: Sequence[tuple[int, Side]]) -> Answer:
    return Answer(by_name(partials, KERNELS, ("total",)))


@view("diff_kernel_names", _schema(KERNELS), reduce=_kernels)
def diff_kernel_names(context: Context) -> Side:
    """Kernels of two traces by name: calls, total and mean time of both, and what changed.

    A name that is missing in one trace has zeros there. Rows with the largest change of total time come first.
    """
    activity = context.get(gpu)
    rows = np.flatnonzero(activity.kind == KERNEL)
    groups = group([activity.name[rows]])
    total = groups.sums((activity.end - activity.start)[rows]) / NS_PER_US
    calls = groups.sizes().astype(np.float64)
    names = [context.trace.strings[number] for number in activity.name[rows][groups.first].tolist()]
    return Side(names, {"calls": calls, "total": total, "mean": total / np.maximum(calls, 1)})


def _steps(partials: Sequence[tuple[int, tuple[Any, Floats]]]) -> Answer:
    (first_numbers, first), (second_numbers, second) = _two(partials)
    count = max(len(first), len(second))
    both = [np.concatenate([side, np.full(count - len(side), np.nan)]) for side in (first, second)]
    numbers = [[*side, *[None] * (count - len(side))] for side in (first_numbers, second_numbers)]
    notes = []
    if len(first) and len(second):
        both = [np.append(side, own.mean()) for side, own in zip(both, (first, second), strict=True)]
        numbers = [[*side, None] for side in numbers]
        labels = [*(str(place + 1) for place in range(count)), "mean"]
    else:
        labels = [str(place + 1) for place in range(count)]
        notes.append("a trace has no training steps (ProfilerStep#N): there is nothing to compare")
    values = delta_columns("duration", "us", both[0], both[1])
    return Answer({"step": labels, "number_baseline": numbers[0], "number_other": numbers[1], **values}, notes)


@view(
    "diff_step_times",
    columns(
        ("step", "text", "", "n-th step of each trace, counted from 1; mean: over all steps of each trace"),
        ("number_baseline", "int", "", "N of ProfilerStep#N, baseline"),
        ("number_other", "int", "", "N of ProfilerStep#N, other trace"),
        *measured("duration", "us", "time of the step on the host"),
    ),
    reduce=_steps,
)
def diff_step_times(context: Context) -> tuple[list[int], Floats]:
    """Training steps of two traces in order, and their means.

    The values of a step that one trace does not have are missing.
    """
    found = context.get(steps)
    return found.number.tolist(), (found.end - found.start) / NS_PER_US
