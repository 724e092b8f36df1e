"""Views of the ranks of a job and of their steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kineto_trace.analysis.distributed.distributed_views import rank_overlap
from kineto_trace.analysis.distributed.rank_pace import RankPace, rank_pace, slower_host
from kineto_trace.analysis.overview.step_breakdown import host_ranges
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.collectives.rank_clocks import MAX_LISTED, RankCollectives
from kineto_trace.collectives.rank_matching import (
    MatchedCollectives,
    Waits,
    match,
    missing_waits,
    rank_collectives,
    waits,
)
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import steps
from kineto_trace.structure.step_pace import paced_steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

# Thresholds of the verdict on a rank: shares of a mean step.
WAITED_FOR = 0.02  # the others wait for it at least this long
ABOVE_OWN = 2.0  # times as long as it waits for them: else its delay is not its own
SLOWER = 0.03  # its computation takes longer than the median rank's by this much
WAITS = 0.1  # it waits at least this long
_LATE = "late: others wait for it, although it computes no longer than they do"
WITHOUT_STEPS = "all"  # the name of the only step of a trace without any


@dataclass(frozen=True, slots=True)
class HostSteps:
    """The measured steps of one rank on the host, and the number of others: cut off, or left out.

    start: when they began, Unix ns with the measured offset.
    """

    names: tuple[str, ...]
    us: Floats
    start: Ints
    cut: int
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank.

    work: per step on its GPU, in us; see RankOverlap.
    computes: whether kernels ran on it.
    in_steps: for each of `found` whether it belongs to a measured step; without steps all do.
    """

    host: str
    gpu: str
    steps: HostSteps
    work: Floats
    computes: bool
    found: RankCollectives
    in_steps: Flags
    pace: RankPace


@dataclass(frozen=True, slots=True)
class StepsOfRank:
    """What one rank contributes. place: for each of `found` the place of its measured step in `steps`, or -1."""

    steps: HostSteps
    found: RankCollectives
    place: Ints


def rank_steps(context: Context) -> HostSteps:
    """Returns the measured steps of one rank."""
    every, offset = context.get(host_ranges), context.trace.target.clock_offset_ns or 0
    ranges = every.measured()
    length = (ranges.end - ranges.start) / 1000
    return HostSteps(ranges.name, length, ranges.start + offset, len(every.cut), len(every.untypical))


def with_common_numbers(partials: Sequence[tuple[int, HostSteps]]) -> tuple[list[tuple[int, HostSteps]], list[str]]:
    """Returns the steps of all ranks by the numbers of the first one, and notes on the changes.

    Processes may start counting steps at different times. Ranks that share no number with the first rank get the number
    of the step that began nearest to theirs.
    """
    numbered = [(rank, part) for rank, part in partials if part.names and all(name.isdecimal() for name in part.names)]
    if not numbered:
        return list(partials), []
    first, reference = numbered[0]
    known = np.array([int(name) for name in reference.names])
    found, moved = dict(partials), []
    for rank, part in numbered[1:]:
        own = np.array([int(name) for name in part.names])
        if np.isin(own, known).any():
            continue
        nearest = np.abs(reference.start[:, None] - part.start[None, :]).argmin(axis=0)
        change = int(np.median(known[nearest] - own))
        found[rank] = replace(part, names=tuple(str(number + change) for number in own.tolist()))
        moved.append(f"{-change:+d} on rank {rank}")
    if not moved:
        return list(partials), []
    shown = ", ".join(moved[:MAX_LISTED]) + (", …" if len(moved) > MAX_LISTED else "")
    note = (
        f"ranks number their steps differently; steps are matched by time and have the numbers of rank {first} "
        f"(original offsets: {shown})"
    )
    return [(rank, found[rank]) for rank, _ in partials], [note]


def _rank_facts(context: Context) -> RankFacts:
    trace = context.trace
    used = {int(number) for kind in GPU_TABLES for number in unique_values(trace.table(kind)["device"])}
    known = trace.devices_by_number
    names = sorted({str(known[number]["name"]) for number in used & known.keys() if known[number].get("name")})
    return RankFacts(
        host=trace.target.host,
        gpu=", ".join(names),
        steps=context.get(rank_steps),
        work=context.get(rank_overlap).overlap,
        computes=len(trace.table("kernel")) > 0,
        found=context.get(rank_collectives),
        in_steps=_in_whole_steps(context),
        pace=context.get(rank_pace),
    )


