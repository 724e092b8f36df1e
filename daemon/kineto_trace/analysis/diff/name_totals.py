"""Totals of two traces by name beside each other, as the TensorBoard plug-in and HTA compare traces."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.errors import ViewError
from kineto_trace.view_api.result import ResultColumn, columns

ADDED, DELETED, INCREASED, DECREASED, UNCHANGED = "added", "deleted", "increased", "decreased", "unchanged"

Floats = npt.NDArray[np.float64]


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


def two(partials: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
    """Returns what the two traces contribute. Raises ViewError if there are more or fewer."""
    if len(partials) != 2:
        raise ViewError(f"a diff needs exactly two traces, not {len(partials)}: name the baseline and the other trace")
    return partials[0][1], partials[1][1]


def by_name(
    partials: Sequence[tuple[int, Side]], measures: Mapping[str, str], order: Sequence[str]
) -> Mapping[str, Any]:
    """All names of both sides; the largest change of the first measure of `order` that changed comes first."""
    first, second = two(partials)
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


OPERATOR_TOTALS = _schema(OPERATORS)
