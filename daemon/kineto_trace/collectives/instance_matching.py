"""Matches the collectives of several ranks: by sequence number, or by order and time.

Theory of operation
    A collective with a sequence number matches that of its process group with the same number on the other ranks;
    transfers between two ranks are counted separately. Collectives without numbers form lanes, which all ranks of a
    group run in the same order: a process group, or if that is unknown, one name. In each lane the rank with the most
    collectives is the reference, and the others are matched with it as described below. Those that cannot be matched
    with it are tried with each other. Unproved matches are discarded, and a note says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import Flags, Floats, Ints
from kineto_trace.base.quantities import format_duration, times
from kineto_trace.collectives.nccl import NO_SEQUENCE, CollectiveDescription
from kineto_trace.collectives.rank_clocks import MEETINGS, ODD_NS, ODD_SPREADS, format_ranks

_NUMBERED, _ORDERED, _ALONE = range(3)
_MAX_REASONS = 4  # listed in the notes
PROBES = 33  # collectives by which shifts are found if the clocks are known
SAMPLES = 64  # collectives by which every shift is rated at first
FINALISTS = 16  # shifts that are rated by all collectives
MAX_ODD_SHARE = 0.1  # of the collectives: more that do not fit refute a shift
CLEARER = 4.0  # ratio of the second best shift's residual to the best
NOISE_NS = 2_000  # smaller residuals are equal: times of GPU activities are no better
SLACK_SPREADS = 3.0  # residuals by which intervals may miss each other
LEAST_PIECE = 8  # collectives that are matched separately from the others
MIN_UNKNOWN = 8  # collectives that two ranks must share if their clocks are unknown
_NEIGHBOURS = (-2, -1, 1, 2)  # places that a pair may be off by next to a loss
_CHUNK = 1 << 16  # shifts that are rated at once


# Matches the collectives of two ranks that have no sequence numbers, by order and time, and proves the match.
# Theory of operation
# All ranks of a process group run its collectives in one order. But their traces begin at different ones: the n-th of
# one rank is the (n + shift)-th of the other. Each shift is rated by conditions that the right one must meet:
# * the collectives have the same names;
# * no rank leaves an all_reduce, all_gather, reduce_scatter, all_to_all or barrier before every other one has entered
# it, so the two intervals of a collective meet, once the clocks are right;
# * ranks leave a collective at nearly the same time. So the ends differ by one constant, the error of the clocks, which
# is no larger than their uncertainty. The residual is the mean distance from that constant.
# The shift with the smallest residual is chosen if every other possible shift has a residual that is at least CLEARER
# times as large. A loop whose steps take equally long looks the same shifted by a whole step. Without clocks, only the
# numbers of the steps can then decide: they must agree at the best shift, and at no other possible one. Otherwise the
# match is not proved, and there is none. Single collectives that do not fit the proved shift stay alone.
# Where records were lost, one shift does not fit all. If the clocks are known, the halves are then matched separately,
# and their halves, as long as they have LEAST_PIECE collectives. Collectives around the loss stay alone: a piece may
# extend past it by a few collectives, for which its shift is wrong. On GPUs the ends show this. A pair whose ends
# differ far more than those of the others is rejected. So are those from a gap or a change of the shift on, up to the
# first one of which no neighbour in the reference ends about as near. Collectives on the host end when their threads
# get a processor: their ends reject nothing.
# The cost is linear. If the clocks are known, only shifts count at which one of PROBES collectives meets another one in
# time. Every shift that counts is rated by SAMPLES collectives, and the best few by all of them.
@dataclass(frozen=True, slots=True)
class Lane:
    """Collectives of one rank that all ranks of a group run in the same order. Times in ns, by its own clock's offset.

    name: equal numbers for equal names.
    step: number of the step that launched it, below 0 for none.
    meets: whether no rank leaves it before all others have entered.
    on_host: whether they run on the host.
    """

    start: Ints
    end: Ints
    name: Ints
    step: Ints
    meets: Flags
    on_host: bool = False

    def __len__(self) -> int:
        return len(self.start)

    def part(self, piece: slice) -> "Lane":
        """Returns some of the collectives in a row."""
        name, step, meets = self.name[piece], self.step[piece], self.meets[piece]
        return Lane(self.start[piece], self.end[piece], name, step, meets, self.on_host)


@dataclass(frozen=True, slots=True)
class LaneMatch:
    """The proved match.

    place: of each collective in the reference, possibly outside of it.
    fits: whether it is that one.
    residual_ns: the mean distance of the ends.
    next_ns: that of the second best match, infinity if no other one is possible.
    refused: number of collectives rejected only because their ends refute the pair, or leave it open.
    """

    place: Ints
    fits: Flags
    residual_ns: float
    next_ns: float
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Judged:
    shift: int
    residual: float
    odd: float
    same_steps: bool


def match_lanes(reference: Lane, other: Lane, uncertainty_ns: float) -> LaneMatch | str:
    """Returns the proved match, or why there is none. uncertainty_ns: by how much the clocks may differ; may be inf."""
    found = _match_pieces(reference, other, uncertainty_ns)
    if isinstance(found, str) or reference.on_host or other.on_host:
        return found
    return _without_refuted(reference, other, found)


def _match_pieces(reference: Lane, other: Lane, uncertainty_ns: float) -> LaneMatch | str:
    """Matches with one shift for all collectives, else with one for each half, and so on."""
    found = _match_whole(reference, other, uncertainty_ns)
    if isinstance(found, LaneMatch) or not np.isfinite(uncertainty_ns) or len(other) < 2 * LEAST_PIECE:
        return found
    middle = len(other) // 2
    parts = [
        _match_pieces(reference, other.part(piece), uncertainty_ns) for piece in (slice(middle), slice(middle, None))
    ]
    if not any(isinstance(part, LaneMatch) for part in parts):
        return found
    return _joined(parts, (middle, len(other) - middle))


def _joined(parts: Sequence[LaneMatch | str], lengths: Sequence[int]) -> LaneMatch:
    """Concatenates the matches of pieces. Collectives that go back in the order of the reference fit nothing."""
    known = [part for part in parts if isinstance(part, LaneMatch)]
    place, fits, last = [], [], int(np.iinfo(np.int64).min)
    for part, length in zip(parts, lengths, strict=True):
        if isinstance(part, str):
            place.append(np.full(length, -1))
            fits.append(np.zeros(length, np.bool_))
            continue
        forward = part.fits & (part.place > last)
        place.append(part.place)
        fits.append(forward)
        last = int(part.place[forward].max(initial=last))
    weights = [max(int(part.fits.sum()), 1) for part in known]
    residual = float(np.average([part.residual_ns for part in known], weights=weights))
    return LaneMatch(np.concatenate(place), np.concatenate(fits), residual, min(part.next_ns for part in known))


def _without_refuted(reference: Lane, other: Lane, found: LaneMatch) -> LaneMatch | str:
    """Returns the match without the pairs that their ends refute, or leave open."""
    ends = _Ends(reference, other, found)
    fits = found.fits.copy()
    fits[ends.far()] = False
    fits[ends.open(np.flatnonzero(fits & ends.inside))] = False
    refused = int(found.fits.sum() - fits.sum())
    if not refused:
        return found
    left = ends.distance[fits & ends.judged]
    if not len(left):
        return "their ends differ too much"
    return LaneMatch(found.place, fits, float(left.mean()), found.next_ns, refused)


class _Ends:
    """The distances of the ends of pairs from their median distance, which is the clocks' error.

    inside: whether the reference extends to the pair.
    judged: whether both ranks end it together, of those that fit.
    distance: in ns, of all pairs inside.
    """

    def __init__(self, reference: Lane, other: Lane, found: LaneMatch) -> None:
        self._reference, self._other = reference, other
        self._place = found.place
        self.inside = (found.place >= 0) & (found.place < len(reference))
        mine = np.clip(found.place, 0, len(reference) - 1)
        self.judged = found.fits & self.inside & other.meets & reference.meets[mine]
        apart = reference.end[mine] - other.end
        self._middle = float(np.median(apart[self.judged])) if self.judged.any() else 0.0
        self.distance = np.abs(apart - self._middle)
        self._spread = float(np.median(self.distance[self.judged])) if self.judged.any() else 0.0

    def far(self) -> Flags:
        """Returns for each pair whether its ends differ far more than those of the others."""
        found: Flags = self.judged & (self.distance > max(ODD_SPREADS * self._spread, ODD_NS))
        return found

    def open(self, rows: Ints) -> list[int]:
        """Returns the rows that may as well be another collective, from each gap or change of the shift on."""
        shift = self._place[rows] - rows
        found: list[int] = []
        for at in np.flatnonzero((np.diff(rows) > 1) | (np.diff(shift) != 0)).tolist():
            for side in (rows[: at + 1][::-1], rows[at + 1 :]):
                found += takewhile(self._is_open, side.tolist())
        return found

    def _is_open(self, row: int) -> bool:
        """Returns whether another collective of the reference ends about as near as the matched one."""
        mine = int(self._place[row]) + np.array(_NEIGHBOURS)
        mine = mine[(mine >= 0) & (mine < len(self._reference))]
        mine = mine[self._reference.name[mine] == self._other.name[row]]
        distance = np.abs(self._reference.end[mine] - self._other.end[row] - self._middle)
        near = CLEARER * max(float(self.distance[row]), self._spread, NOISE_NS)
        return bool((distance <= near).any())


def _match_whole(reference: Lane, other: Lane, uncertainty_ns: float) -> LaneMatch | str:
    """Matches with one shift for all collectives."""
    known = np.isfinite(uncertainty_ns)
    shifts = _meeting_shifts(reference, other, uncertainty_ns) if known else np.arange(1 - len(other), len(reference))
    shared = np.minimum(len(reference), len(other) + shifts) - np.maximum(shifts, 0)
    least = 1 if known else max(MIN_UNKNOWN, min(len(reference), len(other)) // 2)
    shifts = shifts[shared >= least]
    if not len(shifts) and not known:
        return f"the clock offsets are unknown, and matching without them needs at least {MIN_UNKNOWN} collectives"
    judged = [
        _judge(reference, other, shift, uncertainty_ns)
        for shift in _finalists(reference, other, shifts, uncertainty_ns)
    ]
    possible = sorted((each for each in judged if each.odd <= MAX_ODD_SHARE), key=lambda each: each.residual)
    if not possible:
        return "no time offset makes their times consistent"
    best = possible[0]
    following = possible[1].residual if len(possible) > 1 else float("inf")
    rivals = [each for each in possible[1:] if each.residual < CLEARER * max(best.residual, NOISE_NS)]
    if rivals and not (best.same_steps and not any(each.same_steps for each in rivals)):
        return (
            f"they can be matched in two ways: their ends differ by {format_duration(best.residual)} at a shift of "
            f"{best.shift}, and by {format_duration(following)} at a shift of {rivals[0].shift}"
        )
    place = np.arange(len(other)) + best.shift
    return LaneMatch(place, _fits(reference, other, best, uncertainty_ns), best.residual, following)


def _meeting_shifts(reference: Lane, other: Lane, uncertainty_ns: float) -> Ints:
    """Returns the shifts at which collectives of the other rank meet one of the reference in time, ascending."""
    probes = np.flatnonzero(other.meets) if other.meets.any() else np.arange(len(other))
    probes = probes[unique_values(np.linspace(0, len(probes) - 1, PROBES).astype(np.int64))]
    slack = uncertainty_ns + NOISE_NS
    ends = np.maximum.accumulate(reference.end)
    low = np.searchsorted(ends, other.start[probes] - slack, side="left")
    high = np.searchsorted(reference.start, other.end[probes] + slack, side="right")
    found = [np.arange(first, last) - at for first, last, at in zip(low, high, probes, strict=True)]
    return unique_values(np.concatenate(found)).astype(np.int64)


def _finalists(reference: Lane, other: Lane, shifts: Ints, uncertainty_ns: float) -> list[int]:
    """Returns the most promising shifts, rated by samples."""
    scores = [np.empty(0)]
    for first in range(0, len(shifts), _CHUNK):
        chunk = shifts[first : first + _CHUNK, None]
        low = np.maximum(chunk, 0)
        last = np.minimum(len(reference), len(other) + chunk) - 1
        mine = low + (last - low) * np.arange(SAMPLES) // (SAMPLES - 1)
        its = mine - chunk
        apart = (reference.end[mine] - other.end[its]).astype(np.float64)
        score = np.abs(apart - np.median(apart, axis=1).clip(-uncertainty_ns, uncertainty_ns)[:, None]).mean(axis=1)
        renamed = (reference.name[mine] != other.name[its]).mean(axis=1)
        scores.append(np.where(renamed <= MAX_ODD_SHARE, score, np.inf))
    score = np.concatenate(scores)
    order = np.argsort(score, kind="stable")[:FINALISTS]
    return [int(shifts[at]) for at in order.tolist() if np.isfinite(score[at])]


def _shared(reference: Lane, other: Lane, shift: int) -> tuple[slice, slice]:
    low, high = max(shift, 0), min(len(reference), len(other) + shift)
    return slice(low, high), slice(low - shift, high - shift)


def _judge(reference: Lane, other: Lane, shift: int, uncertainty_ns: float) -> _Judged:
    mine, its = _shared(reference, other, shift)
    change, residual = _change(reference, other, mine, its, uncertainty_ns)
    fits = _meet(reference, other, mine, its, change, residual)
    same = (reference.step[mine] == other.step[its]) & (other.step[its] >= 0)
    return _Judged(shift, residual, 1 - float(fits.mean()), bool(same.mean() >= 1 - MAX_ODD_SHARE))


def _change(reference: Lane, other: Lane, mine: slice, its: slice, uncertainty_ns: float) -> tuple[float, float]:
    """Returns the correction of the other's times, and the remaining mean distance of the ends."""
    apart = (reference.end[mine] - other.end[its]).astype(np.float64)
    meets = reference.meets[mine]
    apart = apart[meets] if meets.any() else apart
    change = float(np.clip(np.median(apart), -uncertainty_ns, uncertainty_ns))
    return change, float(np.abs(apart - change).mean())


