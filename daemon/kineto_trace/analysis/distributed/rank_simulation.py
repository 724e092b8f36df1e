"""What would a job take if: its collectives and the ranks' own work between them, run again with something changed.

Theory of operation
    The job is a graph. Every rank is two chains of moments, of its GPU and of its host (rank_work.py); the edge from
    one moment to the next weighs the chain's own time between them. A collective begins on a rank when both chains have
    come to it and the one before it on its stream is over; it ends on all of its ranks when the last one has begun it
    and its transfer is over, which takes as long as on the rank that was in it for the shortest time. Where a chain
    waits for a collective or for the other chain, it goes on after that. The job takes as long as the longest path
    through the graph.

    As it was, this must give the time that the job took. By how much it does not is the error of the model. Then a part
    of the weights is changed, and the longest path is found again.

    A rank "as fast as the others" has between each two consecutive collectives, on either chain, the median own time of
    the other ranks. If its GPU is faster already, that one stays as it is: ranks that wait in a collective compute more
    slowly meanwhile, since the collective's kernel takes multiprocessors from them; the rank that they wait for does
    not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.distributed.rank_work import NOTHING, RankWork
from kineto_trace.arrays.longest_paths import Edges, longest
from kineto_trace.collectives.rank_matching import Instances, Matched, instances
from kineto_trace.errors import ViewError

FASTER = 0.02  # of the own time of a GPU by which it is less than the others'

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains of all ranks under each other, from the first to the last collective that enough ranks have.

    Where one rank is enough, nothing behind the last one is cut off.

    rank: place; host: whether of the host; row: the collective (of Matched) that can begin then, NOTHING: none. before:
    own time (ns) since the moment before, of a chain's first one since the first moment of any rank. delay, over,
    over_ns, other, other_ns: see RankWork; over is a row of Matched. entry: equal numbers for the moments of one chain
    between the same two collectives; below 0: the first moment of a chain.
    """

    rank: Ints
    host: Flags
    row: Ints
    before: Ints
    delay: Ints
    over: Ints
    over_ns: Ints
    other: Ints
    other_ns: Ints
    entry: Ints


class SegmentWork(NamedTuple):
    """The own work of each chain between each two consecutive collectives: one value per entry (ns).

    segment: equal numbers for the same two collectives and sort of chain; closing: the second of them, an instance.
    """

    rank: Ints
    host: Flags
    segment: Ints
    closing: Ints
    own: Ints


