"""What the job would gain if one rank, or one kind of collective, were faster.

From the trace of one rank alone: an upper bound of the transfer time of its collectives and a lower bound of the
waiting.

Theory of operation
    A collective is on the GPU while its rank waits for the others, and while data moves. One rank's trace cannot
    separate the two. But collectives of the same kind and size need the same time for the same data: the shortest of
    them is an upper bound of the transfer, and the rest of another one's duration was waiting for another rank (or
    sharing links and multiprocessors with other work). With fewer than LEAST_ALIKE such collectives the split is
    unknown.

    Not all of it can be gained. Where the rank had other work to do or its host was late, a shorter collective gains
    nothing. So the rank is simulated (rank_simulation.py): first with collectives that only transfer, which shows what
    waiting costs, then with collectives that take no time, which shows what transfers cost at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.distributed.rank_pace import RankPace, SlowerHost, rank_pace, slower_host
from kineto_trace.analysis.distributed.rank_simulation import RankWork, Simulation, rank_work
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, containing, difference, intersection, union
from kineto_trace.base.array_types import NOTHING, Flags, Ints
from kineto_trace.base.quantities import format_duration, format_number, times
from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import (
    NO_COLLECTIVES,
    Instances,
    MatchedCollectives,
    instances,
    match,
    rank_collectives,
    waits,
)
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.structure.step_pace import paced_steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

MAX_ERROR = 0.1  # share of the job's time: a worse model predicts nothing
MAX_RANKS = 16  # that are simulated, those with the most own work
NO_TIME = "the collectives that several ranks share take no time"
WORTH_SAYING = 0.02  # share of the job's time
FIRST = ("change", "rank", "collective", "process_group")
LATE_HOST, SLOW_KERNELS, BY_TURNS = "its host is late", "its kernels take longer", "ranks take turns being late"
MORE_CALLS = 1.05  # times as many
MORE_BLOCKS = 1.03  # times as many in one call
LEAST_SHARE = 0.01  # of the kernels' time: operators with less are ignored
NO_OPERATOR = "no operator"
_GRID = ("grid_x", "grid_y", "grid_z")
NOBODY = -1
_ON_THE_HOST = (
    "the collectives run on the host (gloo, MPI): no event shows when the training thread waited for them, so the job "
    "cannot be simulated, and the savings are upper bounds derived from the durations of the collectives"
)
LEAST_ALIKE = 3  # collectives of one kind and size


# Why the kernels of one rank take longer than those of the others: more of them, larger ones, or slower ones.
# Kernels are those of the operators that launched them in measured steps, per step: their calls, their time and their
# blocks. A rank is compared with the median of the others. If the operator with most of the additional time is called
# more often, the rank has other work. If it is called as often, but kernels have larger grids, the rank has more data.
# (Kernels of some matrix products have one grid for all sizes, so those whose grid grew decide.) Otherwise equal work
# takes longer: the GPU is slower, or shares something with others.
class OpKernels(NamedTuple):
    """The kernels of one operator in a mean step."""

    calls: float
    ns: float
    blocks: float


@dataclass(frozen=True, slots=True)
class RankKernels:
    """The kernels of a rank by the names of their operators, without collectives."""

    of: Mapping[str, OpKernels]

    def get(self, op: str) -> OpKernels:
        """Returns the kernels of one operator; zeros if it has none."""
        return self.of.get(op, OpKernels(0.0, 0.0, 0.0))


# What a job whose collectives run on the host (gloo, MPI) could gain at most.
# The traces show when each collective ran, on a thread of its own, but not when the training thread waited for it. A
# rank's work beside its collectives is therefore unknown, and the job cannot be simulated. Durations still bound the
# gain. In a collective in which all ranks meet, everybody waits for the rank that came last. Had it come together with
# the last but one, the collective would have ended earlier by at most the shortest wait of the others. Had its transfer
# taken no time, it would have ended earlier by the transfer. Overlaps count once.
@dataclass(frozen=True, slots=True)
class HostBounds:
    """Bounds per matched collective, in ns.

    last: place in `MatchedCollectives.ranks` of the rank that came last, or NOBODY if unknown.
    """

    last: Ints
    end: Ints
    transfer: Ints
    late: Ints
    measured_ns: int

    def of_rank(self, place: int) -> int:
        """Returns the most that the job would gain (ns) if a rank never came last."""
        own = self.last == place
        over = (self.end - self.transfer)[own]
        return union(over - self.late[own], over).length()

    def of_transfers(self, chosen: Flags) -> int:
        """Returns the most that the job would gain (ns) if these transfers took no time."""
        return union((self.end - self.transfer)[chosen], self.end[chosen]).length()


class _Change(NamedTuple):
    change: str
    rank: int | None
    collective: str | None
    process_group: str | None
    saving_ns: int
    about: str | None
    cause: str | None = None
    more_work_ns: int | None = None
    host_pace: float | None = None


class JobRank(NamedTuple):
    """What one rank contributes."""

    work: RankWork
    kernels: RankKernels
    pace: RankPace


class _Kinds(NamedTuple):
    """Kinds of collectives: names and process groups. of: the kind of each instance."""

    names: list[tuple[str, str | None]]
    of: Ints


@dataclass(frozen=True, slots=True)
class CommunicationSplit:
    """Times of one rank's collectives on the GPU, within some spans of time (ns).

    exposed: while the GPU computed nothing; the sum of the next three.
    transfer: at most.
    waiting: at least.
    unknown: of collectives without similar ones.
    waiting_gain: by how much the rank would be faster without waiting.
    transfer_gain: by how much it would then be faster without transfers (and unknown).
    longest: the longest wait.
    """

    total: int
    exposed: int
    transfer: int
    waiting: int
    unknown: int
    transfer_gain: int
    waiting_gain: int
    longest: int


def rank_kernels(context: Context) -> RankKernels:
    """Returns what one rank contributes; empty without whole steps or kernels."""
    activity, called, steps = context.get(gpu), context.get(calls), context.get(paced_steps)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication)
    call = activity.call[rows]
    launch = activity.start[rows].copy()
    launch[call >= 0] = called.start[call[call >= 0]]
    rows = rows[steps.number_at(launch) != NOTHING]
    if not len(rows):
        return RankKernels({})
    table = context.trace.table("kernel")
    blocks = np.prod([table[name][activity.row[rows]].astype(np.float64) for name in _GRID], axis=0)
    op = activity.op[rows]
    names = np.where(op >= 0, np.append(context.trace.table("cpu_op")["name"].astype(np.int64), NOTHING)[op], NOTHING)
    distinct, number = np.unique(names, return_inverse=True)
    sums = [
        np.bincount(number, weights) / len(steps)
        for weights in (np.ones(len(rows)), activity.end[rows] - activity.start[rows], blocks)
    ]
    texts = [context.trace.strings[name] if name != NOTHING else NO_OPERATOR for name in distinct.tolist()]
    return RankKernels({text: OpKernels(*map(float, each)) for text, each in zip(texts, zip(*sums), strict=True)})


def slower_kernels(own: RankKernels, others: Sequence[RankKernels]) -> str | None:
    """Returns why the kernels of a rank take longer than those of the others; None if they do not."""
    known = [other for other in others if other.of]
    if not own.of or not known:
        return None
    middle = {
        op: OpKernels(*(median(values) for values in zip(*(other.get(op) for other in known), strict=True)))
        for op in own.of
    }
    total = sum(each.ns for each in middle.values())
    longer = {op: own.get(op).ns - each.ns for op, each in middle.items()}
    if not total or sum(longer.values()) < LEAST_SHARE * total:
        return None
    most = max(longer, key=lambda op: longer[op])
    mine, theirs = own.get(most), middle[most]
    if mine.calls > MORE_CALLS * theirs.calls:
        what = "kernels outside any operator" if most == NO_OPERATOR else f"kernels of {most}"
        return f"it launches {format_number(mine.calls)} {what} per step, the others {format_number(theirs.calls)}"
    grown = {
        op: own.get(op).blocks / own.get(op).calls / (each.blocks / each.calls)
        for op, each in middle.items()
        if each.blocks > 0 and each.ns > LEAST_SHARE * total
    }
    grown = {op: ratio for op, ratio in grown.items() if ratio > MORE_BLOCKS}
    if grown:
        ratio = sum(grown[op] * middle[op].ns for op in grown) / sum(middle[op].ns for op in grown)
        return f"its kernels work on {ratio:.2f} times as much data"
    known_grids = any(each.blocks > 0 for each in middle.values())
    return f"its kernels take {1 + sum(longer.values()) / total:.2f} times as long" + " with equal grids" * known_grids


def host_bounds(matched: MatchedCollectives, found: Instances) -> HostBounds:
    """Returns the bounds of a job."""
    count, shared, never = len(found.seen), found.seen > 1, np.iinfo(np.int64).max
    waited = waits(matched, found)
    last, late = np.full(count, NOBODY), np.full(count, never)
    last[matched.instance[waited.row]] = waited.culprit
    others = matched.rank[waited.row] != waited.culprit
    np.minimum.at(late, matched.instance[waited.row[others]], waited.ns[others])
    measured = int(found.end[shared].max() - found.start[shared].min()) if shared.any() else 0
    return HostBounds(last, found.end, np.where(shared, found.transfer, 0), np.where(late == never, 0, late), measured)


def _rows(partials: Sequence[tuple[int, JobRank]]) -> Answer:
    matched = match([(rank, part.work.found) for rank, part in partials])
    notes = [*matched.notes, *matched.clock_notes]
    found = instances(matched)
    if not len(matched):
        return rank_what_if.answer([], [*notes, f"{NO_COLLECTIVES}, so the ranks cannot be compared"])
    if not (found.seen > 1).any():
        return rank_what_if.answer(
            [], [*notes, "no collective appears on more than one rank, so the ranks cannot be compared"]
        )
    if not any(part.work.found.kernels.any() for _, part in partials):
        return _of_the_host(matched, found, notes)
    try:
        simulation = Simulation(matched, [part.work for _, part in partials])
    except ViewError as exc:
        return rank_what_if.answer([], [*notes, str(exc)])
    if simulation.error > MAX_ERROR:
        return rank_what_if.answer(
            [],
            [
                *notes,
                f"the model of the job gives {format_duration(simulation.model_ns)} instead of the measured "
                f"{format_duration(simulation.measured_ns)}, so nothing is predicted from it",
            ],
        )
    alike = _all_ranks(simulation)
    if any(change.saving_ns < -WORTH_SAYING * simulation.model_ns for change in alike):
        return rank_what_if.answer(
            [],
            [
                *notes,
                "the ranks wait in ways that the traces do not show (calls to CUDA were not recorded, or the waits are "
                "outside of them), so what they could gain is unknown",
            ],
        )
    changes = [*_ranks(simulation, [part for _, part in partials]), *alike, *_collectives(simulation)]
    notes.append(
        f"from the first collective to the last, the model of the job takes {format_duration(simulation.model_ns)} "
        f"(measured: {format_duration(simulation.measured_ns)}); savings overlap, so do not add them up"
    )
    alone = int(np.count_nonzero(simulation.found.seen[matched.instance[simulation.rows]] == 1))
    if alone:
        notes.append(
            f"{times(alone, 'collective')} without a counterpart on another rank: durations stay as measured in every "
            "row, so savings may be too low"
        )
    return _answer(changes, simulation.model_ns, _steps(matched, simulation.rows), notes)


def _answer(changes: Sequence[_Change], total_ns: int, steps: int, notes: Sequence[str]) -> Answer:
    """Returns the rows, the largest saving first. total_ns: time of the job; steps: 0 if unknown."""
    if total_ns <= 0:
        return rank_what_if.answer([], [*notes, NO_TIME])
    ordered = sorted(changes, key=lambda change: -change.saving_ns)
    return Answer(
        {
            **{name: [getattr(change, name) for change in ordered] for name in FIRST},
            "saving_us": [change.saving_ns / 1e3 for change in ordered],
            "saving_pct": [100 * change.saving_ns / total_ns for change in ordered],
            "saving_per_step_us": [change.saving_ns / 1e3 / steps if steps else None for change in ordered],
            "more_work_us": [None if each.more_work_ns is None else each.more_work_ns / 1e3 for each in ordered],
            "host_pace": [change.host_pace for change in ordered],
            "cause": [change.cause for change in ordered],
            "about": [change.about for change in ordered],
        },
        notes,
    )


def _steps(matched: MatchedCollectives, rows: Ints) -> int:
    """Returns the number of steps whose collectives take part; 0 if unknown."""
    first = rows[matched.rank[rows] == matched.rank[rows[0]]]
    return int((unique_values(matched.step[first]) >= 0).sum())


def _saving(simulation: Simulation, before: Ints, transfer: Ints) -> int:
    return simulation.model_ns - simulation.run(before, transfer)


def _ranks(simulation: Simulation, parts: Sequence[JobRank]) -> list[_Change]:
    """Returns a change for each rank; with many ranks, for those that take longer than the others between
    collectives.
    """
    matched, work = simulation.matched, simulation.work
    excess = np.zeros(len(matched.ranks))
    middle = simulation.medians(work.own, NOTHING)
    np.add.at(excess, work.rank, np.nan_to_num(work.own - middle))
    changes = []
    for place in np.argsort(-excess, kind="stable")[:MAX_RANKS].tolist():
        if not (work.rank == place).any():
            continue
        saving = _saving(simulation, simulation.with_median_work(place), simulation.found.transfer)
        rank = matched.ranks[place]
        more_work = _more_work(simulation, place)
        about, cause, pace = None, None, None
        if saving >= WORTH_SAYING * simulation.model_ns:
            slow = _slow_host(parts, place, more_work[1])
            about, cause = _why(simulation, place, slow)
            if cause == SLOW_KERNELS:
                others = [each.kernels for other, each in enumerate(parts) if other != place]
                cause = slower_kernels(parts[place].kernels, others) or cause
            elif cause == LATE_HOST and slow is not None:
                cause, pace = slow.cause, slow.ratio
        change, more = f"rank {rank} as fast as the others", int(max(0, *more_work))
        changes.append(_Change(change, rank, None, None, saving, about, cause, more, pace))
    return changes


def _slow_host(parts: Sequence[JobRank], place: int, more_ns: float) -> SlowerHost | None:
    """Returns the slower host of a rank. more_ns: its host's work in excess of the others', in all steps."""
    own = parts[place].pace
    return slower_host(own, [each.pace for other, each in enumerate(parts) if other != place], more_ns / own.steps)


def _more_work(simulation: Simulation, place: int) -> tuple[float, float]:
    """Returns the work of a rank in excess of the median of the others (ns), on its GPU and on its host."""
    work = simulation.work
    longer = np.nan_to_num(work.own - simulation.medians(work.own, place))
    on_gpu, on_host = (float(longer[(work.rank == place) & (work.host == host)].sum()) for host in (False, True))
    return on_gpu, on_host


def _why(simulation: Simulation, place: int, slow: SlowerHost | None) -> tuple[str, str]:
    """Returns why a rank is slower than the others, and before which collectives; then the same in few words."""
    work, kinds = simulation.work, _kinds(simulation.matched, simulation.found)
    rank, own = simulation.matched.ranks[place], work.rank == place
    on_gpu, on_host = _more_work(simulation, place)
    if max(on_gpu, on_host) <= 0:
        return f"rank {rank} has no more work than the others, but at different times: {BY_TURNS}", BY_TURNS
    longer = np.nan_to_num(work.own - simulation.medians(work.own, place))[own]
    longer = np.where(work.host[own] == (on_host > on_gpu), longer, 0)
    before = np.bincount(kinds.of[work.closing[own]], longer, len(kinds.names))
    collective, group = kinds.names[int(before.argmax())]
    where = f"{collective} of {group}" if group else collective
    cause = SLOW_KERNELS if on_gpu >= on_host else LATE_HOST
    told = cause
    if cause == LATE_HOST:
        told = slow.about if slow is not None else f"{cause} (see the views idle_causes and findings of this rank)"
    extra = f"{format_duration(float(longer.sum()))} more on its own work than the median of the other ranks"
    return f"rank {rank} spends {extra}, most of it before {where}: {told}", cause


def _kinds(matched: MatchedCollectives, found: Instances) -> _Kinds:
    numbers: dict[tuple[str, str | None], int] = {}
    each = [
        numbers.setdefault((entry.collective, entry.group_description or entry.group), len(numbers))
        for entry in matched.descriptions
    ]
    return _Kinds(list(numbers), np.array(each, np.int64)[matched.description[found.row]])


def _all_ranks(simulation: Simulation) -> list[_Change]:
    """Returns the change of all ranks at once; with two ranks there is no median."""
    if len(simulation.matched.ranks) < 3:
        return []
    saving = _saving(simulation, simulation.with_median_work_of_all(), simulation.found.transfer)
    about = "every rank with the work of the median rank, so that no rank waits"
    return [_Change("all ranks equally fast", None, None, None, saving, about)]


def _collectives(simulation: Simulation) -> list[_Change]:
    """Returns a change for each kind of collective: its transfers take no time."""
    kinds, changes = _kinds(simulation.matched, simulation.found), []
    used = np.zeros(len(kinds.of), np.bool_)
    used[simulation.matched.instance[simulation.rows]] = True
    for number, (collective, group) in enumerate(kinds.names):
        members = used & (kinds.of == number)
        count, took = int(members.sum()), float(simulation.found.transfer[members].sum())
        if not count:
            continue
        transfer = np.where(members, 0, simulation.found.transfer)
        saving = _saving(simulation, simulation.chains.before, transfer)
        about = (
            f"upper bound: {times(count, 'transfer')} of {format_duration(took / count)} on average, if all were hidden"
        )
        changes.append(_Change(f"{collective} hidden or free", None, collective, group, saving, about))
    return changes


def _of_the_host(matched: MatchedCollectives, found: Instances, notes: Sequence[str]) -> Answer:
    """Returns bounds for a job that cannot be simulated."""
    bounds, kinds, changes = host_bounds(matched, found), _kinds(matched, found), []
    for place, rank in enumerate(matched.ranks):
        own = bounds.last == place
        count = int(np.count_nonzero(own & (bounds.late > 0)))
        mean = format_duration(float(bounds.late[own].sum()) / count) if count else ""
        about = (
            f"upper bound: the others waited for it in {times(count, 'collective')}, {mean} on average"
            if count
            else None
        )
        changes.append(_Change(f"rank {rank} never last", rank, None, None, bounds.of_rank(place), about))
    for number, (collective, group) in enumerate(kinds.names):
        members = (kinds.of == number) & (found.seen > 1)
        count = int(members.sum())
        if count:
            mean = format_duration(float(bounds.transfer[members].sum()) / count)
            about = f"upper bound: {times(count, 'transfer')} of {mean} on average, if the ranks waited for all of them"
            saving = bounds.of_transfers(members)
            changes.append(_Change(f"{collective} hidden or free", None, collective, group, saving, about))
    rows = np.flatnonzero(found.seen[matched.instance] > 1)
    return _answer(changes, bounds.measured_ns, _steps(matched, rows), [*notes, _ON_THE_HOST])


@view(
    "rank_what_if",
    columns(
        ("change", "text", "", "what would be different"),
        ("rank", "int", "", "rank that would be faster"),
        ("collective", "text", "", "collective whose transfers would take no time"),
        ("process_group", "text", "", "description or name of its process group"),
        ("saving_us", "float", "us", "time that the whole job would save between the first and the last collective"),
        ("saving_pct", "float", "%", "share of the time from the first to the last collective"),
        ("saving_per_step_us", "float", "us", "saving_us per training step"),
        (
            "more_work_us",
            "float",
            "us",
            "how much longer the rank works than the median of the others, on its GPU or its host, whichever is "
            "larger; missing for host collectives",
        ),
        (
            "host_pace",
            "float",
            "",
            "how many times as long the same operators take on the rank's host as on the other ranks; missing unless "
            "that makes the rank late",
        ),
        (
            "cause",
            "text",
            "",
            "what makes the rank slower, in a few words: its host is late, the same operators take longer there, or "
            "the rank has more, larger or slower kernels",
        ),
        ("about", "text", "", "what makes the rank slower, or what the figure assumes"),
    ),
    reduce=_rows,
)
def rank_what_if(context: Context) -> JobRank:
    """What the job would gain if a rank were as fast as the others, or if transfers took no time; largest gain first.

    The figures come from a critical path over all ranks. Each rank is modelled as two chains of its own work between
    collectives, one on its GPU and one on its host; a collective ends on all of its ranks once the last of them has
    begun it and its transfer is over. To simulate a rank as fast as the others, its work between any two consecutive
    collectives is replaced by the median of the other ranks, and the path is computed again. So the time in which one
    rank waits for another counts as a gain of the other rank's work, never of communication.

    If the same operators take longer on one rank's host than on the others, it probably has a slower core, or shares
    it. The medians of operators and launching calls are compared by name, in the training thread and in the threads
    that run the backward pass. A slower host is reported if three quarters of at least eight names take longer, by at
    least 10 % in the median, and if that explains at least a quarter of the host's additional work.

    A note says how well the model reproduces the time of the job; if the error exceeds 10 %, there are no rows. Nor are
    there rows if the job would be slower with equally fast ranks: then ranks wait in ways that the traces do not show,
    for example because calls to CUDA were not recorded. Work before the first and after the last collective that
    several ranks share is left out. With more than 16 ranks, those with the most work of their own are shown.

    Collectives on the host (gloo, MPI) leave no event that shows when the training thread waited for them, so the work
    of the ranks is unknown. For such jobs, the savings are upper bounds derived from the durations of the collectives:
    how much longer the others waited for a rank than for the second-to-last one, and the transfers.
    """
    return JobRank(context.get(rank_work), context.get(rank_kernels), context.get(rank_pace))


def communication_split(context: Context, measured: Union) -> CommunicationSplit:
    """Splits the collectives of one trace within these spans of time (Unix ns)."""
    activity, found = context.get(gpu), context.get(rank_collectives)
    counted = containing(*measured, found.end - 1) >= 0
    computes = (activity.kind == KERNEL) & ~activity.communication
    computing = union(activity.start[computes], activity.end[computes])
    collectives = union(activity.start[activity.communication], activity.end[activity.communication])
    total = intersection(collectives, measured)
    exposed = difference(total, computing)
    shortest, known = _shortest(found)
    begin = np.where(known, found.end - shortest, found.start)
    moving = intersection(exposed, union(begin[known], found.end[known]))
    unknown = difference(intersection(exposed, union(begin[~known], found.end[~known])), moving)
    waiting = intersection(exposed, union(found.start[known], begin[known]))
    waiting = difference(difference(waiting, moving), unknown)
    lost = _lost(context, found.end - begin, counted)
    return CommunicationSplit(
        total=total.length(),
        exposed=exposed.length(),
        transfer=moving.length(),
        waiting=waiting.length(),
        unknown=unknown.length(),
        transfer_gain=moving.length() + unknown.length() if lost is None else lost[1],
        waiting_gain=waiting.length() if lost is None else lost[0],
        longest=int((begin - found.start)[counted].max(initial=0)),
    )


def _shortest(found: RankCollectives) -> tuple[Ints, Flags]:
    """Returns for each collective the shortest duration of a similar one, and whether there are enough of them."""
    count = len(found.descriptions)
    shortest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(shortest, found.description, found.end - found.start)
    known = np.bincount(found.description, minlength=count) >= LEAST_ALIKE
    return shortest[found.description], known[found.description]


def _lost(context: Context, transfer: Ints, counted: Flags) -> tuple[int, int] | None:
    """Returns what waiting, and then transfers of this length, cost the rank (ns); None if it cannot be simulated.

    counted: collectives that may change; the others stay as they are.
    """
    try:
        simulation = context.get(_alone)
    except ViewError:
        return None
    if not len(simulation.rows):
        return None
    left, nothing = simulation.found.transfer.copy(), simulation.found.transfer.copy()
    left[simulation.matched.instance[counted]] = transfer[counted]
    nothing[simulation.matched.instance[counted]] = 0
    moving_only, without = (simulation.run(simulation.chains.before, each) for each in (left, nothing))
    return max(simulation.model_ns - moving_only, 0), max(moving_only - without, 0)


def _alone(context: Context) -> Simulation:
    """Simulates the rank as a job of its own, as if there were no others."""
    work = context.get(rank_work)
    return Simulation(match([(context.rank, work.found)]), [work], least=1)
