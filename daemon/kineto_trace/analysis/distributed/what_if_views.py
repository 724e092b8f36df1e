"""What the job would gain if one rank, or one kind of collective, were faster."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.distributed.host_collective_bounds import host_bounds
from kineto_trace.analysis.distributed.rank_kernels import RankKernels, rank_kernels, slower_kernels
from kineto_trace.analysis.distributed.rank_pace import RankPace, SlowerHost, rank_pace, slower_host
from kineto_trace.analysis.distributed.rank_simulation import Simulation
from kineto_trace.analysis.distributed.rank_work import NOTHING, RankWork, rank_work
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.quantities import ms
from kineto_trace.collectives.rank_matching import Instances, Matched, instances, match
from kineto_trace.collectives.rank_waits import NO_COLLECTIVES
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
MAX_ERROR = 0.1  # of the time that the job took: a worse model predicts nothing
MAX_RANKS = 16  # that are simulated, those with the most own work
NO_TIME = "the collectives that several ranks have take no time"
WORTH_SAYING = 0.02  # of the time that the job took
FIRST = ("change", "rank", "collective", "process_group")
LATE_HOST, SLOW_KERNELS, BY_TURNS = "its host is late", "its kernels take longer", "late by turns"


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


def _rows(partials: Sequence[tuple[int, JobRank]]) -> Answer:
    matched = match([(rank, part.work.found) for rank, part in partials])
    notes = [*matched.notes, *matched.clock_notes]
    found = instances(matched)
    if not len(matched):
        return _nothing([*notes, f"{NO_COLLECTIVES}, so the ranks cannot be compared"])
    if not (found.seen > 1).any():
        return _nothing([*notes, "no collective appears on more than one rank, so the ranks cannot be compared"])
    if not any(part.work.found.kernels.any() for _, part in partials):
        return _of_the_host(matched, found, notes)
    try:
        simulation = Simulation(matched, [part.work for _, part in partials])
    except ViewError as exc:
        return _nothing([*notes, str(exc)])
    if simulation.error > MAX_ERROR:
        return _nothing(
            [
                *notes,
                f"the model of the job says {ms(simulation.model_ns)} where the traces have "
                f"{ms(simulation.measured_ns)}: nothing is predicted from it",
            ]
        )
    alike = _all_ranks(simulation)
    if any(change.saving_ns < -WORTH_SAYING * simulation.model_ns for change in alike):
        return _nothing(
            [
                *notes,
                "the ranks wait in ways that the traces do not show (without calls to CUDA, or outside of them): "
                "what they could gain is unknown",
            ]
        )
    changes = [*_ranks(simulation, [part for _, part in partials]), *alike, *_collectives(simulation)]
    notes.append(
        f"of {ms(simulation.measured_ns)} from the first collective to the last one, the model of the job reproduces "
        f"{ms(simulation.model_ns)}; savings overlap and must not be added up"
    )
    alone = int(np.count_nonzero(simulation.found.seen[matched.instance[simulation.rows]] == 1))
    if alone:
        notes.append(
            f"{alone} collectives are matched with none of another rank: they take as long as they did whatever is "
            "changed, so savings may be too low"
        )
    return _answer(changes, simulation.model_ns, _steps(matched, simulation.rows), notes)


def _answer(changes: Sequence[_Change], total_ns: int, steps: int, notes: Sequence[str]) -> Answer:
    """The rows, the largest saving first. total_ns: the time that the job takes; steps: 0: unknown."""
    if total_ns <= 0:
        return _nothing([*notes, NO_TIME])
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


def _nothing(notes: Sequence[str]) -> Answer:
    return Answer({column.name: [] for column in rank_what_if.columns}, notes)


def _steps(matched: Matched, rows: Ints) -> int:
    """The number of steps whose collectives take part; 0: unknown."""
    first = rows[matched.rank[rows] == matched.rank[rows[0]]]
    return int((unique_values(matched.step[first]) >= 0).sum())


def _saving(simulation: Simulation, before: Ints, transfer: Ints) -> int:
    return simulation.model_ns - simulation.run(before, transfer)


def _ranks(simulation: Simulation, parts: Sequence[JobRank]) -> list[_Change]:
    """One change for each rank, of many ranks for those that are longer than the others between collectives."""
    matched, work = simulation.matched, simulation.work
    excess = np.zeros(len(matched.ranks))
    middle = simulation.medians(work.own, NOTHING)
    np.add.at(excess, work.rank, np.nan_to_num(work.own - middle))
    changes = []
    for place in np.argsort(-excess, kind="stable")[:MAX_RANKS].tolist():
        if not (work.rank == place).any():
            continue
        saving = _saving(simulation, simulation.like_the_others(place), simulation.found.transfer)
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
    """more_ns: what the rank's host works more than the others, in all steps."""
    own = parts[place].pace
    return slower_host(own, [each.pace for other, each in enumerate(parts) if other != place], more_ns / own.steps)