def _in_whole_steps(context: Context) -> Flags:
    """Returns for each collective of a rank whether it was launched in a measured step.

    If the host is so far ahead that it launched all of them before the first step of the trace, their start counts
    instead.
    """
    found, every, whole = context.get(rank_collectives), context.get(steps), context.get(paced_steps)
    if not len(every):
        return np.ones(len(found), np.bool_)
    number = found.step if (found.step != NOTHING).any() else every.number_at(found.start)
    inside: Flags = np.isin(number, whole.number)
    return inside


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else float("nan")


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _slowest(partials: Sequence[tuple[int, HostSteps]]) -> Ints:
    """Returns for each rank the number of steps shared by several ranks in which it was the slowest."""
    times: dict[str, list[tuple[float, int]]] = {}
    for place, (_, part) in enumerate(partials):
        for name, us in zip(part.names, part.us.tolist(), strict=True):
            times.setdefault(name, []).append((us, -place))
    longest = [-max(each)[1] for each in times.values() if len(each) > 1]
    return np.bincount(np.array(longest, np.int64), minlength=len(partials))


def _counted(matched: MatchedCollectives, found: Waits, inside: Flags) -> tuple[Waits, Waits]:
    """Returns the waits in complete steps of the waiting rank, and those in complete steps of the rank that
    came last.
    """
    last = np.zeros(int(matched.instance.max(initial=-1)) + 1, np.bool_)
    culprits = found.row[matched.rank[found.row] == found.culprit]
    last[matched.instance[culprits]] = inside[culprits]
    return _only(found, inside[found.row]), _only(found, last[matched.instance[found.row]])


def _only(found: Waits, rows: Flags) -> Waits:
    return Waits(found.row[rows], found.ns[rows], found.culprit[rows])


def _waiting(matched: MatchedCollectives, found: Waits, inside: Flags) -> tuple[Floats, Floats]:
    """Returns for each rank how long (us) it waited, and how long the others waited for it on average, in complete
    steps.

    NaN if it has no collective in them for which this is known.
    """
    count = len(matched.ranks)
    own, its = _counted(matched, found, inside)
    known = np.bincount(matched.rank[own.row], minlength=count) > 0
    waited = np.bincount(matched.rank[own.row], own.ns, count)
    others = np.maximum(np.bincount(matched.instance[its.row])[matched.instance[its.row]] - 1, 1)
    caused = np.bincount(its.culprit, its.ns / others, count) if len(its.row) else np.zeros(count)
    return np.where(known, waited, np.nan) / 1000.0, np.where(known, caused, np.nan) / 1000.0


def _about(step: float, slower_pct: float, waiting: float, waited_for: float, most: int | None) -> str:
    """Returns the verdict on a rank as text."""
    if not step > 0:
        return ""
    if waited_for >= WAITED_FOR * step:
        if slower_pct >= 100 * SLOWER:
            return f"slow: it computes {slower_pct:.0f} % longer than the median rank, and others wait for it"
        # else it is late because it waited for others, or ranks take turns being late
        late = ABOVE_OWN * waiting < waited_for
        if late and not np.isfinite(slower_pct):
            return "late: others wait for it; how long it computes is unknown"
        if late:
            return f"{_LATE}; check its host (view idle_causes)"
    if waiting >= WAITS * step:
        share = f"for {100 * waiting / step:.0f} % of its step time" if waiting <= step else "longer than its steps"
        return f"waits {share}" + (f", mostly for rank {most}" if most is not None else "")
    return ""


def _late_host(about: str, place: int, paces: Sequence[RankPace], waited_for_us: float) -> str:
    """Returns the reason why a rank is late, if its host is slower. waited_for_us: how long each other rank waited for
    it.
    """
    if not about.startswith(_LATE):
        return about
    others = [pace for other, pace in enumerate(paces) if other != place]
    slow = slower_host(paces[place], others, 1e3 * waited_for_us)
    return about if slow is None else f"{_LATE}; {slow.about}"


