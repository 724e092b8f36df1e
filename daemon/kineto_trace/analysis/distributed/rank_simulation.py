"""Simulates a job: replays its collectives and the ranks' own work between them with something changed.

Theory of operation
    The job is a graph. Every rank is two chains of moments, of its GPU and of its host; the edge from
    one moment to the next weighs the chain's own time between them. A collective begins on a rank when both chains have
    reached it and the previous one on its stream is over; it ends on all of its ranks when the last one has begun it
    and its transfer is over. The transfer takes as long as the collective's shortest duration on any rank. A chain that
    waits for a collective or for the other chain continues after that. The job takes as long as the longest path
    through the graph.

    With the recorded weights, this must give the time that the job took; the difference is the error of the model. Then
    some of the weights are changed, and the longest path is found again.

    A rank "as fast as the others" has between each two consecutive collectives, on either chain, the median own time of
    the other ranks. If its GPU is already faster, its times stay: ranks that wait in a collective compute more slowly,
    since the collective's kernel takes multiprocessors from them, unlike the rank that they wait for.

The work of a rank between and beside its collectives, on its GPU and on its host:
    A rank is two chains of moments in order of time, of its GPU and of its host. The own time between two moments is
    the part of that time in which the chain works: all of it, except

    * on the GPU, gaps in which a collective ends or whose next activity was launched in the gap: after these, the GPU
      goes on once the collective is over and the activity has been launched;
    * on the host, calls to CUDA, as long as they wait: after one that waits for the GPU, such as a copy from or to
      pageable memory, the host continues once that work is over.

    A collective begins once it was launched, and all work launched before it and the previous collective on its stream
    are over. Any time from then to its actual beginning is a delay of unknown cause, which stays as it is. The same
    holds for the end of a gap. Each moment, calculated from the previous ones, thus has the time recorded in the trace;
    if they come earlier, it comes earlier by as much as they allow.

    Of several gaps with late launches between the same two moments, the last one counts. The last moment of a GPU is
    the end of its own work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.idle_gaps import blocking_calls, blocking_copies
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.arrays.longest_paths import Edges, longest
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, Ints32
from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import Instances, MatchedCollectives, instances, rank_collectives
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu

FASTER = 0.02  # share by which the own time of a GPU is less than the others'
LAUNCH_NS = 5_000  # from a launch to the earliest possible start
_UNHINDERED = 3.0  # times the fastest tenth of its name: a call up to this long did not wait
_HINDERED_NS = 20_000  # and so much longer at least
_NEVER = int(np.iinfo(np.int64).min) // 4


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains of all ranks, concatenated, from the first to the last collective that enough ranks have.

    Where one rank is enough, nothing after the last one is cut off. One value per moment; times in ns:

    rank: place of the rank.
    host: whether it is of the host's chain.
    row: the collective (of MatchedCollectives) that can begin at this moment, or NOTHING.
    before: own time since the previous moment; for a chain's first one, since the first moment of any rank.
    delay, over_ns, other, other_ns: see RankWork.
    over: see RankWork, but a row of MatchedCollectives.
    entry: same number for the moments of one chain between the same two collectives; below 0 for a chain's first
        moment.
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

    segment: same number for the same two collectives and kind of chain.
    closing: the second of them, an instance.
    """

    rank: Ints
    host: Flags
    segment: Ints
    closing: Ints
    own: Ints


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


@dataclass(frozen=True, slots=True)
class RankWork:
    """The moments of a rank, first those of its GPU, then those of its host, each in order of time. Times in ns.

    Per moment:

    host: whether it is on the host.
    unix_ns: when it was (Unix ns).
    own: its place in the chain's own time.
    delay: added whatever the moment waits for.
    collective: the place in `found` of the collective that can begin from this moment on, or NOTHING.
    over, over_ns: the collective that must end first (or NOTHING), and the time from its end.
    other, other_ns: the same for a moment of the other chain.

    Per collective:

    after, after_ns: the previous one on its stream, and the least time from its end.
    launch_ns: least time from its launch to its beginning.
    delay_ns: its own delay.
    """

    found: RankCollectives
    host: Flags
    unix_ns: Ints
    own: Ints
    delay: Ints
    collective: Ints
    over: Ints
    over_ns: Ints
    other: Ints
    other_ns: Ints
    after: Ints
    after_ns: Ints
    launch_ns: Ints
    delay_ns: Ints


