"""Which ranks the others wait for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.intervals import union
from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import (
    AlignBy,
    Matched,
    instances,
    match,
    rank_collectives,
    skew_uncertainty,
)
from kineto_trace.collectives.rank_waits import lasts, missing_waits, waits
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
LEAST = 0.02  # of the time from the first to the last collective: less is no straggler
ABOVE_OTHERS = 2.0  # times what the others waited for the middle one of the other ranks: less is chance
Steps = int | str | Sequence[int] | None


def wanted_steps(given: Steps) -> set[int] | None:
    """The numbers of the steps; None: all. Raises ViewError."""
    if given is None:
        return None
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ViewError(f"option steps: {given!r} is not a list of numbers; expected for example 3,4,5")
        return {int(part) for part in parts}
    return {given} if isinstance(given, int) else set(given)


def _rows(
    partials: Sequence[tuple[int, Any]],
    *,
    steps: Steps = None,
    num_candidates: int = 2,
    align: AlignBy = "auto",
) -> Answer:
    wanted, candidates = wanted_steps(steps), max(1, num_candidates)
    matched = match(partials, align)
    found = instances(matched)
    step = matched.step[np.unique(matched.instance, return_index=True)[1]]  # as its first rank counts
    several = found.seen > 1
    if wanted is not None:
        if not wanted & set(step.tolist()):
            known = sorted(set(step.tolist()) - {NOTHING})
            raise ViewError(f"no collective was launched in the steps {sorted(wanted)}; available: {known}")
        several &= np.isin(step, list(wanted))
    count = len(matched.ranks)
    late = matched.start - found.start[matched.instance]
    caused = np.where(several, lasts(matched, found).caused, 0)
    last = found.last_start
    own = several[matched.instance]
    blamed = matched.rank[found.row]
    caused_by = np.array(
        [union(*_waited_for(last, caused, blamed == place)).length() for place in range(count)], np.float64
    )
    times = np.bincount(blamed[caused > 0], minlength=count)
    seen = np.bincount(matched.rank[own], minlength=count)
    lateness = np.bincount(matched.rank[own], late[own], count)
    mean_late = lateness / np.maximum(seen, 1)
    apart = skew_uncertainty(matched)[matched.instance[own]]
    uncertainty = np.bincount(matched.rank[own], apart, count) / np.where(seen > 0, seen, np.nan)
    numbers, place = np.unique(step, return_inverse=True)
    by_step = np.zeros((len(numbers), count), np.int64)
    np.add.at(by_step, (place, blamed), caused)
    order = np.argsort(-caused_by, kind="stable")
    ranks = np.array(matched.ranks, np.int64)
    least = np.maximum(LEAST * _span(matched, several), ABOVE_OTHERS * _middle_of_others(caused_by))
    named = (np.arange(count) < candidates) & (caused_by > least)[order]
    values = {
        "rank": ranks[order],
        "candidate": named,
        "late_steps": _late_steps(by_step, candidates)[order],
        "late_collectives": times[order],
        "caused_us": caused_by[order] / 1000.0,
        "mean_late_us": mean_late[order] / 1000.0,
        "uncertainty_us": uncertainty[order] / 1000.0,
    }
    notes = [*matched.notes, *matched.clock_notes]
    doubtful = [str(matched.ranks[at]) for at in order[named] if 0 < mean_late[at] < uncertainty[at]]
    if doubtful:
        notes.append(
            f"rank {', '.join(doubtful)}: mean_late_us is below the uncertainty of the clocks; the view rank_waits "
            "needs none"
        )
    if not several.any():
        notes += missing_waits(matched, waits(matched, found))
    return Answer(values, notes)


def _waited_for(last: Ints, caused: Ints, chosen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The stretches in which the others waited for one rank: they end when it begins."""
    return last[chosen] - caused[chosen], last[chosen]


def _middle_of_others(values: Floats) -> Floats:
    """For each rank the median of the other ranks' values, of two middle ones the smaller; 0 if there are none."""
    return np.array([np.sort(np.delete(values, at))[: len(values) // 2][-1:].sum() for at in range(len(values))])


def _span(matched: Matched, several: npt.NDArray[np.bool_]) -> int:
    """The time (ns) from the first to the last of these collectives."""
    own = several[matched.instance]
    return int(matched.end[own].max() - matched.start[own].min()) if own.any() else 0


def _late_steps(by_step: Ints, candidates: int) -> Ints:
    """For each rank: in how many steps it is among those that cost the others most."""
    if not by_step.size:
        return np.zeros(by_step.shape[1], np.int64)
    rank_of = np.argsort(np.argsort(-by_step, axis=1, kind="stable"), axis=1, kind="stable")
    found: Ints = ((rank_of < candidates) & (by_step > 0) & (2 * by_step >= by_step.max(axis=1)[:, None])).sum(0)
    return found


@view(
    "stragglers",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        (
            "candidate",
            "bool",
            "",
            "whether the others waited for the rank for a relevant time, and for few others longer",
        ),
        ("late_steps", "int", "", "number of steps in which it was among those that the others waited for most"),
        (
            "late_collectives",
            "int",
            "",
            "number of collectives that it began last, by more than the doubt of the clocks",
        ),
        ("caused_us", "float", "us", "time in which the others waited in these collectives for this rank alone"),
        ("mean_late_us", "float", "us", "mean time by which it began a collective later than the first rank"),
        ("uncertainty_us", "float", "us", "maximum error of mean_late_us due to the clocks, in either direction"),
    ),
    reduce=_rows,
)
def stragglers(context: Context) -> RankCollectives:
    """The ranks that the others wait for, the most expensive ones first.

    All collectives that appear on several ranks count. The rank that begins one last is late, if it is behind the last
    but one by more than the doubt of the clocks. That costs the group the time between these two starts, or what the
    others waited in the collective if that is less; waits at the same time count once. A rank is a candidate if the
    others waited for it for more than 2 % of the time from the first to the last collective, and more than twice as
    long as for the middle one of the other ranks: ranks that are late by turns are none. What the job would gain
    without it is told by the view `rank_what_if`.

    Options:
    - steps: numbers of steps such as "3,4,5"; all if not given.
    - num_candidates: how many ranks are marked as candidates at most.
    - align: how the clocks of the ranks are compared, as in the view `collectives`.
    """
    return context.get(rank_collectives)
