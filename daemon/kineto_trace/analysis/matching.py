"""Collectives of several ranks matched with each other, and their clocks aligned.

Theory of operation
    Every rank contributes a small table: one row per collective, with the key that its counterparts on the other
    ranks have too (nccl.py says which). The keys of all ranks together are numbered; a row and its counterparts have
    one number, so that extremes over ranks are extremes over equal numbers.

    Clocks: times of several hosts may be off by more than a collective takes. All ranks finish a collective at about
    the same time; so the median difference of its ends tells how far two clocks are apart. Ranks are joined over the
    groups that they share, beginning with the lowest rank, whose clock is taken for right. This says nothing of who
    finished late, only of who began late, which is what matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.context import Context
from kineto_trace.analysis.intervals import union
from kineto_trace.analysis.nccl import NO_SEQUENCE, Description, collectives
from kineto_trace.analysis.parts import NOTHING, calls, gpu, steps
from kineto_trace.errors import ViewError
from kineto_trace.model import GPU_TABLES

Ints = npt.NDArray[np.int64]
ALIGNMENTS = ("auto", "clock", "collectives")
KERNEL = GPU_TABLES.index("kernel")


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """The collectives of one rank, in the order of their starts (Unix ns). One value per collective.

    compute_ns: of its time in which other kernels of its device ran. step: number of the step that launched it;
    NOTHING: none. ordinal: counts those of one process group and name from 0 on.
    """

    host: str
    start: Ints
    end: Ints
    description: Ints
    sequence: Ints
    ordinal: Ints
    step: Ints
    compute_ns: Ints
    kernels: Ints
    descriptions: tuple[Description, ...]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Matched:
    """Collectives of all ranks under each other. rank: place in `ranks`; instance: equal for counterparts.

    description: number into `descriptions`; start, end: aligned Unix ns. notes: what was assumed.
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
    descriptions: list[Description]
    notes: list[str]

    def __len__(self) -> int:
        return len(self.rank)


def rank_collectives(context: Context) -> RankCollectives:
    """What one rank contributes."""
    found, work = context.get(collectives), context.get(gpu)
    apart = np.array([description.transfer for description in found.descriptions], np.bool_)
    group = _group_numbers(found.descriptions)
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
        start=start,
        end=end,
        description=description,
        sequence=found.sequence[first],
        ordinal=_ordinals(_name_numbers(found.descriptions)[description] if len(first) else description),
        step=_steps(context, place),
        compute_ns=_computing(context, work.device[place], start, end),
        kernels=kernels,
        descriptions=found.descriptions,
    )


def _group_numbers(descriptions: Sequence[Description]) -> Ints:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault((d.group, d.ranks), len(numbers)) for d in descriptions], np.int64)


def _name_numbers(descriptions: Sequence[Description]) -> Ints:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault((d.group, d.ranks, _paired(d)), len(numbers)) for d in descriptions], np.int64)


def _paired(description: Description) -> str:
    """A send and its recv have different names."""
    return "sendrecv" if description.transfer else description.collective


def _ordinals(group: Ints) -> Ints:
    """How many of the same group stand before each."""
    order = np.argsort(group, kind="stable")
    place = np.arange(len(group))
    begins = np.ones(len(group), np.bool_)
    begins[1:] = group[order][1:] != group[order][:-1]
    ordinal = np.empty(len(group), np.int64)
    ordinal[order] = place - np.maximum.accumulate(np.where(begins, place, 0))
    return ordinal


def _steps(context: Context, place: Ints) -> Ints:
    """The number of the step in which each GPU activity was launched (without its call: in which it began)."""
    found, work, called = context.get(steps), context.get(gpu), context.get(calls)
    if not len(found):
        return np.full(len(place), NOTHING)
    launch = work.call[place]
    time = np.where(launch >= 0, called.start[launch], work.start[place]) if len(called) else work.start[place]
    at = np.searchsorted(found.start, time, side="right") - 1
    return np.where((at >= 0) & (time < found.end[at]), found.number[at], NOTHING)


def _computing(context: Context, device: Ints, start: Ints, end: Ints) -> Ints:
    work = context.get(gpu)
    covered = np.zeros(len(start), np.int64)
    computes = (work.kind == KERNEL) & ~work.communication
    for number in np.unique(device).tolist():
        own, mask = computes & (work.device == number), device == number
        covered[mask] = union(work.start[own], work.end[own]).within(start[mask], end[mask])
    return covered


