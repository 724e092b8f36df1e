"""Which ranks the others wait for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import instances, match, rank_collectives, skew_uncertainty
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
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
    align: str = "auto",
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
    # what the last one costs: its start less that of the one before it
    other = np.full(len(found.seen), np.iinfo(np.int64).min)
    rest = np.ones(len(matched), np.bool_)
    rest[found.row] = False
    np.maximum.at(other, matched.instance[rest], matched.start[rest])
    caused = np.where(several, found.last_start - other, 0)
    own = several[matched.instance]
    blamed = matched.rank[found.row[several]]
    caused_by = np.bincount(blamed, caused[several], count)
    times = np.bincount(blamed[caused[several] > 0], minlength=count)
    seen = np.bincount(matched.rank[own], minlength=count)
    lateness = np.bincount(matched.rank[own], late[own], count)
    mean_late = lateness / np.maximum(seen, 1)
    apart = skew_uncertainty(matched)[matched.instance[own]]
    uncertainty = np.bincount(matched.rank[own], apart, count) / np.where(seen > 0, seen, np.nan)
    numbers, place = np.unique(step, return_inverse=True)
    by_step = np.zeros((len(numbers), count), np.int64)
    np.add.at(by_step, (place[several], blamed), caused[several])
    order = np.argsort(-caused_by, kind="stable")
    ranks = np.array(matched.ranks, np.int64)
    values = {
        "rank": ranks[order],
        "candidate": (np.arange(count) < candidates) & (caused_by[order] > 0),
        "late_steps": _late_steps(by_step, candidates)[order],
        "late_collectives": times[order],
        "caused_us": caused_by[order] / 1000.0,
        "mean_late_us": mean_late[order] / 1000.0,
        "uncertainty_us": uncertainty[order] / 1000.0,
    }
    notes = [*matched.notes, *matched.clock_notes]
    doubtful = [str(matched.ranks[at]) for at in order[:candidates] if 0 < mean_late[at] < uncertainty[at]]
    if doubtful:
        notes.append(
            f"rank {', '.join(doubtful)}: mean_late_us is below the uncertainty of the clocks; the view rank_waits "
            "needs none"
        )
    if not several.any():
        notes.append("no collective appears on more than one rank, so waiting cannot be measured")
    return Answer(values, notes)


def _late_steps(by_step: Ints, candidates: int) -> Ints:
    """For each rank: in how many steps it is among those that cost the others most."""
    if not by_step.size:
        return np.zeros(by_step.shape[1], np.int64)
    rank_of = np.argsort(np.argsort(-by_step, axis=1, kind="stable"), axis=1, kind="stable")
    found: Ints = ((rank_of < candidates) & (by_step > 0)).sum(0)
    return found


@view(
    "stragglers",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("candidate", "bool", "", "whether the rank is among those that the others waited for most"),
        ("late_steps", "int", "", "number of steps in which it was among these"),
        ("late_collectives", "int", "", "number of collectives that it began last"),
        ("caused_us", "float", "us", "sum over these collectives of how much later it began than the last but one"),
        ("mean_late_us", "float", "us", "mean time by which it began a collective later than the first rank"),
        ("uncertainty_us", "float", "us", "maximum error of mean_late_us due to the clocks, in either direction"),
    ),
    reduce=_rows,
)
def stragglers(context: Context) -> RankCollectives:
    """The ranks that the others wait for, the most expensive ones first.

    All collectives that appear on several ranks count, matched by process group and sequence number. The rank that
    begins one last is late, and costs the group the time between its start and that of the last but one.

    Options:
    - steps: numbers of steps such as "3,4,5"; all if not given.
    - num_candidates: how many ranks are marked as candidates.
    - align: how the clocks of the ranks are compared, as in the view `collectives`.
    """
    return context.get(rank_collectives)