def _meet(reference: Lane, other: Lane, mine: slice, its: slice, change: float, residual: float) -> Flags:
    """Returns which pairs can be one collective: they have one name, and their intervals meet if they have to."""
    slack = min(SLACK_SPREADS * residual, NOISE_NS)
    start, end = other.start[its] + change, other.end[its] + change
    met = (reference.start[mine] <= end + slack) & (start <= reference.end[mine] + slack)
    meets = reference.meets if reference.meets.any() else ~reference.meets  # no other proof is possible
    fits: Flags = (met | ~meets[mine]) & (reference.name[mine] == other.name[its])
    return fits


def _fits(reference: Lane, other: Lane, best: _Judged, uncertainty_ns: float) -> Flags:
    mine, its = _shared(reference, other, best.shift)
    change, residual = _change(reference, other, mine, its, uncertainty_ns)
    fits = np.ones(len(other), np.bool_)
    fits[its] = _meet(reference, other, mine, its, change, residual)
    return fits


@dataclass(frozen=True, slots=True)
class CollectiveRows:
    """The collectives of all ranks, concatenated.

    rank: place in `ranks`.
    start, end: with the known offsets (ns).
    on_host: whether it ran on the host.
    apart: for each two ranks the maximum difference of their clocks (ns; inf if unknown).
    """

    ranks: Sequence[int]
    rank: Ints
    description: Ints
    sequence: Ints
    step: Ints
    start: Ints
    end: Ints
    on_host: Flags
    descriptions: Sequence[CollectiveDescription]
    apart: Floats