def match(partials: Sequence[tuple[int, RankCollectives]], align: str = "auto") -> Matched:
    """The collectives of all ranks, matched; clocks aligned. Raises ViewError."""
    if align not in ALIGNMENTS:
        raise ViewError(f"option align: {align!r} is none of {', '.join(ALIGNMENTS)}")
    ranks = [rank for rank, _ in partials]
    numbers: dict[Description, int] = {}
    own = [np.array([numbers.setdefault(d, len(numbers)) for d in part.descriptions], np.int64) for _, part in partials]
    descriptions = list(numbers)
    description = _joined([number[part.description] for number, (_, part) in zip(own, partials, strict=True)])
    sequence = _joined([part.sequence for _, part in partials])
    ordinal = _joined([part.ordinal for _, part in partials])
    rank = np.repeat(np.arange(len(ranks)), [len(part) for _, part in partials])
    instance = _instances(descriptions, description, sequence, ordinal)
    matched = Matched(
        ranks,
        rank,
        instance,
        description,
        sequence,
        _joined([part.step for _, part in partials]),
        _joined([part.start for _, part in partials]),
        _joined([part.end for _, part in partials]),
        _joined([part.compute_ns for _, part in partials]),
        descriptions,
        _matching_notes(len(ranks), descriptions, description, sequence),
    )
    return _aligned(matched, [part.host for _, part in partials], align)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _instances(descriptions: Sequence[Description], description: Ints, sequence: Ints, ordinal: Ints) -> Ints:
    group, name = _group_numbers(descriptions), _name_numbers(descriptions)
    transfer = np.array([d.transfer for d in descriptions], np.bool_)
    if not len(description):
        return description
    alone = sequence == NO_SEQUENCE
    # by number: (group, whether a transfer, number); by order: (group and name, ordinal)
    keys = np.stack(
        [
            alone,
            np.where(alone, name[description], group[description]),
            np.where(alone, 0, transfer[description]),
            np.where(alone, ordinal, sequence),
        ]
    )
    found: Ints = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return found


def _matching_notes(ranks: int, descriptions: Sequence[Description], description: Ints, sequence: Ints) -> list[str]:
    notes = []
    unnumbered = int((sequence == NO_SEQUENCE).sum())
    if unnumbered and ranks > 1:
        notes.append(
            f"{unnumbered} of {len(sequence)} collectives have no sequence number in the traces: they are matched over "
            "ranks by their order in the process group"
        )
    unknown = np.array([d.bytes is None for d in descriptions], np.bool_)
    if len(description) and unknown[description].any():
        notes.append(
            f"{int(unknown[description].sum())} of {len(sequence)} collectives have no sizes in the traces (arguments "
            "'In msg nelems' and 'dtype' of their kernels): they have no bandwidths"
        )
    return notes


def _aligned(matched: Matched, hosts: Sequence[str], align: str) -> Matched:
    if len(matched.ranks) < 2:
        return matched
    names = {host for host in hosts if host}
    one_host = len(names) == 1 and all(hosts)
    if align == "clock" or (align == "auto" and one_host):
        note = "the clocks of the ranks are taken for right" + (
            "" if one_host else ", though they are of several hosts"
        )
        return replace(matched, notes=[*matched.notes, note])
    offset, known = _offsets(matched)
    shift = offset[matched.rank]
    far = float(np.abs(offset).max()) / 1000
    note = (
        f"the clocks of the ranks are aligned by the ends of their collectives (rank {matched.ranks[0]}'s counts; they "
        f"were up to {far:.1f} us apart)"
    )
    alone = [str(rank) for rank, is_known in zip(matched.ranks, known, strict=True) if not is_known]
    if alone:
        note += f"; ranks {', '.join(alone)} share no collective with it: their clocks are taken for right"
    return replace(matched, start=matched.start - shift, end=matched.end - shift, notes=[*matched.notes, note])


def _offsets(matched: Matched) -> tuple[Ints, list[bool]]:
    """How far each rank's clock is ahead of the first one's (ns), and whether that could be told."""
    count = len(matched.ranks)
    order = np.lexsort((matched.rank, matched.instance))
    instance, rank, end = matched.instance[order], matched.rank[order], matched.end[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = instance[1:] != instance[:-1]
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1] if len(order) else order  # the instance's lowest rank
    pair, difference = rank[first] * count + rank, end - end[first]
    apart = rank[first] != rank
    steps_between: dict[tuple[int, int], int] = {}
    for key in np.unique(pair[apart]).tolist():
        steps_between[divmod(key, count)] = int(np.median(difference[apart & (pair == key)]))
    offset, known, waiting = np.zeros(count, np.int64), [False] * count, [0]
    known[0] = True
    while waiting:
        here = waiting.pop(0)
        for (low, high), ahead in steps_between.items():
            other, change = (high, ahead) if low == here else (low, -ahead)
            if here in (low, high) and not known[other]:
                offset[other], known[other] = offset[here] + change, True
                waiting.append(other)
    return offset, known


@dataclass(frozen=True, slots=True)
class Instances:
    """One value per matched collective (ns). row: of the rank that began last. seen: ranks that have it.

    transfer: the shortest duration of all ranks, thus that of the one that waited least.
    """

    row: Ints
    seen: Ints
    start: Ints
    end: Ints
    last_start: Ints
    first_end: Ints
    transfer: Ints


def instances(matched: Matched) -> Instances:
    """Extremes over ranks of each collective, in the order of the numbers of `Matched.instance`."""
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
    latest = np.flatnonzero(matched.start == last_start[matched.instance])[::-1]  # of equal ones the first rank
    row[matched.instance[latest]] = latest
    return Instances(row, np.bincount(matched.instance, minlength=count), start, end, last_start, first_end, transfer)
