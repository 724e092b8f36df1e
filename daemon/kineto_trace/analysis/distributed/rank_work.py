"""What a rank does between and beside its collectives: the own work of its GPU and of its host.

Theory of operation
    A rank is two chains of moments in order of time, of its GPU and of its host. The own time between two moments is
    what the chain works meanwhile: all time, except

    * on the GPU, gaps in which a collective ends or whose next activity was launched in the gap: after these, the GPU
      goes on once the collective is over and the activity has been launched;
    * on the host, calls to CUDA, as long as they wait: after one that waits for the GPU, such as a copy from or to
      pageable memory, the host goes on once what it waited for is over.

    A collective begins once it was launched, everything that had been launched before it is over, and the collective
    before it on its stream is. What is left between these and its actual beginning is a delay of unknown cause, which
    stays as it is. So is what is left at the end of a gap. Every moment thus has the time that the trace has, if it is
    calculated from those before it; and if some of them come earlier, it comes earlier by what they allow.

    Of several gaps with late launches between the same two moments, the last one counts. The last moment of a GPU is
    the end of its own work.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.idle.idle_gaps import blocking_calls, copies_waited_for
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import rank_collectives
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NOTHING = -1
LAUNCH_NS = 5_000  # from a launch to the earliest beginning
_UNHINDERED = 3.0  # times as long as the fastest tenth of its name may a call take without having waited
_HINDERED_NS = 20_000  # and by so much longer
_NEVER = int(np.iinfo(np.int64).min) // 4


@dataclass(frozen=True, slots=True)
class RankWork:
    """The moments of a rank, first those of its GPU, then those of its host, each in order of time. Times in ns.

    host: whether it is one of the host. wall: when it was (Unix ns); own: in the chain's own time; delay: what comes
    on top whatever it waits for. collective: the place in `found` that can begin from this moment on; NOTHING: none.
    over, over_ns: the collective that must be over before it, NOTHING: none, and the time from there. other, other_ns:
    likewise a moment of the other chain.
    after, after_ns: for each collective the one before it on its stream, and the least time from its end; launch_ns:
    from its launch to its beginning at least; delay_ns: its own delay.
    """

    found: RankCollectives
    host: Flags
    wall: Ints
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


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Gaps of the GPU after which it goes on once something has happened. excluded: what is not its own time.

    end: of the gap; launch: of the activity that ends it, _NEVER: unknown; over: the collective that ended in it.
    """

    excluded: Union
    end: Ints
    launch: Ints
    launch_ns: Ints
    over: Ints
    delay: Ints


@dataclass(frozen=True, slots=True)
class _Syncs:
    """Calls that waited for the GPU. waited: the end of what they waited for; over: the collective, NOTHING: other."""

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
    """For each collective the one before it on its stream, and the least time from its end."""
    after, gap = np.full(len(found), NOTHING), np.zeros(len(found), np.int64)
    order = np.lexsort((found.start, found.stream))
    first, second = order[:-1], order[1:]
    between = found.start[second] - found.end[first]
    follows = (found.stream[first] == found.stream[second]) & (between >= 0)
    after[second[follows]] = first[follows]
    gap[second[follows]] = np.minimum(between[follows], LAUNCH_NS)
    return after, gap


def _ready(found: RankCollectives, work: _Launches) -> Ints:
    """When everything was over that had been launched before each collective."""
    order = np.argsort(work.launch, kind="stable")
    over = np.concatenate([[_NEVER], np.maximum.accumulate(work.end[order])])
    ready = over[np.searchsorted(work.launch[order], found.launch, side="left")]
    return np.minimum(np.where(ready > _NEVER, ready, found.launch), found.start)


def _gaps(found: RankCollectives, work: _Launches, moments: Ints) -> _Gaps:
    """The gaps of the GPU that are not its own time. moments: others of its chain."""
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
    # of late launches between the same two moments the last one counts
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
    """The calls in which the host waited for the GPU; copies too, from which it came back when they were over."""
    activity, called = context.get(gpu), context.get(calls)
    rows = unique_values(np.concatenate([np.flatnonzero(context.get(blocking_calls)), context.get(copies_waited_for)]))
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
    """When the host waited in calls to CUDA: for the GPU, and in launches that took much longer than usual."""
    activity, called = context.get(gpu), context.get(calls)
    launching = unique_values(activity.call[activity.call >= 0])
    start, end = called.start[launching], called.end[launching]
    usual = unhindered_ns(called.name[launching], end - start)
    slow = end - start > usual
    return union(np.concatenate([syncs.start, (start + usual)[slow]]), np.concatenate([syncs.waited, end[slow]]))


def unhindered_ns(names: npt.NDArray[np.int32], took_ns: Ints) -> Ints:
    """Returns for each call the longest time that calls of its name take without having waited."""
    groups = group([names.astype(np.int64)])
    order = np.lexsort((took_ns, groups.number))
    count = np.bincount(groups.number, minlength=len(groups))
    fastest = took_ns[order][np.cumsum(count) - count + count // 10] if len(took_ns) else took_ns
    return (_UNHINDERED * fastest).astype(np.int64)[groups.number] + _HINDERED_NS