def group_numbers(descriptions: Sequence[CollectiveDescription]) -> Ints:
    """Returns equal numbers for equal process groups."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault((d.group, d.ranks), len(numbers)) for d in descriptions], np.int64)


def instance_numbers(rows: CollectiveRows) -> tuple[Ints, list[str]]:
    """Returns equal numbers for rows that are one collective, and notes on assumptions and rejections."""
    if not len(rows.rank):
        return rows.rank, []
    group = group_numbers(rows.descriptions)
    transfer = np.array([d.transfer for d in rows.descriptions], np.bool_)
    alone = rows.sequence == NO_SEQUENCE
    # by number: (group, whether a transfer, number); by order: (lane, component, place); alone: its own row
    keys = np.stack(
        [
            np.where(alone, _ALONE, _NUMBERED),
            np.where(alone, np.arange(len(rows.rank)), group[rows.description]),
            np.where(alone, 0, transfer[rows.description]),
            np.where(alone, 0, rows.sequence),
        ]
    )
    notes = _match_unnumbered(rows, np.flatnonzero(alone), keys) if alone.any() and len(rows.ranks) > 1 else []
    found: Ints = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return found, notes


def _lane_numbers(descriptions: Sequence[CollectiveDescription]) -> tuple[Ints, list[str]]:
    """Returns equal numbers for descriptions of one lane, and the name of each lane."""
    numbers: dict[Any, int] = {}
    names: list[str] = []
    found = []
    for each in descriptions:
        one_name = each.transfer or each.group is None
        name = ("sendrecv" if each.transfer else each.collective) if one_name else ""
        number = numbers.setdefault((each.group, each.ranks, name), len(numbers))
        if number == len(names):
            where = f"process group {each.group_description or each.group}" if each.group is not None else ""
            names.append(" of ".join(filter(None, (name, where))))
        found.append(number)
    return np.array(found, np.int64), names


def _match_unnumbered(rows: CollectiveRows, unnumbered: Ints, keys: Ints) -> list[str]:
    """Numbers the rows without sequence numbers in `keys`, and returns the notes."""
    number, titles = _lane_numbers(rows.descriptions)
    lane = number[rows.description[unnumbered]]
    work = _Lanes(rows, keys)
    for place in unique_values(lane).tolist():
        own = unnumbered[lane == place]
        of_rank = {rank: own[rows.rank[own] == rank] for rank in unique_values(rows.rank[own]).tolist()}
        work.match(place, titles[place], of_rank)
    return [*_proof_note(len(rows.rank), len(unnumbered), work.proved), *_refusals(work.refused)]


class _Refused(NamedTuple):
    """Unmatched collectives, and the ranks that have them."""

    collectives: int
    ranks: list[int]


class _Lanes:
    """Matches one lane after the other. proved: (collectives, match) of each rank; refused: by reason."""

    def __init__(self, rows: CollectiveRows, keys: Ints) -> None:
        self.proved: list[tuple[int, LaneMatch]] = []
        self.refused: dict[str, list[_Refused]] = {}
        self._rows, self._keys = rows, keys
        numbers: dict[str, int] = {}
        plain = ["sendrecv" if d.transfer else d.collective for d in rows.descriptions]  # a send has its recv
        self._name = np.array([numbers.setdefault(name, len(numbers)) for name in plain], np.int64)
        self._meets = np.array([d.collective in MEETINGS for d in rows.descriptions], np.bool_)

    def match(self, place: int, title: str, of_rank: dict[int, Ints]) -> None:
        """Matches all ranks of a lane, in several components if not all fit one reference."""
        left, reasons, matched, component = of_rank, dict[int, str](), set[int](), 0
        while len(left) > 1:
            reference = max(left, key=lambda rank: (len(left[rank]), -rank))
            found = self._component((place, component), reference, left)
            refusals = {rank: match for rank, match in found.items() if isinstance(match, str)}
            matched.update(set(left) - set(refusals) if len(refusals) < len(found) else ())
            for rank, reason in refusals.items():
                reasons.setdefault(rank, reason)
            left, component = {rank: left[rank] for rank in refusals}, component + 1
        alone = sorted(set(of_rank) - matched) if len(of_rank) > 1 else []
        if alone:
            reason = next(reasons[rank] for rank in alone if rank in reasons)
            count = sum(len(of_rank[rank]) for rank in alone)
            ranks = [self._rows.ranks[rank] for rank in alone]
            self.refused.setdefault(f"{title}: {reason}", []).append(_Refused(count, ranks))

    def _component(self, lane: tuple[int, int], reference: int, of_rank: dict[int, Ints]) -> dict[int, LaneMatch | str]:
        """Matches the ranks with one reference. Returns the match of each other rank, or why it has none."""
        base = self._lane(of_rank[reference])
        found: dict[int, LaneMatch | str] = {}
        for rank, own in of_rank.items():
            if rank == reference:
                continue
            match = match_lanes(base, self._lane(own), float(self._rows.apart[reference, rank]))
            found[rank] = match
            if isinstance(match, LaneMatch):
                self.proved.append((int(match.fits.sum()), match))
                self._number(own[match.fits], lane, match.place[match.fits])
                self._number(of_rank[reference], lane, np.arange(len(base)))
        return found

    def _lane(self, own: Ints) -> Lane:
        of = self._rows.description[own]
        rows = self._rows
        return Lane(
            rows.start[own],
            rows.end[own],
            self._name[of],
            rows.step[own],
            self._meets[of],
            bool(rows.on_host[own].any()),
        )

    def _number(self, own: Ints, lane: tuple[int, int], place: Ints) -> None:
        keys = self._keys
        keys[0, own], keys[1, own], keys[2, own], keys[3, own] = _ORDERED, *lane, place


def _proof_note(count: int, unnumbered: int, proved: list[tuple[int, LaneMatch]]) -> list[str]:
    if not proved:
        return []
    weights = np.array([number for number, _ in proved], np.float64)
    residual = float(np.average([match.residual_ns for _, match in proved], weights=weights))
    moved = sum(match.place[match.fits][0] != np.flatnonzero(match.fits)[0] for _, match in proved if match.fits.any())
    begin = times(int(moved), "window begins", "windows begin")
    following = min(match.next_ns for _, match in proved)
    refused = sum(match.refused for _, match in proved)
    odd = sum(len(match.fits) - number for number, match in proved) - refused
    return [
        f"{unnumbered} of {count} collectives have no sequence number in the traces: they are matched across ranks by "
        f"order and time. Their ends differ by {format_duration(residual)} on average"
        + (f", and by {format_duration(following)} or more in any other match" if np.isfinite(following) else
           "; no other match is possible")
        + (f"; {begin} at a different collective than on the first rank" if moved else "")
        + (f"; left out: {times(odd, 'collective')} without a counterpart on the other rank" if odd else "")
        + (f"; {refused} stay unmatched, because their ends differ far more than those of the others, or because they "
           "fit two collectives where records were lost" if refused else "")
    ]  # fmt: skip


def _refusals(refused: dict[str, list[_Refused]]) -> list[str]:
    notes = []
    for text, each in refused.items():
        count, ranks = (
            sum(entry.collectives for entry in each),
            sorted({rank for entry in each for rank in entry.ranks}),
        )
        notes.append(f"{count} collectives of ranks {format_ranks(ranks)} are not matched with other ranks: {text}")
    more = len(notes) - _MAX_REASONS
    further = times(more, "more group of collectives is", "more groups of collectives are")
    return notes[:_MAX_REASONS] + ([f"{further} not matched"] if more > 0 else [])
