"""The findings of a job of many ranks: each kind once, and with what the job would gain, not one rank.

Theory of operation
    What a rank loses is not what the job loses. Time in which a rank waits in collectives is lost by the rank that the
    others wait for; and what makes one rank slower than the others costs the job no more than that this rank is slower.
    The view rank_what_if has both, from a critical path over all ranks:

    * what a kind of finding takes more on a rank than on the middle one of the others counts up to what the job would
      gain if that rank were as fast as the others. But it is no more than what the rank works more than the others: the
      rest they have too, though it hides behind their waiting. What all ranks have counts as it is;
    * waiting in collectives is no finding of its own: the ranks that are waited for are;
    * transfers that nothing hides count up to what the job would gain if they took no time.

    A rank that costs the job more than its findings explain is a finding itself, unless another one costs about as
    much: ranks that are late by turns are no slow ranks. Where the same operators take longer on its host, the findings
    about the host's work say so, for that is what the rank has more of than the others. Without a critical path (no row
    of a rank in rank_what_if), the findings stay as they are. So they do if several captures of a rank are among the
    traces: captures do not wait for each other, and what one process has in several of them are not several ranks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from kineto_trace.analysis.distributed.rank_pace import REMEDY
from kineto_trace.analysis.findings.collective_findings import SMALL_COLLECTIVES
from kineto_trace.analysis.host_findings.user_code import IN_COLLECTIVES
from kineto_trace.view_api.result import Result

LEAST_PCT = 2.0  # what the job gains if a rank is as fast as the others: less is no finding
ABOVE_OTHERS = 2.0  # times what it gains by the middle one of the other ranks: less is chance
EXPLAINED = 0.5  # of that
WAITING = "waiting_in_collectives"
TRANSFERS = frozenset({"exposed_communication"})
TRANSFERS_ON_HOST = frozenset({"communication_on_the_host", IN_COLLECTIVES})
SLOW_RANK = "slow_rank"
HOST_WORK = frozenset({"host_bound", "host_python", "host_annotation", "small_operators", SMALL_COLLECTIVES})
_FIGURES = ("saving_us", "saving_pct", "saving_per_step_us", "uncertainty_pct")
_ADVICE = (
    "Give all ranks equal work and equal machines: compare this rank with another one (kinetoctl diff), its batches, "
    "its data, its host and the clocks of its GPU."
)
_ALONE = "The other ranks wait meanwhile: give all ranks equal shares of this work, or do it where no collective waits."
Row = dict[str, Any]


class _Middle:
    """The middle one of the values of all ranks but one; the lower of two. 0: there is no other rank."""

    def __init__(self, values: Iterable[float]) -> None:
        self._ascending = sorted(values)

    def without(self, own: float) -> float:
        """Returns the middle one of all values but this one, which is among them."""
        place = (len(self._ascending) - 2) // 2
        if place < 0:
            return 0.0
        return self._ascending[place if place < bisect_left(self._ascending, own) else place + 1]


@dataclass(frozen=True, slots=True)
class _Gains:
    """What the job would gain, in % of its time. ranks: if this one were as fast as the others; transfers: without."""

    ranks: dict[int, Row]
    transfers: float

    @property
    def on_host(self) -> bool:
        """Whether these are bounds for collectives of the host: what ranks work is unknown then."""
        return all(row["more_work_us"] is None for row in self.ranks.values())

    def slow(self) -> set[int]:
        """The ranks that are slower than the others."""
        gains = {rank: self.of(rank) for rank in self.ranks}
        middle = _Middle(gains.values())
        return {rank for rank, own in gains.items() if own >= max(LEAST_PCT, ABOVE_OTHERS * middle.without(own))}

    def more_work(self, rank: int) -> float:
        """What the rank works more than the others; without bounds if that is unknown."""
        row = self.ranks.get(rank)
        if row is None or row["more_work_us"] is None or not row["saving_us"]:
            return 100.0
        return float(row["more_work_us"] * row["saving_pct"] / row["saving_us"])

    def of(self, rank: int) -> float:
        """What the job would gain if this rank were as fast as the others; without bounds if that is unknown."""
        row = self.ranks.get(rank)
        return max(row["saving_pct"], 0.0) if row else 100.0


def common_findings(result: Result, ranks: int, what_if: Result | None = None, *, traces: int | None = None) -> Result:
    """Of view findings over the ranks of a job: what several have once, as the rank has it where it costs most.

    The largest saving comes first. ranks: how many the job has. what_if: the view rank_what_if of the same ranks; the
    savings are then those of the job. traces: how many there are, if there are several captures of some ranks.
    """
    rows = result.rows()
    traces = ranks if traces is None else traces
    gains = _gains(what_if) if traces == ranks else None
    if gains:
        rows = _of_the_job(rows, gains, sorted({row["rank"] for row in rows} | set(gains.ranks)))
    same: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        same.setdefault((row["finding"], row["title"]), []).append(row)
    worst = []
    for each in same.values():
        row = max(each, key=lambda entry: entry["saving_us"] or 0.0)
        worst.append({**row, "title": f"{row['title']} ({_where(each, ranks, traces)})"} if len(each) > 1 else row)
    worst.sort(key=lambda entry: (bool(entry["guess"]), -(entry["saving_us"] or 0.0)))
    return replace(result, table=pa.Table.from_pylist(worst, schema=result.table.schema))


def _where(rows: Sequence[Row], ranks: int, traces: int) -> str:
    """On how many ranks, or in how many captures of them, a finding is. rows: one of each trace that has it."""
    on_ranks = f"on {len({row['rank'] for row in rows})} of {ranks} ranks"
    if traces == ranks:
        return on_ranks
    return f"in {len(rows)} of {traces} captures" + (f", {on_ranks}" if ranks > 1 else "")


def _gains(what_if: Result | None) -> _Gains | None:
    rows = what_if.rows() if what_if else []
    ranks = {row["rank"]: row for row in rows if row["rank"] is not None}
    return _Gains(ranks, sum(max(row["saving_pct"], 0.0) for row in rows if row["collective"])) if ranks else None


def _of_the_job(rows: Sequence[Row], gains: _Gains, ranks: Sequence[int]) -> list[Row]:
    """The findings with what the job would gain, and the ranks that it waits for."""
    took: dict[tuple[str, int], float] = {}
    for row in rows:
        key = row["finding"], row["rank"]
        took[key] = took.get(key, 0.0) + row["saving_pct"]
    middle = {kind: _Middle(took.get((kind, rank), 0.0) for rank in ranks) for kind in {kind for kind, _ in took}}
    explained, slow, found = dict.fromkeys(ranks, 0.0), gains.slow(), list[Row]()
    for row in rows:
        kind, rank, own = row["finding"], row["rank"], took[row["finding"], row["rank"]]
        if kind == WAITING or not own:
            continue
        more = min(max(own - middle[kind].without(own), 0.0), gains.more_work(rank)) if len(ranks) > 1 else 0.0
        late = min(more, gains.of(rank))
        counted = own - more + late
        if kind in (TRANSFERS_ON_HOST if gains.on_host else TRANSFERS):
            counted = min(counted, gains.transfers)
        part = row["saving_pct"] / own
        if not row["guess"]:
            explained[rank] += part * late
        slows = not row["guess"] and rank in slow and part * late >= LEAST_PCT
        if counted > 0:
            told = _scaled(row, counted / own)
            told = _waited_for(told, gains.ranks[rank], alone=late > counted / 2) if slows else told
            found.append(told)
    unexplained = sorted(rank for rank in slow if explained[rank] < EXPLAINED * gains.of(rank))
    return [*found, *(_slow_rank(gains.ranks[rank], explained[rank]) for rank in unexplained)]


def _waited_for(row: Row, gain: Row, *, alone: bool) -> Row:
    """The finding of a rank that the other ones wait for because of it. gain: its row of rank_what_if.

    alone: most of it is what the other ranks do not have.
    """
    title = f"{row['title']}: the others wait for rank {row['rank']}"
    if gain.get("host_pace") and row["finding"] in HOST_WORK:
        told = {**row, "advice": f"{_slow_host(gain)} {row['advice']}".rstrip()}
        return {**told, "title": f"{title}, since {gain['cause']}"} if alone else told
    return {**row, "title": title, "advice": f"{row['advice']} {_ALONE}".lstrip()} if alone else row


def _slow_host(gain: Row) -> str:
    """What to do about a rank on whose host the same operators take longer."""
    return f"Rank {gain['rank']} probably has a slower core, or shares it ({gain['cause']}): {REMEDY}."


def _scaled(row: Row, share: float) -> Row:
    return {**row, **{name: row[name] * share for name in _FIGURES if row[name] is not None}}


def _slow_rank(gain: Row, explained: float) -> Row:
    """A rank that the others wait for, by its row of rank_what_if. explained: % of the time, in other findings."""
    left = {**gain, "uncertainty_pct": None}
    return {
        **_scaled(left, 1 - explained / gain["saving_pct"]),
        "finding": SLOW_RANK,
        "guess": False,
        "title": f"The other ranks wait for rank {gain['rank']}" + (f": {gain['cause']}" if gain["cause"] else ""),
        "advice": _slow_host(gain) if gain.get("host_pace") else _ADVICE,
        "evidence": f"{gain['change']}, the job would gain {gain['saving_pct']:.1f} %: {gain['about']}",
    }