class Simulation:
    """The graph of a job. Times in ns.

    least: ranks that must have a collective; 1 for a single rank.
    measured_ns: from the beginning of the first collective to the end of the last one.
    model_ns: the same by the model.
    """

    def __init__(self, matched: MatchedCollectives, works: Sequence[RankWork], least: int = 2) -> None:
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
        """Returns the error of the model, as a share of the measured time."""
        return abs(self.model_ns - self.measured_ns) / self.measured_ns if self.measured_ns > 0 else 0.0

    def run(self, before: Ints, transfer: Ints) -> int:
        """Returns how long the job takes (ns) with these times of own work and of transfers. Raises ViewError."""
        chains, matched = self.chains, self.matched
        count, place = len(chains.rank), np.arange(len(chains.rank))
        starts, ends = count, count + len(matched)  # first nodes of each kind: moments, beginnings, ends
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
            raise ViewError("the times of the ranks contradict each other, so the job cannot be simulated") from exc
        return int(edges.weight[path].sum()) - self._lead_ns

    def with_median_work(self, rank: int) -> Ints:
        """Returns own times of all moments, with those of one rank replaced by the median of the others'.

        A GPU that is faster than the others' keeps its times.
        """
        middle, entries = self.medians(self.work.own, rank), self.work.rank == rank
        on_gpu = entries & ~self.work.host & np.isfinite(middle)
        if self.work.own[on_gpu].sum() < (1 - FASTER) * middle[on_gpu].sum():
            entries = entries & self.work.host
        return self._replaced(entries, middle, rank)

    def with_median_work_of_all(self) -> Ints:
        """Returns own times of all moments, with those of every rank replaced by the median of all."""
        return self._replaced(np.ones(len(self.work.own), np.bool_), self.medians(self.work.own, NOTHING), NOTHING)

    def medians(self, values: Ints, without: int) -> Floats:
        """Returns for each entry the median over all ranks but one between the same two collectives."""
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
        """Returns the own times of all moments, with those of these entries changed to `own`; their first moments
        follow.

        A host's excess is taken off its longest stretches, since one sleep makes a host late rather than everything;
        otherwise the whole entry is scaled.
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


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Gaps of the GPU, after which it continues once something has happened.

    excluded: time that is not the GPU's own.
    end: of the gap.
    launch: of the activity that ends it; _NEVER if unknown.
    over: the collective that ended in it.
    """

    excluded: Union
    end: Ints
    launch: Ints
    launch_ns: Ints
    over: Ints
    delay: Ints


@dataclass(frozen=True, slots=True)
class _Syncs:
    """Calls that waited for the GPU.

    waited: the end of the work that they waited for.
    over: the collective, or NOTHING.
    """

    start: Ints
    end: Ints
    waited: Ints
    over: Ints


class _Launches(NamedTuple):
    """Times of the activities that do not communicate. known: whether the launch is in the trace."""

    start: Ints
    end: Ints
    launch: Ints
    known: Flags


def _cut_down(values: Floats, entry: Ints, excess: Floats) -> Floats:
    """Subtracts each entry's `excess` from its values (0 or more), largest values first."""
    order = np.lexsort((-values, entry))
    descending, of = values[order], entry[order]
    up_to = np.cumsum(descending) - descending
    larger = up_to - up_to[np.searchsorted(of, of, side="left")]  # the sum of the larger values of its entry
    found = values.copy()
    found[order] -= np.clip(excess[of] - larger, 0, descending)
    return found


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def _moved(places: Ints, offset: int) -> Ints:
    return np.where(places >= 0, places + offset, NOTHING)


def _chains(
    matched: MatchedCollectives, found: Instances, works: Sequence[RankWork], offset: Ints, least: int
) -> tuple[Chains, int, SegmentWork]:
    """Returns the chains, the first moment of any rank (ns), and the own work."""
    kept: dict[int, Ints] = {}  # per rank, its moments from the first to the last shared collective
    shift: dict[int, int] = {}
    for rank, work in enumerate(works):
        rows = _moved(work.collective, int(offset[rank]))
        shared = (
            np.flatnonzero((rows >= 0) & (found.seen[matched.instance[rows]] >= least)) if len(matched) else rows[:0]
        )
        if len(shared):
            low, high = work.unix_ns[shared].min(), work.found.start[work.collective[shared]].max()
            high = high if least > 1 else work.unix_ns.max()
            kept[rank] = np.flatnonzero((work.unix_ns >= low) & (work.unix_ns <= high))
            shift[rank] = int(matched.start[offset[rank]] - work.found.start[0])
    origin = min((int(works[rank].unix_ns[own].min()) + shift[rank] for rank, own in kept.items()), default=0)
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
    """Returns these moments of one rank.

    offset: of its rows.
    shift: of its clock (ns).
    count: number of moments of the ranks before it.
    """
    place = np.full(len(work.unix_ns), NOTHING)
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
        before=np.where(first, work.unix_ns[own] + shift, np.diff(work.own[own], prepend=0)),
        delay=np.where(first, 0, work.delay[own]),
        over=_moved(work.over[own], offset),
        over_ns=work.over_ns[own],
        other=np.where(other >= 0, place[other], NOTHING),
        other_ns=work.other_ns[own],
        opening=np.where(first, NOTHING, opening),
        closing=closing,
    )


