"""Every step of every rank: how long it took, and for how long the rank waited in it for others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.distributed.rank_views import HostSteps, counted_alike, rank_steps
from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import match, rank_collectives
from kineto_trace.collectives.rank_waits import missing_waits, waits
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING
from kineto_trace.structure.steps.step_pace import paced_steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
WITHOUT_STEPS = "all"  # the name of the only step of a trace without any


@dataclass(frozen=True, slots=True)
class StepsOfRank:
    """What one rank contributes. place: for each of `found` the place of its measured step in `steps`; -1: none."""

    steps: HostSteps
    found: RankCollectives
    place: Ints


def _steps_of_rank(context: Context) -> StepsOfRank:
    found, own, whole = context.get(rank_collectives), context.get(rank_steps), context.get(paced_steps)
    if own.names == (WITHOUT_STEPS,):
        return StepsOfRank(own, found, np.zeros(len(found), np.int64))
    number = found.step if (found.step != NOTHING).any() else whole.number_at(found.start)
    at = {name: place for place, name in enumerate(own.names)}
    places = [at.get(str(each), NOTHING) for each in number.tolist()]
    return StepsOfRank(own, found, np.array(places, np.int64))


def _rows(partials: Sequence[tuple[int, StepsOfRank]]) -> Answer:
    matched = match([(rank, part.found) for rank, part in partials], "clock")
    found = waits(matched)
    alike, notes = counted_alike([(rank, part.steps) for rank, part in partials])
    place = np.concatenate([np.empty(0, np.int64), *(part.place for _, part in partials)])
    rank, step = matched.rank[found.row], place[found.row]
    values: dict[str, list[Any]] = {column.name: [] for column in rank_step_table.columns}
    for number, (name, steps) in enumerate(alike):
        waited = _waited(step[rank == number], found.ns[rank == number], len(steps.names))
        order = _in_order(steps.names)
        values["rank"] += [name] * len(order)
        values["step"] += [steps.names[at] for at in order]
        values["start_ns"] += steps.start[order].tolist()
        values["step_us"] += steps.us[order].tolist()
        values["waiting_us"] += waited[order].tolist()
    return Answer(values, [*matched.notes, *notes, *missing_waits(matched, found)])


def _waited(step: Ints, ns: Ints, count: int) -> Floats:
    """How long one rank waited in each of its steps (us); NaN in those without a collective of which it is known."""
    inside = step != NOTHING
    total = np.bincount(step[inside], ns[inside], count) / 1000
    known = np.bincount(step[inside], minlength=count) > 0
    return np.where(known, total, np.nan)


def _in_order(names: Sequence[str]) -> list[int]:
    """The places of the steps in the order of their numbers."""
    keys = [(not name.isdecimal(), int(name) if name.isdecimal() else 0) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


@view(
    "rank_steps",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("step", "text", "", 'number of the step; "all": the trace has no steps'),
        ("start_ns", "int", "ns", "Unix time at which it began, on the clock of the job as far as it was measured"),
        ("step_us", "float", "us", "length of the step on the host"),
        (
            "waiting_us",
            "float",
            "us",
            "time in collectives of the step beyond that of the rank that came last; missing: not known",
        ),
    ),
    reduce=_rows,
    nothing="the traces have no complete steps",
)
def rank_step_table(context: Context) -> StepsOfRank:
    """Every measured step of every rank: how long it took on the host, and how long the rank waited in it.

    Waiting is that of the view ranks, step by step: it is derived from durations alone, so clocks do not matter, and
    collectives count for the step in which they were launched. Ranks that count their steps differently are mapped to
    the numbers of the first rank by the times at which steps began. Steps that the recording cut off have no rows, nor
    have first ones that do not show the pace (view ranks). Rows are ordered by rank and step.
    """
    return _steps_of_rank(context)