def _rank_rows(partials: Sequence[tuple[int, RankFacts]]) -> Answer:
    matched = match([(rank, part.found) for rank, part in partials], "clock")
    found = waits(matched)
    inside = np.concatenate([np.empty(0, np.bool_), *(part.in_steps for _, part in partials)])
    waited, caused = _waiting(matched, found, inside)
    most = _most_waited_for(matched, _counted(matched, found, inside)[0])
    alike, counted = with_common_numbers([(rank, part.steps) for rank, part in partials])
    counts = np.array([len(part.steps.names) or np.nan for _, part in partials])
    computation = np.array(
        [_mean(part.work[:, 0] + part.work[:, 1]) if part.computes else float("nan") for _, part in partials]
    )
    if not any(part.computes for _, part in partials):
        counted = [
            *counted,
            "the traces have no GPU kernels: collectives are measured on the host, and computation is unknown",
        ]
    known = computation[np.isfinite(computation) & (computation > 0)]
    median = float(np.median(known)) if len(known) else float("nan")
    mean = np.array([_mean(part.steps.us) for _, part in partials])
    slower = 100 * (computation / median - 1)
    communication = np.array([_mean(part.work[:, 2]) for _, part in partials])
    exposed = np.where([part.computes for _, part in partials], communication, np.inf)
    alone = np.minimum(waited / counts, exposed)  # while it computes nothing
    others = np.array([np.fmax.reduce(np.delete(alone, at), initial=0.0) for at in range(len(alone))])
    waited_for = np.minimum(caused / counts, others)
    told = [_about(*each) for each in zip(mean, slower, alone, waited_for, most, strict=True)]
    paces = [part.pace for _, part in partials]
    values: dict[str, Any] = {
        "rank": matched.ranks,
        "host": [part.host or None for _, part in partials],
        "gpu": [part.gpu or None for _, part in partials],
        "steps": [len(part.steps.names) for _, part in partials],
        "step_us": mean,
        "step_p50_us": [_quantile(part.steps.us, 0.5) for _, part in partials],
        "step_p95_us": [_quantile(part.steps.us, 0.95) for _, part in partials],
        "step_max_us": [_quantile(part.steps.us, 1) for _, part in partials],
        "slowest_steps": _slowest(alike),
        "computation_us": computation,
        "slower_pct": slower,
        "communication_us": communication,
        "waiting_us": waited / counts,
        "waited_for_us": caused / counts,
        "about": [_late_host(text, place, paces, waited_for[place]) or None for place, text in enumerate(told)],
    }
    notes = [
        *missing_waits(matched, found),
        *_without_steps(partials),
        *_left_out(partials),
    ]
    notes += _outside_of_steps(matched.ranks, waited, counts, found)
    order = np.argsort(-caused / counts, kind="stable").tolist()
    return Answer(
        {name: [column[at] for at in order] for name, column in values.items()}, [*matched.notes, *counted, *notes]
    )


def _without_steps(partials: Sequence[tuple[int, RankFacts]]) -> list[str]:
    return [
        f"rank {rank} has no figures per step: none of its steps was recorded completely"
        for rank, part in partials
        if part.steps.cut and not part.steps.names
    ]


def _left_out(partials: Sequence[tuple[int, RankFacts]]) -> list[str]:
    """Returns notes on the ranks whose first steps are left out."""
    listed = [f"{part.steps.left_out} on rank {rank}" for rank, part in partials if part.steps.left_out]
    if not listed:
        return []
    shown = ", ".join(listed[:MAX_LISTED]) + (", …" if len(listed) > MAX_LISTED else "")
    return [f"first steps left out because they do not show the usual pace (see the view overview): {shown}"]


def _outside_of_steps(ranks: Sequence[int], waited: Floats, counts: Floats, found: Waits) -> list[str]:
    """Returns notes on ranks with complete steps whose waiting is unknown although ranks of the job waited."""
    if not len(found.row):
        return []
    return [
        f"rank {rank} shares no collective with other ranks in its complete steps, so its waiting is unknown"
        for rank, unknown in zip(ranks, np.isnan(waited) & ~np.isnan(counts), strict=True)
        if unknown
    ]


def _most_waited_for(matched: MatchedCollectives, found: Waits) -> list[int | None]:
    """Returns for each rank the one that it waited for longest."""
    count = len(matched.ranks)
    table = np.zeros((count, count))
    np.add.at(table, (matched.rank[found.row], found.culprit), found.ns)
    return [matched.ranks[row.argmax()] if row.max() > 0 else None for row in table]