def _around(row: Ints, host: Flags, instance: Ints) -> tuple[Ints, Ints]:
    """Returns for each moment the instances of the previous and the next collective in its chain, or NOTHING."""
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
    """Numbers the entries (chain, collective before, collective after); returns rank, chain, segment and second one of
    each.
    """
    inside = cut.opening != NOTHING
    pair = ((cut.opening + 1) * (count + 1) + cut.closing + 1) * 2 + cut.host
    segment, number = np.unique(pair[inside], return_inverse=True)
    keys, place = np.unique(cut.rank[inside] * max(len(segment), 1) + number, return_inverse=True)
    entry = np.full(len(cut.rank), NOTHING)
    entry[inside] = place
    of_rank, of_segment = np.divmod(keys, max(len(segment), 1))
    pairs = segment[of_segment]
    return entry, (of_rank, pairs % 2, of_segment, pairs // 2 % (count + 1) - 1)


def rank_work(context: Context) -> RankWork:
    """Returns what one rank contributes to the simulation of a job."""
    found, work = context.get(rank_collectives), _activities(context)
    after, after_ns = _stream_order(found)
    ready, syncs = _ready(found, work), _syncs(context, found)
    points = np.flatnonzero(syncs.over == NOTHING)
    plain = np.concatenate([syncs.waited[points], [max(work.end.max(initial=_NEVER), ready.max(initial=_NEVER))]])
    gaps = _gaps(found, work, np.concatenate([ready, plain]))
    issued = np.flatnonzero(gaps.launch > _NEVER)
    on_host = bool(work.known.any())
    counts = [len(gaps.end), len(found), len(plain), len(found) * on_host, len(issued) * on_host, len(syncs.end)]
    first = np.concatenate([[0], np.cumsum(counts)]).tolist()  # of each sort of moments, in this order
    collectives = np.arange(len(found))
    size = first[-1]
    wall, delay, over_ns, other_ns = (np.zeros(size, np.int64) for _ in range(4))
    collective, over, other = (np.full(size, NOTHING) for _ in range(3))
    resumed, readies, plains, launches, issues, returns = (slice(*each) for each in zip(first, first[1:], strict=False))
    wall[resumed], delay[resumed], over[resumed] = gaps.end, gaps.delay, gaps.over
    wall[readies], collective[readies] = ready, collectives
    wall[plains] = plain
    if on_host:
        wall[launches], collective[launches] = found.launch, collectives
        wall[issues] = gaps.launch[issued]
        other[issued], other_ns[issued] = np.arange(first[4], first[5]), gaps.launch_ns[issued]
    wall[returns], over[returns] = syncs.end, syncs.over
    over_ns[returns] = other_ns[returns] = syncs.end - syncs.waited
    other[first[5] + points] = first[2] + np.arange(len(points))
    host = np.arange(size) >= first[3]
    own = wall - np.where(host, _waits_of_host(context, syncs).before(wall), gaps.excluded.before(wall))
    order = np.lexsort((collective < 0, wall, host))
    place = np.empty(size, np.int64)
    place[order] = np.arange(size)
    other = np.where(other >= 0, place[other], NOTHING)
    launch_ns = np.minimum(LAUNCH_NS, found.start - found.launch)
    before = np.where(after >= 0, found.end[after] + after_ns, _NEVER)
    allowed = np.maximum(np.maximum(ready, found.launch + launch_ns if on_host else ready), before)
    return RankWork(
        found, host[order], wall[order], own[order], delay[order], collective[order], over[order], over_ns[order],
        other[order], other_ns[order], after, after_ns, launch_ns, np.maximum(found.start - allowed, 0),
    )  # fmt: skip


def _activities(context: Context) -> _Launches:
    activity, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero(~activity.communication)
    call, launch = activity.call[rows], activity.start[rows].copy()
    launch[call >= 0] = called.start[call[call >= 0]]
    return _Launches(activity.start[rows], activity.end[rows], launch, call >= 0)


def _stream_order(found: RankCollectives) -> tuple[Ints, Ints]:
    """Returns for each collective the previous one on its stream, and the least time (ns) from its end."""
    after, gap = np.full(len(found), NOTHING), np.zeros(len(found), np.int64)
    order = np.lexsort((found.start, found.stream))
    first, second = order[:-1], order[1:]
    between = found.start[second] - found.end[first]
    follows = (found.stream[first] == found.stream[second]) & (between >= 0)
    after[second[follows]] = first[follows]
    gap[second[follows]] = np.minimum(between[follows], LAUNCH_NS)
    return after, gap


def _ready(found: RankCollectives, work: _Launches) -> Ints:
    """Returns when all work launched before each collective was over."""
    order = np.argsort(work.launch, kind="stable")
    over = np.concatenate([[_NEVER], np.maximum.accumulate(work.end[order])])
    ready = over[np.searchsorted(work.launch[order], found.launch, side="left")]
    return np.minimum(np.where(ready > _NEVER, ready, found.launch), found.start)


def _gaps(found: RankCollectives, work: _Launches, moments: Ints) -> _Gaps:
    """Returns the gaps of the GPU that are not its own time. moments: others of its chain."""
    busy = union(work.start, work.end)
    nothing = np.empty(0, np.int64)
    if not len(busy.start):
        return _Gaps(busy, nothing, nothing, nothing, nothing, nothing)
    begin = min(int(found.start.min(initial=busy.start[0])), int(busy.start[0]))
    low, high = np.concatenate([[begin], busy.end[:-1]]), busy.start
    first = np.searchsorted(work.start, high, side="left")
    issued = np.where(work.known[first], work.launch[first], _NEVER)
    late = issued >= low - LAUNCH_NS
    order = np.concatenate([np.argsort(found.end, kind="stable"), [NOTHING]])
    over = order[np.searchsorted(found.end[order[:-1]], high, side="right") - 1]  # NOTHING: none has ended
    ended = np.concatenate([found.end, [_NEVER]])[over]
    meets = (ended > low) & (high > low)
    # if there are several late launches between the same two moments, the last one counts
    borders = np.sort(np.concatenate([moments, high[meets]]))
    lates = np.flatnonzero(late)
    last = np.ones(len(lates), np.bool_)
    last[:-1] = np.diff(np.searchsorted(borders, high[lates], side="left")) > 0
    kept = unique_values(np.concatenate([np.flatnonzero(meets), lates[last]]))
    launch_ns = np.where(issued > _NEVER, np.minimum(LAUNCH_NS, high - issued), 0)
    allowed = np.maximum(np.where(issued > _NEVER, issued + launch_ns, low), np.where(meets, ended, low))
    allowed = np.maximum(allowed, low)
    excluded = (meets | late) & (high > low)
    return _Gaps(
        union(low[excluded], high[excluded]),
        high[kept],
        issued[kept],
        launch_ns[kept],
        np.where(meets, over, NOTHING)[kept],
        np.maximum(high - allowed, 0)[kept],
    )


def _syncs(context: Context, found: RankCollectives) -> _Syncs:
    """Returns the calls in which the host waited for the GPU, including copies that returned only when they
    were done.
    """
    activity, called = context.get(gpu), context.get(calls)
    rows = unique_values(np.concatenate([np.flatnonzero(context.get(blocking_calls)), context.get(blocking_copies)]))
    ends = np.sort(activity.end)
    start, end = called.start[rows], called.end[rows]
    at = np.searchsorted(ends, end, side="right") - 1
    waited = np.where(at >= 0, ends[np.maximum(at, 0)], _NEVER) if len(ends) else np.full(len(rows), _NEVER)
    waits = waited > start
    start, end, waited = start[waits], end[waits], waited[waits]
    over = np.full(len(end), NOTHING)
    if len(found):
        order = np.argsort(found.end, kind="stable")
        place = order[np.minimum(np.searchsorted(found.end[order], waited), len(order) - 1)]
        over = np.where(found.end[place] == waited, place, NOTHING)
    return _Syncs(start, end, waited, over)


def _waits_of_host(context: Context, syncs: _Syncs) -> Union:
    """Returns when the host waited in calls to CUDA: for the GPU, and in launches that took much longer than usual."""
    activity, called = context.get(gpu), context.get(calls)
    launching = unique_values(activity.call[activity.call >= 0])
    start, end = called.start[launching], called.end[launching]
    usual = longest_without_wait(called.name[launching], end - start)
    slow = end - start > usual
    return union(np.concatenate([syncs.start, (start + usual)[slow]]), np.concatenate([syncs.waited, end[slow]]))


def longest_without_wait(names: Ints32, took_ns: Ints) -> Ints:
    """Returns for each call the longest time that calls of its name take without having waited."""
    groups = group([names.astype(np.int64)])
    order = np.lexsort((took_ns, groups.number))
    count = np.bincount(groups.number, minlength=len(groups))
    fastest = took_ns[order][np.cumsum(count) - count + count // 10] if len(took_ns) else took_ns
    return (_UNHINDERED * fastest).astype(np.int64)[groups.number] + _HINDERED_NS
