"""Matches collectives of several ranks with each other, and aligns their clocks.

Theory of operation
    Every rank contributes a small table: one row per collective. instance_matching.py gives a row and its counterparts
    on other ranks one number, so that extremes over ranks are extremes over equal numbers.

    Clocks: times of several hosts may be off by more than a collective takes. So they are put on one clock as in merged
    files (collectives/rank_clocks.py): by the measured offsets, refined by collectives, each rank with the remaining
    uncertainty of its clock. If neither is available, clocks are compared by the assumption that ranks finish a
    collective at about the same time: the median difference of the ends, over the groups that ranks share. That shows
    who began late, but not who finished late, and its error is unknown.

Collectives on the host are those of gloo and MPI, as PyTorch annotates them on the threads that run them.

PyTorch records only their names, such as gloo:all_reduce: neither process group nor size nor number. A call spans
waiting and transfer, like an NCCL kernel on a GPU.

Waiting of ranks for each other follows from durations; the last rank to begin follows from clocks.
    Durations: no clock matters.
    No rank can leave an all_reduce, all_gather, reduce_scatter, all_to_all or barrier before all others have entered
    it. So the rank with the shortest duration came last, and the others waited for it for the rest of their durations.
    Ranks may leave broadcasts, sends and the like earlier: these do not count here.

    Clocks: a rank is the last one only if it begins later than the last but one by more than the uncertainty of the
    clocks. If the clocks are unknown and aligned by the ends of collectives, the uncertainty is the difference between
    the ends of the same collective.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import union
from kineto_trace.base.array_types import Flags, Floats, Ints
from kineto_trace.base.quantities import format_duration
from kineto_trace.collectives.instance_matching import CollectiveRows, group_numbers, instance_numbers
from kineto_trace.collectives.nccl import NO_SEQUENCE, CollectiveDescription, collective_name, collectives
from kineto_trace.collectives.rank_clocks import (
    MEETINGS,
    NO_HOSTS,
    TIMESTAMP_NS,
    UNKNOWN,
    Alignment,
    Blocking,
    RankClock,
    RankCollectives,
    align,
    clock_of,
    format_ranks,
)
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, OP_TABLES
from kineto_trace.structure.activity_links import calls, gpu, steps

AlignBy = Literal["auto", "clock", "collectives"]
_METHODS = {
    "given": "by the given offsets",
    "trace": "by the measured offsets",
    "collectives": "refined by collectives",
    "host": "on the same host",
}
KERNEL = GPU_TABLES.index("kernel")
_ON_THE_HOST = re.compile(r"^(?:gloo|mpi):\w")
NO_COLLECTIVES = (
    "the traces have no collectives: neither NCCL or RCCL kernels (activity type kernel) nor operators such as "
    "gloo:all_reduce (activity type cpu_op)"
)


@dataclass(frozen=True, slots=True)
class MatchedCollectives:
    """The collectives of all ranks, concatenated.

    rank: place in `ranks`.
    instance: equal for counterparts.
    description: number into `descriptions`.
    start, end: aligned Unix ns.
    notes, clock_notes: assumptions, the latter on times of different ranks.
    uncertainty: for each of `ranks`, the maximum error of its clock relative to the reference rank, on either side (ns;
        NaN if unknown).
    clock: equal for ranks that share a clock.
    """

    ranks: list[int]
    rank: Ints
    instance: Ints
    description: Ints
    sequence: Ints
    step: Ints
    start: Ints
    end: Ints
    compute_ns: Ints
    descriptions: list[CollectiveDescription]
    notes: list[str]
    clock_notes: list[str]
    uncertainty: Floats
    clock: Ints

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Instances:
    """One value per matched collective (ns).

    row: of the rank that began last.
    seen: number of ranks that have it.
    transfer: the shortest duration of all ranks, that is, of the one that waited least.
    """

    row: Ints
    seen: Ints
    start: Ints
    end: Ints
    last_start: Ints
    first_end: Ints
    transfer: Ints


@dataclass(frozen=True, slots=True)
class Waits:
    """One value per rank and collective that several ranks have: rows of `MatchedCollectives`.

    ns: how long the rank waited.
    culprit: place in `MatchedCollectives.ranks` of the rank that came last.
    """

    row: Ints
    ns: Ints
    culprit: Ints


@dataclass(frozen=True, slots=True)
class LastRanks:
    """One value per matched collective.

    certain: whether the last rank to begin is known.
    margin: how much later (ns) it began than the last but one.
    caused: how long (ns) the others waited for it alone: the margin, or their longest wait if that is less; 0 if
        uncertain.
    """

    certain: Flags
    margin: Ints
    caused: Ints


def rank_collectives(context: Context) -> RankCollectives:
    """Returns the contribution of one rank: its communication kernels; without any, its collectives on the host."""
    found, work = context.get(collectives), context.get(gpu)
    if not len(found):
        return context.get(host_collectives)
    apart = np.array([description.transfer for description in found.descriptions], np.bool_)
    group = group_numbers(found.descriptions)
    owner = group[found.description] if len(found) else found.description
    # kernels with one number in one group are one collective; without a number each is one
    alone = found.sequence == NO_SEQUENCE
    serial = np.where(alone, np.arange(len(found)), found.sequence)
    keys = np.stack([owner, apart[found.description] if len(found) else owner, alone, serial])
    _, first, number, kernels = np.unique(keys, axis=1, return_index=True, return_inverse=True, return_counts=True)
    number = number.reshape(-1)
    start = found.start[first]
    end = np.full(len(first), np.iinfo(np.int64).min)
    np.maximum.at(end, number, found.end)
    order = np.argsort(start, kind="stable")
    first, start, end, kernels = first[order], start[order], end[order], kernels[order]
    description = found.description[first]
    place = found.place[first]
    return RankCollectives(
        host=context.trace.target.host,
        clock=clock_of(context.trace.target.clock_offset_ns, context.trace.target.clock_uncertainty_ns),
        start=start,
        end=end,
        description=description,
        sequence=found.sequence[first],
        step=context.get(steps).number_at(_launch(context, place)),
        launch=_launch(context, place),
        stream=work.track[place],
        compute_ns=_computing(context, work.device[place], start, end),
        kernels=kernels,
        descriptions=found.descriptions,
    )


def _launch(context: Context, place: Ints) -> Ints:
    """Returns when each GPU activity was launched; its start if the call is missing."""
    work, called = context.get(gpu), context.get(calls)
    launch = work.call[place]
    return np.where(launch >= 0, called.start[launch], work.start[place]) if len(called) else work.start[place]


def _computing(context: Context, device: Ints, start: Ints, end: Ints) -> Ints:
    work = context.get(gpu)
    covered = np.zeros(len(start), np.int64)
    computes = (work.kind == KERNEL) & ~work.communication
    for number in unique_values(device).tolist():
        own, mask = computes & (work.device == number), device == number
        covered[mask] = union(work.start[own], work.end[own]).within(start[mask], end[mask])
    return covered


def match(partials: Sequence[tuple[int, RankCollectives]], by: AlignBy = "auto") -> MatchedCollectives:
    """Matches the collectives of all ranks and aligns their clocks."""
    ranks = [rank for rank, _ in partials]
    numbers: dict[CollectiveDescription, int] = {}
    own = [np.array([numbers.setdefault(d, len(numbers)) for d in part.descriptions], np.int64) for _, part in partials]
    descriptions = list(numbers)
    description = _joined([number[part.description] for number, (_, part) in zip(own, partials, strict=True)])
    sequence = _joined([part.sequence for _, part in partials])
    rank = np.repeat(np.arange(len(ranks)), [len(part) for _, part in partials])
    start, end = (_joined([getattr(part, name) for _, part in partials]) for name in ("start", "end"))
    offset, apart = _known_clocks(ranks, [part for _, part in partials])
    moved = offset[rank] if len(rank) else rank
    step = _joined([part.step for _, part in partials])
    on_host = _joined([part.kernels for _, part in partials]) == 0
    times = (start + moved, end + moved)
    rows = CollectiveRows(ranks, rank, description, sequence, step, *times, on_host, descriptions, apart)
    instance, notes = instance_numbers(rows)
    matched = MatchedCollectives(
        ranks,
        rank,
        instance,
        description,
        sequence,
        step,
        start,
        end,
        _joined([part.compute_ns for _, part in partials]),
        descriptions,
        [*notes, *_size_notes(descriptions, description)],
        [],
        np.zeros(len(ranks)),
        np.arange(len(ranks)),
    )
    return matched if len(ranks) < 2 else _aligned(matched, [part for _, part in partials], by)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _known_clocks(ranks: Sequence[int], parts: Sequence[RankCollectives]) -> tuple[Ints, Floats]:
    """Returns the measured offsets (ns), and for each two ranks the maximum remaining difference of their clocks."""
    if not ranks:
        return np.empty(0, np.int64), np.empty((0, 0))
    alignment = align(ranks, [part.clock for part in parts], None, [part.host for part in parts])
    known = np.array([np.inf if c.uncertainty_ns is None else c.uncertainty_ns for c in alignment.clocks], np.float64)
    offset = np.array([clock.offset_ns for clock in alignment.clocks], np.int64)
    number = _clock_numbers(parts, offset)
    apart: Floats = np.where(number[:, None] == number, 2.0 * TIMESTAMP_NS, known[:, None] + known)
    return offset, apart


def _size_notes(descriptions: Sequence[CollectiveDescription], description: Ints) -> list[str]:
    unknown = np.array([d.bytes is None for d in descriptions], np.bool_)
    if not len(description) or not unknown[description].any():
        return []
    return [
        f"{int(unknown[description].sum())} of {len(description)} collectives have no sizes in the traces (arguments "
        "'In msg nelems' and 'dtype' of their kernels), so their bandwidths are unknown"
    ]


def _aligned(matched: MatchedCollectives, parts: Sequence[RankCollectives], by: str) -> MatchedCollectives:
    """Puts all times on the clock of one rank."""
    measured = [RankClock() if by == "collectives" else part.clock for part in parts]
    hosts = [] if by == "collectives" else [part.host for part in parts]
    found = [_blocking(matched, place) for place in range(len(parts))] if by == "auto" else None
    alignment = align(matched.ranks, measured, found, hosts)
    shift = np.array([clock.offset_ns for clock in alignment.clocks], np.int64)
    unknown = np.array([clock.uncertainty_ns is None for clock in alignment.clocks])
    unknown[alignment.reference] = False
    by_ends, far = np.zeros(len(parts), np.bool_), 0
    if by != "clock" and unknown.any():
        ahead, known = _offsets(_moved(matched, shift))
        by_ends = unknown & known & known[alignment.reference]
        off = ahead - ahead[alignment.reference]
        shift = np.where(by_ends, shift - off, shift)
        far = int(np.abs(off[by_ends]).max(initial=0))
    uncertainty = [np.nan if clock.uncertainty_ns is None else clock.uncertainty_ns for clock in alignment.clocks]
    notes = _clock_notes(matched.ranks, alignment, by_ends, far)
    return replace(
        _moved(matched, shift),
        uncertainty=np.array(uncertainty, np.float64),
        clock=_clock_numbers(parts, shift),
        clock_notes=notes,
    )


def _blocking(matched: MatchedCollectives, place: int) -> Blocking:
    """Returns the collectives of one rank that synchronize it with others, by the numbers that these have too."""
    meets = np.array([d.collective in MEETINGS for d in matched.descriptions], np.bool_)
    own = np.flatnonzero((matched.rank == place) & meets[matched.description]) if len(matched) else matched.rank
    key, first = np.unique(matched.instance[own], return_index=True)
    return Blocking(key.astype(np.uint64), matched.start[own][first], matched.end[own][first])


def _clock_numbers(parts: Sequence[RankCollectives], shift: Ints) -> Ints:
    """Returns numbers that are equal for ranks of one host with the same shift."""
    numbers: dict[Any, int] = {}
    found = []
    for place, part in enumerate(parts):
        alone = part.host in NO_HOSTS
        found.append(numbers.setdefault(place if alone else (part.host, int(shift[place])), len(numbers)))
    return np.array(found, np.int64)


def _moved(matched: MatchedCollectives, shift: Ints) -> MatchedCollectives:
    own = shift[matched.rank]
    return replace(matched, start=matched.start + own, end=matched.end + own)


def _clock_notes(ranks: Sequence[int], alignment: Alignment, by_ends: Flags, far_ns: int) -> list[str]:
    """Returns notes on how the clocks are compared, and their uncertainty."""
    reference = alignment.reference
    others = [clock for place, clock in enumerate(alignment.clocks) if place != reference]
    if all(clock.method == "host" for clock in others):
        within = format_duration(TIMESTAMP_NS)
        return [f"all ranks ran on one host and share its clock, which is accurate to within {within}"]
    count = {method: sum(clock.method == method for clock in others) for method in _METHODS}
    parts = [f"{number} {_METHODS[method]}" for method, number in count.items() if number]
    notes = [f"clocks are aligned to that of rank {ranks[reference]}: {'; '.join(parts)}"] if parts else []
    known = [clock.uncertainty_ns for clock in others if clock.uncertainty_ns is not None]
    if known:
        notes.append(
            f"clocks with known uncertainty are within {format_duration(max(known))} of that of rank {ranks[reference]}"
        )
    if by_ends.any():
        notes.append(
            f"the clock offsets of ranks {format_ranks(_chosen(ranks, by_ends))} are unknown: these ranks are aligned "
            f"by the ends of their collectives (up to {format_duration(far_ns)} apart), with unknown uncertainty"
        )
    left = np.array([clock.uncertainty_ns is None for clock in alignment.clocks]) & ~by_ends
    left[reference] = False
    if left.any():
        notes.append(
            f"the clocks of ranks {format_ranks(_chosen(ranks, left))} are used as they are: their offsets are unknown"
        )
    return [*notes, *alignment.notes]


def _chosen(ranks: Sequence[int], mask: Flags) -> list[int]:
    return [ranks[place] for place in np.flatnonzero(mask).tolist()]


def _offsets(matched: MatchedCollectives) -> tuple[Ints, Flags]:
    """Returns how far each rank's clock is ahead of the first one's (ns), and whether that could be determined."""
    count = len(matched.ranks)
    order = np.lexsort((matched.rank, matched.instance))
    instance, rank, end = matched.instance[order], matched.rank[order], matched.end[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = instance[1:] != instance[:-1]
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1] if len(order) else order  # the instance's lowest rank
    pair, difference = rank[first] * count + rank, end - end[first]
    apart = rank[first] != rank
    steps_between: dict[tuple[int, int], int] = {}
    for key in unique_values(pair[apart]).tolist():
        steps_between[divmod(key, count)] = int(np.median(difference[apart & (pair == key)]))
    offset, known, waiting = np.zeros(count, np.int64), np.zeros(count, np.bool_), [0]
    known[0] = True
    while waiting:
        here = waiting.pop(0)
        for (low, high), ahead in steps_between.items():
            other, change = (high, ahead) if low == here else (low, -ahead)
            if here in (low, high) and not known[other]:
                offset[other], known[other] = offset[here] + change, True
                waiting.append(other)
    return offset, known


def instances(matched: MatchedCollectives) -> Instances:
    """Returns the extremes over ranks of each collective, in the order of `MatchedCollectives.instance`."""
    count = int(matched.instance.max()) + 1 if len(matched) else 0
    large, small = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    start, first_end, transfer = (np.full(count, large) for _ in range(3))
    end, last_start = (np.full(count, small) for _ in range(2))
    for into, values, choose in (
        (start, matched.start, np.minimum),
        (first_end, matched.end, np.minimum),
        (transfer, matched.end - matched.start, np.minimum),
        (end, matched.end, np.maximum),
        (last_start, matched.start, np.maximum),
    ):
        choose.at(into, matched.instance, values)
    row = np.zeros(count, np.int64)
    latest = np.flatnonzero(matched.start == last_start[matched.instance])[::-1]  # the first rank of equal ones
    row[matched.instance[latest]] = latest
    return Instances(row, np.bincount(matched.instance, minlength=count), start, end, last_start, first_end, transfer)


def skew_uncertainty(matched: MatchedCollectives) -> Floats:
    """Returns for each instance the maximum error (ns) of a difference between times of two ranks; NaN if unknown.

    Every clock may differ from the reference by its uncertainty, so a difference may be off by the sum of the two
    largest ones. Ranks that share a clock differ by the accuracy of timestamps.
    """
    count = int(matched.instance.max()) + 1 if len(matched) else 0
    clocks = int(matched.clock.max(initial=0)) + 1
    pair, first = np.unique(matched.instance * clocks + matched.clock[matched.rank], return_index=True)
    instance, value = pair // clocks, matched.uncertainty[matched.rank[first]]
    order = np.lexsort((value, instance))  # NaN last
    value = value[order]
    last = np.searchsorted(instance, np.arange(count), side="right") - 1
    before = np.concatenate([[-1], last[:-1]]) if count else last
    apart = np.where(last - before > 1, value[last] + value[np.maximum(last - 1, 0)], 2.0 * TIMESTAMP_NS)
    found: Floats = np.where(np.bincount(matched.instance, minlength=count) > 1, apart, np.nan)
    return found


def host_collectives(context: Context) -> RankCollectives:
    """Returns the contribution of one rank without communication kernels."""
    trace = context.trace
    named = matches(trace.strings, _ON_THE_HOST)
    tables = [trace.table(kind) for kind in OP_TABLES]
    chosen = [named[table["name"]] for table in tables]
    start, end, name, thread = (
        np.concatenate([values[rows] for values, rows in zip(column, chosen, strict=True)]).astype(np.int64)
        for column in (
            [table["start"] for table in tables],
            [table.end() for table in tables],
            [table["name"] for table in tables],
            [table["thread"] for table in tables],
        )
    )
    order = np.argsort(start, kind="stable")
    start, end, name, thread = start[order], end[order], name[order], thread[order]
    distinct, description = np.unique(name, return_inverse=True)
    return RankCollectives(
        host=trace.target.host,
        clock=clock_of(trace.target.clock_offset_ns, trace.target.clock_uncertainty_ns),
        start=start,
        end=end,
        description=description.astype(np.int64),
        sequence=np.full(len(start), NO_SEQUENCE),
        step=context.get(steps).number_at(start),
        launch=start,
        stream=thread,
        compute_ns=np.full(len(start), UNKNOWN),
        kernels=np.zeros(len(start), np.int64),
        descriptions=tuple(_named(trace.strings[number]) for number in distinct.tolist()),
    )


def _named(text: str) -> CollectiveDescription:
    return CollectiveDescription(
        collective=collective_name(text),
        group=None,
        group_description=None,
        ranks=(),
        size=None,
        dtype=None,
        in_bytes=None,
        out_bytes=None,
    )


def waits(matched: MatchedCollectives, found: Instances | None = None) -> Waits:
    """Returns the waiting of all ranks in collectives that synchronize them."""
    found = instances(matched) if found is None else found
    if not len(matched):
        return Waits(*np.empty((3, 0), np.int64))
    duration = matched.end - matched.start
    beyond = duration - found.transfer[matched.instance]
    shortest = np.zeros(len(found.seen), np.int64)
    least = np.flatnonzero(beyond == 0)[::-1]  # the first rank of equal ones
    shortest[matched.instance[least]] = matched.rank[least]
    meets = np.array([description.collective in MEETINGS for description in matched.descriptions], np.bool_)
    row = np.flatnonzero(meets[matched.description] & (found.seen[matched.instance] > 1))
    return Waits(row, beyond[row], shortest[matched.instance[row]])


def missing_waits(matched: MatchedCollectives, found: Waits) -> list[str]:
    """Returns the reason if the waiting is unknown."""
    if len(found.row):
        return []
    shared = int((instances(matched).seen > 1).sum())
    if not len(matched):
        why = NO_COLLECTIVES
    elif not shared:
        why = "no collective appears on more than one rank"
    else:
        kinds = ", ".join(sorted({description.collective for description in matched.descriptions}))
        why = f"{shared} collectives appear on several ranks, but none of them synchronises all ranks ({kinds})"
    return [f"{why}, so it is unknown which rank waits for which"]


def last_ranks(matched: MatchedCollectives, found: Instances) -> LastRanks:
    """Returns how much later the last rank of each collective began than the others."""
    if not len(matched):
        nothing = np.empty(0, np.int64)
        return LastRanks(nothing.astype(np.bool_), nothing, nothing)
    rest = np.ones(len(matched), np.bool_)
    rest[found.row] = False
    rest &= found.seen[matched.instance] > 1
    before = found.last_start.copy()
    np.minimum.at(before, matched.instance[rest], found.start[matched.instance[rest]])
    np.maximum.at(before, matched.instance[rest], matched.start[rest])
    waited = np.zeros(len(found.seen), np.int64)
    duration = matched.end - matched.start
    np.maximum.at(waited, matched.instance[rest], (duration - found.transfer[matched.instance])[rest])
    margin = found.last_start - before
    doubt = skew_uncertainty(matched)
    doubt = np.where(np.isnan(doubt), found.end - found.first_end + 2.0 * TIMESTAMP_NS, doubt)
    certain = (found.seen > 1) & (margin > doubt)
    return LastRanks(certain, margin, np.where(certain, np.minimum(margin, waited), 0))