class Simulation:
    """The graph of a job. least: ranks that must have a collective; 1: of one rank alone.

    measured_ns: the time from the beginning of the first collective to the end of the last one; model_ns: what the
    model says.
    """

    def __init__(self, matched: Matched, works: Sequence[RankWork], least: int = 2) -> None:
        self.matched, self.found = matched, instances(matched)
        offset = np.concatenate([[0], np.cumsum([len(work.found) for work in works])]).astype(np.int64)
        self.chains, origin, self.work = _chains(matched, self.found, works, offset, least)
        on_gpu = (self.chains.row >= 0) & ~self.chains.host
        self.rows: Ints = self.chains.row[on_gpu]
        self._after = _joined([_moved(work.after, at) for work, at in zip(works, offset.tolist(), strict=False)])
        self._after_ns = _joined([work.after_ns for work in works])
        self._launch_ns = _joined([work.launch_ns for work in works])
        self._delay_ns = _joined([work.delay_ns for work in works])
        self._lead_ns = int(matched.start[self.rows].min()) - origin if len(self.rows) else 0  # of the first moment
        self.measured_ns = int(matched.end[self.rows].max()) - origin - self._lead_ns if len(self.rows) else 0
        self.model_ns = self.run(self.chains.before, self.found.transfer) if len(self.rows) else 0

    @property
    def error(self) -> float:
        """By how much the model is wrong, as a share of what was measured."""
        return abs(self.model_ns - self.measured_ns) / self.measured_ns if self.measured_ns > 0 else 0.0

    def run(self, before: Ints, transfer: Ints) -> int:
        """Returns how long the job takes (ns) with these times of own work and of transfers. Raises ViewError."""
        chains, matched = self.chains, self.matched
        count, place = len(chains.rank), np.arange(len(chains.rank))
        starts, ends = count, count + len(matched)  # first nodes of each sort: moments, beginnings, ends
        source = ends + len(self.found.seen)
        taken = np.zeros(len(self.found.seen), np.bool_)
        taken[matched.instance[self.rows]] = True
        begins = np.flatnonzero(chains.row >= 0)
        goes_on = np.flatnonzero((chains.over >= 0) & taken[matched.instance[chains.over]])
        crosses = np.flatnonzero(chains.other >= 0)
        after = self._after[self.rows]
        follows = (after >= 0) & taken[matched.instance[after]]
        first = chains.entry < 0
        own, wait = chains.row[begins], chains.delay
        parts = (
            (np.where(first, source, place - 1), place, before + wait),
            (ends + matched.instance[chains.over[goes_on]], goes_on, (chains.over_ns + wait)[goes_on]),
            (chains.other[crosses], crosses, (chains.other_ns + wait)[crosses]),
            (begins, starts + own, self._delay_ns[own] + np.where(chains.host[begins], self._launch_ns[own], 0)),
            (
                ends + matched.instance[after[follows]],
                starts + self.rows[follows],
                (self._after_ns + self._delay_ns)[self.rows[follows]],
            ),
            (starts + self.rows, ends + matched.instance[self.rows], transfer[matched.instance[self.rows]]),
        )
        edges = Edges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        try:
            path = longest(source + 1, edges)
        except ViewError as exc:
            raise ViewError("the times of the ranks contradict each other, so they cannot be simulated") from exc
        return int(edges.weight[path].sum()) - self._lead_ns

    def like_the_others(self, rank: int) -> Ints:
        """Own times of all moments, with those of one rank as the median of the others'.

        A GPU that is faster than the others' stays as it is.
        """
        middle, entries = self.medians(self.work.own, rank), self.work.rank == rank
        on_gpu = entries & ~self.work.host & np.isfinite(middle)
        if self.work.own[on_gpu].sum() < (1 - FASTER) * middle[on_gpu].sum():
            entries = entries & self.work.host
        return self._replaced(entries, middle, rank)

    def all_alike(self) -> Ints:
        """Own times of all moments, with those of every rank as the median of all."""
        return self._replaced(np.ones(len(self.work.own), np.bool_), self.medians(self.work.own, NOTHING), NOTHING)

    def medians(self, values: Ints, without: int) -> Floats:
        """For each entry the median over the entries of all ranks but one between the same two collectives."""
        used = self.work.rank != without
        segment = self.work.segment[used]
        order = np.lexsort((values[used], segment))
        ordered, segment = values[used][order].astype(np.float64), segment[order]
        first = np.searchsorted(segment, self.work.segment, side="left")
        count = np.searchsorted(segment, self.work.segment, side="right") - first
        if not len(ordered):
            return np.full(len(values), np.nan)
        last = len(ordered) - 1
        low, high = (ordered[np.clip(first + at, 0, last)] for at in ((count - 1) // 2, count // 2))
        return np.where(count > 0, (low + high) / 2, np.nan)

    def _replaced(self, entries: Flags, own: Floats, rank: int) -> Ints:
        """The own times of all moments with those of these entries changed to `own`; their first moments follow.

        What a host has too much is taken off its longest stretches, since a host is late by one sleep rather than by
        everything; else all of an entry is scaled.
        """
        chains, before = self.chains, self.chains.before.astype(np.float64)
        entries = entries & np.isfinite(own)
        inside = chains.entry >= 0
        entry = chains.entry[inside]
        total = self.work.own[entry].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(total > 0, before[inside] / total, chains.row[inside] >= 0) * own[entry]
        shorter = chains.host[inside] & (own[entry] < total)
        scaled = np.where(shorter, _cut_down(before[inside], entry, self.work.own - own), scaled)
        before[inside] = np.where(entries[entry], scaled, before[inside])
        for host in (False, True):
            firsts = np.flatnonzero(~inside & (chains.host == host))
            others = before[firsts[chains.rank[firsts] != rank]]
            mine = firsts if rank == NOTHING else firsts[chains.rank[firsts] == rank]
            if len(others):
                before[mine] = np.median(others)
        return np.rint(before).astype(np.int64)


def _cut_down(values: Floats, entry: Ints, excess: Floats) -> Floats:
    """Returns the values (0 or more) less the `excess` of their entry, which is taken off its largest values first."""
    order = np.lexsort((-values, entry))
    descending, of = values[order], entry[order]
    up_to = np.cumsum(descending) - descending
    larger = up_to - up_to[np.searchsorted(of, of, side="left")]  # the sum of the larger ones of its entry
    found = values.copy()
    found[order] -= np.clip(excess[of] - larger, 0, descending)
    return found


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def _moved(places: Ints, offset: int) -> Ints:
    return np.where(places >= 0, places + offset, NOTHING)


class _Cut(NamedTuple):
    """The moments of one rank that take part, or those of all ranks: see Chains. opening, closing: instances."""

    rank: Ints
    host: Ints
    row: Ints
    before: Ints
    delay: Ints
    over: Ints
    over_ns: Ints
    other: Ints
    other_ns: Ints
    opening: Ints
    closing: Ints


def _chains(
    matched: Matched, found: Instances, works: Sequence[RankWork], offset: Ints, least: int
) -> tuple[Chains, int, SegmentWork]:
    """Returns the chains, the first moment of any rank (ns), and the own work."""
    kept: dict[int, Ints] = {}  # of each rank: its moments from the first to the last shared collective
    shift: dict[int, int] = {}
    for rank, work in enumerate(works):
        rows = _moved(work.collective, int(offset[rank]))
        shared = (
            np.flatnonzero((rows >= 0) & (found.seen[matched.instance[rows]] >= least)) if len(matched) else rows[:0]
        )
        if len(shared):
            low, high = work.wall[shared].min(), work.found.start[work.collective[shared]].max()
            high = high if least > 1 else work.wall.max()
            kept[rank] = np.flatnonzero((work.wall >= low) & (work.wall <= high))
            shift[rank] = int(matched.start[offset[rank]] - work.found.start[0])
    origin = min((int(works[rank].wall[own].min()) + shift[rank] for rank, own in kept.items()), default=0)
    cuts: list[_Cut] = []
    count = 0
    for rank, own in kept.items():
        cuts.append(_cut(rank, works[rank], own, int(offset[rank]), shift[rank] - origin, count, matched.instance))
        count += len(own)
    cut = _Cut(*(_joined(list(column)) for column in zip(*cuts, strict=True))) if cuts else _Cut(*[_joined([])] * 11)
    entry, of = _entries(cut, len(found.seen))
    inside = entry >= 0
    own_sum = np.bincount(entry[inside], cut.before[inside], len(of[0])).astype(np.int64)
    chains = Chains(
        cut.rank, cut.host > 0, cut.row, cut.before, cut.delay, cut.over, cut.over_ns, cut.other, cut.other_ns, entry
    )
    return chains, origin, SegmentWork(of[0], of[1] > 0, of[2], of[3], own_sum)


def _cut(rank: int, work: RankWork, own: Ints, offset: int, shift: int, count: int, instance: Ints) -> _Cut:
    """Returns these moments of one rank. offset: of its rows; shift: of its clock; count: moments of those before."""
    place = np.full(len(work.wall), NOTHING)
    place[own] = np.arange(count, count + len(own))
    host = work.host[own]
    first = np.ones(len(own), np.bool_)
    first[1:] = host[1:] != host[:-1]
    row, other = _moved(work.collective[own], offset), work.other[own]
    opening, closing = _around(row, host, instance)
    return _Cut(
        rank=np.full(len(own), rank),
        host=host.astype(np.int64),
        row=row,
        before=np.where(first, work.wall[own] + shift, np.diff(work.own[own], prepend=0)),
        delay=np.where(first, 0, work.delay[own]),
        over=_moved(work.over[own], offset),
        over_ns=work.over_ns[own],
        other=np.where(other >= 0, place[other], NOTHING),
        other_ns=work.other_ns[own],
        opening=np.where(first, NOTHING, opening),
        closing=closing,
    )


def _around(row: Ints, host: Flags, instance: Ints) -> tuple[Ints, Ints]:
    """For each moment the instances of the collectives before and from it on in its chain; NOTHING: there is none."""
    opening, closing = np.full(len(row), NOTHING), np.full(len(row), NOTHING)
    for chain in (False, True):
        mine = np.flatnonzero(host == chain)
        at = np.flatnonzero(row[mine] >= 0)
        if not len(at):
            continue
        numbers = instance[row[mine[at]]]
        nexts = np.searchsorted(at, np.arange(len(mine)), side="left")
        opening[mine] = np.where(nexts > 0, numbers[np.maximum(nexts - 1, 0)], NOTHING)
        closing[mine] = np.where(nexts < len(at), numbers[np.minimum(nexts, len(at) - 1)], NOTHING)
    return opening, closing


def _entries(cut: _Cut, count: int) -> tuple[Ints, tuple[Ints, Ints, Ints, Ints]]:
    """Numbers (chain, collective before, collective after); says of each its rank, chain, segment and second one."""
    inside = cut.opening != NOTHING
    pair = ((cut.opening + 1) * (count + 1) + cut.closing + 1) * 2 + cut.host
    segment, number = np.unique(pair[inside], return_inverse=True)
    keys, place = np.unique(cut.rank[inside] * max(len(segment), 1) + number, return_inverse=True)
    entry = np.full(len(cut.rank), NOTHING)
    entry[inside] = place
    of_rank, of_segment = np.divmod(keys, max(len(segment), 1))
    pairs = segment[of_segment]
    return entry, (of_rank, pairs % 2, of_segment, pairs // 2 % (count + 1) - 1)
