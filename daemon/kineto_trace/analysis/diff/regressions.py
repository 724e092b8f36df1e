"""Decides whether a diff is acceptable: rows that became slower beyond the noise and by more than a limit.

regressions(diff_steps(before, after), 5)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kineto_trace.analysis.diff.diff_views import NEW, NOISE, SLOWER, UNKNOWN
from kineto_trace.view_api.result import Result, columns, make_result

RELEVANT_PCT = 0.1  # of the step: a row that takes less more than before is no regression


CHECKS = columns(
    ("compared", "text", "", "what was compared: steps, ops, kernels and so on"),
    ("row", "text", "", "row of it that has the limit; the name of the view: all rows"),
    ("outcome", "text", "", "passed, failed, or unknown: cannot be judged"),
    ("message", "text", "", "the figures in words"),
)


class CheckOutcome(StrEnum):
    """What a check found. unknown: cannot be judged, which is no pass."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison with a limit. row: what was compared. message: the figures, for people."""

    row: str
    outcome: CheckOutcome
    message: str


def regressions(result: Result, limit_pct: float, *, only: str = "") -> list[Check]:
    """Returns a check for each row that is slower by more than the limit, one for what cannot be judged, or one passed.

    A row that is looked at alone cannot be judged if its interval is so wide that it reaches the limit although the
    difference is within the noise: a regression of that size would not be found. Of several rows, the message counts
    those with such an interval.

    Rows fail whose difference is beyond the noise, at least limit_pct of the baseline, and at least RELEVANT_PCT of the
    step. only: look at the row of this name alone, whatever its share.
    """
    rows = [row for row in result.rows() if not only or row["name"] == only]
    unknown = [row for row in rows if row["verdict"] == UNKNOWN]
    found = [
        Check(_name(row), CheckOutcome.FAILED, described(row)) for row in rows if _slower(row, limit_pct, bool(only))
    ]
    if unknown or not rows:
        why = "; ".join(result.notes) or "nothing was recorded that could be compared"
        return [*found, Check(only or result.view, CheckOutcome.UNKNOWN, f"{len(unknown)} of {len(rows)} rows: {why}")]
    if found:
        return found
    if only:
        return [_judged(row, limit_pct) for row in rows]
    told = f"none of {len(rows)} rows is slower by {limit_pct:g} % or more beyond the noise"
    hidden = sum(_relevant(row, limit_pct) and _hides(row, limit_pct) for row in rows)
    if hidden:
        told += f"; in {hidden} of them the noise would hide that: record more steps"
    return [Check(result.view, CheckOutcome.PASSED, told)]


def _judged(row: Mapping[str, Any], limit_pct: float) -> Check:
    """The outcome for a row that is not slower beyond the noise by the limit."""
    if _hides(row, limit_pct):
        told = f"{described(row)}; cannot be judged: the noise would hide a regression of {limit_pct:g} %"
        return Check(_name(row), CheckOutcome.UNKNOWN, f"{told}: record more steps")
    return Check(_name(row), CheckOutcome.PASSED, described(row))


def checks_result(checks: Mapping[str, Sequence[Check]]) -> Result:
    """Returns the checks of each comparison as rows."""
    every = [(name, check) for name, found in checks.items() for check in found]
    values = {
        "compared": [name for name, _ in every],
        "row": [check.row for _, check in every],
        "outcome": [str(check.outcome) for _, check in every],
        "message": [check.message for _, check in every],
    }
    return make_result("diff_checks", CHECKS, values)


def described(row: Mapping[str, Any]) -> str:
    """Says in one line how a row changed, with its interval."""
    text = f"{_ms(row['baseline_us'])} → {_ms(row['other_us'])} per {row['per']}"
    if row["delta_pct"] is not None:
        text += f", {row['delta_pct']:+.1f} %"
        if row["delta_low_us"] is not None:
            low, high = (100 * row[f"delta_{end}_us"] / row["baseline_us"] for end in ("low", "high"))
            text += f" (interval {low:+.1f} % to {high:+.1f} %)"
    return f"{text}: {row['verdict']}"


def _slower(row: Mapping[str, Any], limit_pct: float, planned: bool) -> bool:
    if row["verdict"] not in (SLOWER, NEW):
        return False
    grown = row["delta_pct"] is None or row["delta_pct"] >= limit_pct
    return grown and (planned or (row["step_delta_pct"] or 0) >= RELEVANT_PCT)


def _hides(row: Mapping[str, Any], limit_pct: float) -> bool:
    """Tells whether a regression of this size may be there, and would not have been found in this noise."""
    high, base = row["delta_high_us"], row["baseline_us"]
    if row["verdict"] != NOISE or high is None or not base:
        return False
    reach = high - row["delta_us"]  # half of the interval
    return bool(100 * min(high, reach) / base >= limit_pct)


def _relevant(row: Mapping[str, Any], limit_pct: float) -> bool:
    """Tells whether the step would notice a regression of this size."""
    if not row["step_delta_pct"] or not row["delta_us"]:
        return False
    step_us = 100 * row["delta_us"] / row["step_delta_pct"]
    return bool(limit_pct * row["baseline_us"] / step_us >= RELEVANT_PCT)


def _name(row: Mapping[str, Any]) -> str:
    return str(row["name"]) if row["time"] == "step" else f"{row['name']} ({row['time']} time)"


def _ms(us: float) -> str:
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if us >= factor:
            return f"{us / factor:.4g} {unit}"
    return f"{us:.4g} µs"