@view(
    "ranks",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("host", "text", "", "host name"),
        ("gpu", "text", "", "model of the GPU that it uses"),
        ("steps", "int", "", "number of its measured steps"),
        ("step_us", "float", "us", "mean length of a step on the host"),
        ("step_p50_us", "float", "us", "median length of a step"),
        ("step_p95_us", "float", "us", "95th percentile of the length of a step"),
        ("step_max_us", "float", "us", "longest step"),
        ("slowest_steps", "int", "", "number of steps that took longest on this rank"),
        ("computation_us", "float", "us", "time per step in which kernels ran that do not communicate"),
        ("slower_pct", "float", "%", "by how much computation_us exceeds that of the median rank"),
        ("communication_us", "float", "us", "time per step in which kernels communicated and none computed"),
        ("waiting_us", "float", "us", "time per step in collectives, minus that of the last rank to join"),
        ("waited_for_us", "float", "us", "time per step that each other rank waited for this one, on average"),
        ("about", "text", "", "what is unusual about the rank: slow, late or waiting"),
    ),
    reduce=_rank_rows,
)
def rank_table(context: Context) -> RankFacts:
    """One row for each rank: its steps, how long it computes, how long it waits, and how long others wait for it.

    The ranks that the others wait for longest come first. Collectives make the steps of all ranks equally long, so
    computation_us and waited_for_us show which rank is slow. A rank that the others wait for, but that computes no
    longer than they do, is late because of its host. If the same operators take longer there than on the other ranks,
    and this explains at least a quarter of the waiting, the row says by how much.

    Incomplete steps do not count, nor do first steps that do not show the program's usual pace (see the view overview),
    nor the collectives launched in them. Waiting is derived from durations alone (see the view rank_waits), so clocks
    do not matter; other kernels may have run at the same time. A rank is called slow or late if the others wait for it
    for at least 2 % of a step: slow if its computation takes at least 3 % longer than the median rank's, otherwise
    late. But a rank that waits for at least half as long itself is not called late: either that wait made it late, or
    the ranks take turns being late. For these verdicts, waiting counts only while the waiting rank computes nothing.
    """
    return context.get(_rank_facts)


def _wait_rows(partials: Sequence[tuple[int, RankCollectives]]) -> Answer:
    matched = match(partials, "clock")
    found = waits(matched)
    count = len(matched.ranks)
    waiting = (matched.rank[found.row] != found.culprit) & (found.ns > 0)
    row, ns, culprit = found.row[waiting], found.ns[waiting], found.culprit[waiting]
    pair, inverse = np.unique(matched.rank[row] * count + culprit, return_inverse=True)
    total = np.bincount(inverse, ns, len(pair))
    calls = np.bincount(inverse, minlength=len(pair))
    of_rank = np.bincount(matched.rank[found.row], found.ns, count)
    order = np.argsort(-total, kind="stable")
    rank, other = np.divmod(pair[order], count)
    ranks = np.array(matched.ranks, np.int64)
    where = _where(matched, row, ns, inverse, len(pair))
    values: dict[str, Any] = {
        "rank": ranks[rank],
        "waits_for": ranks[other],
        "wait_us": total[order] / 1000.0,
        "wait_pct": 100 * total[order] / np.maximum(of_rank[rank], 1),
        "collectives": calls[order],
        "mean_wait_us": total[order] / np.maximum(calls[order], 1) / 1000.0,
        "where": [where[at] for at in order.tolist()],
    }
    notes = missing_waits(matched, found)
    return Answer(values, [*matched.notes, *notes])


def _where(matched: MatchedCollectives, row: Ints, ns: Ints, pair: Ints, count: int) -> list[str]:
    """Returns the collectives in which each pair waited longest."""
    texts: dict[str, int] = {}
    names = [
        texts.setdefault(" ".join(filter(None, (d.collective, d.group_description or d.group))), len(texts))
        for d in matched.descriptions
    ]
    kind = np.array(names, np.int64)[matched.description[row]] if len(row) else row
    table = np.zeros((count, max(len(texts), 1)))
    np.add.at(table, (pair, kind), ns)
    listed = list(texts)
    return [listed[at] for at in table.argmax(1).tolist()] if count else []


@view(
    "rank_waits",
    columns(
        ("rank", "int", "", "the rank that waits"),
        ("waits_for", "int", "", "the last rank to join"),
        ("wait_us", "float", "us", "total waiting time"),
        ("wait_pct", "float", "%", "share of all waiting time of the rank"),
        ("collectives", "int", "", "number of collectives in which it waited for that rank"),
        ("mean_wait_us", "float", "us", "mean waiting time per collective"),
        ("where", "text", "", "collective and process group in which it waited longest for that rank"),
    ),
    reduce=_wait_rows,
)
def rank_waits(context: Context) -> RankCollectives:
    """Which rank waited for which, the longest waits first.

    No rank can leave an all_reduce, all_gather, reduce_scatter, all_to_all or barrier before all others have entered
    it. The rank with the shortest duration therefore came last, and other ranks waited for it for the rest of their
    durations. Clocks do not matter. Collectives are matched by process group and sequence number.
    """
    return context.get(rank_collectives)