def _more_work(simulation: Simulation, place: int) -> tuple[float, float]:
    """What a rank works more than the median of the others (ns), on its GPU and on its host."""
    work = simulation.work
    longer = np.nan_to_num(work.own - simulation.medians(work.own, place))
    on_gpu, on_host = (float(longer[(work.rank == place) & (work.host == host)].sum()) for host in (False, True))
    return on_gpu, on_host


def _why(simulation: Simulation, place: int, slow: SlowerHost | None) -> tuple[str, str]:
    """What makes a rank slower than the others, and before which collectives; then the same in few words."""
    work, kinds = simulation.work, _kinds(simulation.matched, simulation.found)
    rank, own = simulation.matched.ranks[place], work.rank == place
    on_gpu, on_host = _more_work(simulation, place)
    if max(on_gpu, on_host) <= 0:
        return f"rank {rank} has no more own work than the others, but at other times: they are late by turns", BY_TURNS
    longer = np.nan_to_num(work.own - simulation.medians(work.own, place))[own]
    longer = np.where(work.host[own] == (on_host > on_gpu), longer, 0)
    before = np.bincount(kinds.of[work.closing[own]], longer, len(kinds.names))
    collective, group = kinds.names[int(before.argmax())]
    where = f"{collective} of {group}" if group else collective
    cause = SLOW_KERNELS if on_gpu >= on_host else LATE_HOST
    told = cause
    if cause == LATE_HOST:
        told = slow.about if slow is not None else f"{cause} (views idle_causes and findings of this rank)"
    extra = f"{ms(float(longer.sum()))} more own work than the median of the others"
    return f"rank {rank} has {extra}, most of it before {where}: {told}", cause


class _Kinds(NamedTuple):
    """Kinds of collectives: names and process groups; of: the number of each instance's kind."""

    names: list[tuple[str, str | None]]
    of: Ints


def _kinds(matched: Matched, found: Instances) -> _Kinds:
    numbers: dict[tuple[str, str | None], int] = {}
    each = [
        numbers.setdefault((entry.collective, entry.group_description or entry.group), len(numbers))
        for entry in matched.descriptions
    ]
    return _Kinds(list(numbers), np.array(each, np.int64)[matched.description[found.row]])


def _all_ranks(simulation: Simulation) -> list[_Change]:
    """All ranks at once; of two ranks there is no middle one."""
    if len(simulation.matched.ranks) < 3:
        return []
    saving = _saving(simulation, simulation.all_alike(), simulation.found.transfer)
    about = "nobody waits for anybody: all ranks have the own work of the median rank"
    return [_Change("all ranks equally fast", None, None, None, saving, about)]


def _collectives(simulation: Simulation) -> list[_Change]:
    """One change for each kind of collective: its transfers take no time."""
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
        about = f"at most: {count} transfers of {ms(took / count)} on average, if all of them were hidden"
        changes.append(_Change(f"{collective} hidden or free", None, collective, group, saving, about))
    return changes


# ------------------------------------------------------------ collectives on the host