def _spread_rows(partials: Sequence[tuple[int, HostSteps]]) -> Answer:
    alike, notes = with_common_numbers(partials)
    times: dict[str, list[tuple[float, int]]] = {}
    for rank, part in alike:
        for name, us in zip(part.names, part.us.tolist(), strict=True):
            times.setdefault(name, []).append((us, rank))
    named = sorted(times, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    lengths_of = [np.array([us for us, _ in times[name]]) for name in named]
    median = np.array([np.median(each) for each in lengths_of])
    longest = [max(times[name], key=lambda entry: (entry[0], -entry[1])) for name in named]
    values: dict[str, Any] = {
        "step": named,
        "ranks": [len(each) for each in lengths_of],
        "min_us": [each.min() for each in lengths_of],
        "median_us": median,
        "p95_us": [np.quantile(each, 0.95) for each in lengths_of],
        "max_us": [each.max() for each in lengths_of],
        "spread_pct": [100 * (each.max() - each.min()) / max(np.median(each), 1e-9) for each in lengths_of],
        "slowest_rank": [
            rank if len(times[name]) > 1 else None for name, (_, rank) in zip(named, longest, strict=True)
        ],
    }
    return Answer(values, notes if named else ["the traces have no events to form a step from"])


@view(
    "step_spread",
    columns(
        ("step", "text", "", 'step number; "all": the trace has no steps'),
        ("ranks", "int", "", "number of ranks that have the step"),
        ("min_us", "float", "us", "length of the step on the fastest rank"),
        ("median_us", "float", "us", "length of the step on the median rank"),
        ("p95_us", "float", "us", "95th percentile of its length over the ranks"),
        ("max_us", "float", "us", "length of the step on the slowest rank"),
        ("spread_pct", "float", "%", "difference between slowest and fastest rank, as a share of the median"),
        ("slowest_rank", "int", "", "rank on which it took longest"),
    ),
    reduce=_spread_rows,
)
def step_spread(context: Context) -> HostSteps:
    """How long each step took on the host, over all ranks, ordered by step number.

    If ranks number their steps differently, their steps are matched by start time and shown with the numbers of the
    first rank.
    """
    return context.get(rank_steps)


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
    alike, notes = with_common_numbers([(rank, part.steps) for rank, part in partials])
    place = np.concatenate([np.empty(0, np.int64), *(part.place for _, part in partials)])
    rank, step = matched.rank[found.row], place[found.row]
    values: dict[str, list[Any]] = {column.name: [] for column in rank_step_table.columns}
    for number, (name, own) in enumerate(alike):
        waited = _waited(step[rank == number], found.ns[rank == number], len(own.names))
        order = _in_order(own.names)
        values["rank"] += [name] * len(order)
        values["step"] += [own.names[at] for at in order]
        values["start_ns"] += own.start[order].tolist()
        values["step_us"] += own.us[order].tolist()
        values["waiting_us"] += waited[order].tolist()
    return Answer(values, [*matched.notes, *notes, *missing_waits(matched, found)])


def _waited(step: Ints, ns: Ints, count: int) -> Floats:
    """Returns how long one rank waited in each of its steps (us); NaN in those without a collective for which it is
    known.
    """
    inside = step != NOTHING
    total = np.bincount(step[inside], ns[inside], count) / 1000
    known = np.bincount(step[inside], minlength=count) > 0
    return np.where(known, total, np.nan)


def _in_order(names: Sequence[str]) -> list[int]:
    """Returns the places of the steps in the order of their numbers."""
    keys = [(not name.isdecimal(), int(name) if name.isdecimal() else 0) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


@view(
    "rank_steps",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("step", "text", "", 'step number; "all": the trace has no steps'),
        (
            "start_ns",
            "int",
            "ns",
            "Unix time at which it began, corrected by the measured clock offset, if there is one",
        ),
        ("step_us", "float", "us", "length of the step on the host"),
        (
            "waiting_us",
            "float",
            "us",
            "time in collectives of the step, minus that of the last rank to join; missing: unknown",
        ),
    ),
    reduce=_rows,
    nothing="the traces have no complete steps",
)
def rank_step_table(context: Context) -> StepsOfRank:
    """Every measured step of every rank: how long it took on the host, and how long the rank waited in it.

    Waiting is that of the view ranks, step by step: it is derived from durations alone, so clocks do not matter, and
    collectives count for the step in which they were launched. If ranks number their steps differently, their steps are
    matched by start time and shown with the numbers of the first rank. Incomplete steps have no rows, nor do first
    steps that do not show the program's usual pace (see the view ranks). Rows are ordered by rank and step.
    """
    return _steps_of_rank(context)