def _of_the_host(matched: Matched, found: Instances, notes: Sequence[str]) -> Answer:
    """Bounds for a job of which no more is known."""
    bounds, kinds, changes = host_bounds(matched, found), _kinds(matched, found), []
    for place, rank in enumerate(matched.ranks):
        own = bounds.last == place
        count = int(np.count_nonzero(own & (bounds.late > 0)))
        mean = ms(float(bounds.late[own].sum()) / count) if count else ""
        about = f"at most: in {count} collectives the others waited for it, for {mean} on average" if count else None
        changes.append(_Change(f"rank {rank} never the last one", rank, None, None, bounds.of_rank(place), about))
    for number, (collective, group) in enumerate(kinds.names):
        members = (kinds.of == number) & (found.seen > 1)
        count = int(members.sum())
        if count:
            mean = ms(float(bounds.transfer[members].sum()) / count)
            about = f"at most: {count} transfers of {mean} on average, if the ranks waited for all of them"
            saving = bounds.of_transfers(members)
            changes.append(_Change(f"{collective} hidden or free", None, collective, group, saving, about))
    rows = np.flatnonzero(found.seen[matched.instance] > 1)
    return _answer(changes, bounds.measured_ns, _steps(matched, rows), [*notes, _ON_THE_HOST])


_ON_THE_HOST = (
    "the collectives run on the host (gloo, MPI): no event says when the training thread waited for them, so the job "
    "cannot be simulated, and the savings are upper bounds by the durations of the collectives"
)


@view(
    "rank_what_if",
    columns(
        ("change", "text", "", "what would be different"),
        ("rank", "int", "", "rank that would be faster"),
        ("collective", "text", "", "collective whose transfers would take no time"),
        ("process_group", "text", "", "description or name of its process group"),
        ("saving_us", "float", "us", "time that the whole job would save, from the first collective to the last one"),
        ("saving_pct", "float", "%", "share of that time"),
        ("saving_per_step_us", "float", "us", "the same per training step"),
        (
            "more_work_us",
            "float",
            "us",
            "what the rank works more than the median of the others, on its GPU or its host; missing for collectives "
            "on the host",
        ),
        (
            "host_pace",
            "float",
            "",
            "how many times as long as on the other ranks the same operators take on the rank's host; missing unless "
            "that makes it late",
        ),
        (
            "cause",
            "text",
            "",
            "what makes the rank slower, in few words: its host is late, the same operators take longer on it, or its "
            "kernels are more, larger or slower",
        ),
        ("about", "text", "", "what makes the rank slower, or what the figure assumes"),
    ),
    reduce=_rows,
)
def rank_what_if(context: Context) -> JobRank:
    """What the job would gain if a rank worked as fast as the others, or if transfers took no time; the most first.

    The figures come from a critical path over all ranks. Each rank is two chains of own work between collectives, of
    its GPU and of its host; a collective ends on all of its ranks when the last one has begun it and its transfer is
    over. A rank as fast as the others has between each two consecutive collectives the median own work of the other
    ranks, and the path is found again. So time in which a rank waits for another one counts as a gain of that rank's
    work, never of communication.

    A host on which the same operators take longer than on the other ranks probably has a slower core, or shares it.
    The medians of operators and launching calls are compared by name, in the thread that trains and in those that run
    backward. A slower host is told if three quarters of at least eight names take longer, by 10 % in the median, and if
    that explains a quarter of what the host works more.

    The model says in a note how well it reproduces the time that the job took; if it is wrong by more than 10 %, there
    are no rows. There are none, either, if it finds the job slower with equal ranks: then ranks wait in ways that the
    traces do not show, for example since calls to CUDA were not recorded. Work before the first and after the last
    collective that several ranks have is left out. Of more than 16 ranks, those with the most own work are shown.

    Collectives on the host (gloo, MPI) leave no event of when the training thread waited for them, so that own work is
    unknown. Of such jobs the savings are upper bounds by the durations of the collectives: what the others waited for a
    rank beyond the last but one, and the transfers.
    """
    return JobRank(context.get(rank_work), context.get(rank_kernels), context.get(rank_pace))
