"""Matches the collectives of two ranks that have no sequence numbers, by order and time, and proves the match.

Theory of operation
    All ranks of a process group run its collectives in one order. But their traces begin at different ones: the n-th
    of one rank is the (n + shift)-th of the other. Each shift is judged by what must hold if it is right:

    * the collectives have the same names;
    * no rank leaves an all_reduce, all_gather, reduce_scatter, all_to_all or barrier before every other one has entered
      it, so the two intervals of a collective meet, once the clocks are right;
    * ranks leave a collective at nearly the same time. So the ends differ by one constant, the error of the clocks,
      which is no larger than their uncertainty. The residual is the mean distance from that constant.

    The shift with the smallest residual is taken if every other possible shift has a residual that is at least CLEARER
    times as large. A loop whose steps take equally long looks the same shifted by a whole step. Without clocks, only
    the numbers of the steps can then tell: they must agree at the best shift, and at no other possible one. Otherwise
    the match is not proved, and there is none. Single collectives that do not fit the proved shift stay alone.

    Where records were lost, one shift does not fit all. If the clocks are known, the halves are then matched apart, and
    their halves, as long as they have LEAST_PIECE collectives. What lies around the loss stays alone: a piece may reach
    past it by a few collectives, which its shift puts wrongly. On GPUs the ends tell. A pair whose ends differ far more
    than those of the others is refused. So are those from a gap or a change of the shift on, up to the first one of
    which no neighbour in the reference ends about as near. Collectives on the host end when their threads get a
    processor: their ends refuse nothing.

    The cost is linear. If the clocks are known, only shifts count at which one of PROBES collectives meets another one
    in time. Every shift that counts is judged by SAMPLES collectives, and the best few by all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.collectives.rank_clocks import ODD_NS, ODD_SPREADS

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PROBES = 33  # collectives by which shifts are found, where the clocks are known
SAMPLES = 64  # collectives by which every shift is judged at first
FINALISTS = 16  # shifts that are judged by all collectives
MAX_ODD_SHARE = 0.1  # of the collectives: more that do not fit refute a shift
CLEARER = 4.0  # times as large must the residual of the second best shift be
NOISE_NS = 2_000  # residuals below this are equal: times of GPU activities are no better
SLACK_SPREADS = 3.0  # intervals may miss each other by so many residuals
LEAST_PIECE = 8  # collectives that are matched apart from the others
MIN_UNKNOWN = 8  # collectives that two ranks must share if nothing is known of their clocks
_NEIGHBOURS = (-2, -1, 1, 2)  # places that a pair may be off by next to a loss
_CHUNK = 1 << 16  # shifts that are judged at once


@dataclass(frozen=True, slots=True)
class Lane:
    """Collectives of one rank that all ranks of a group run in the same order. Times in ns, by its own clock's offset.

    name: equal numbers for equal names. step: number of the step that launched it, below 0: none. meets: whether no
    rank leaves it before all others have entered. on_host: whether they run on the host.
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

    place: of each collective in the reference, which may not reach there; fits: whether it is that one. residual_ns:
    the mean distance of the ends; next_ns: that of the second best match, infinity if no other one is possible.
    refused: number of collectives that do not fit because their ends alone refute it, or leave it open.
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
    """Matches with one shift for all collectives, or else with one for each half, and so on."""
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
    """Puts the matches of pieces after each other. What goes back in the order of the reference fits nothing."""
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
    """How far the ends of pairs are from the distance that they have in the middle, which is the clocks' error.

    inside: whether the reference reaches to the pair. judged: whether both ranks end it together, of those that fit.
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
        """Tells for each pair whether its ends differ far more than those of the others."""
        found: Flags = self.judged & (self.distance > max(ODD_SPREADS * self._spread, ODD_NS))
        return found

    def open(self, rows: Ints) -> list[int]:
        """Returns those of the rows that may as well be another collective, from each gap or change of the shift on."""
        shift = self._place[rows] - rows
        found: list[int] = []
        for at in np.flatnonzero((np.diff(rows) > 1) | (np.diff(shift) != 0)).tolist():
            for side in (rows[: at + 1][::-1], rows[at + 1 :]):
                found += takewhile(self._is_open, side.tolist())
        return found

    def _is_open(self, row: int) -> bool:
        """Whether another collective of the reference ends about as near as the one that was found."""
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
        return f"nothing is known of the clocks, and fewer than {MIN_UNKNOWN} collectives are too few to tell by"
    judged = [
        _judge(reference, other, shift, uncertainty_ns)
        for shift in _finalists(reference, other, shifts, uncertainty_ns)
    ]
    possible = sorted((each for each in judged if each.odd <= MAX_ODD_SHARE), key=lambda each: each.residual)
    if not possible:
        return "their times fit at no shift"
    best = possible[0]
    following = possible[1].residual if len(possible) > 1 else float("inf")
    rivals = [each for each in possible[1:] if each.residual < CLEARER * max(best.residual, NOISE_NS)]
    if rivals and not (best.same_steps and not any(each.same_steps for each in rivals)):
        return (
            f"two ways to match them fit: ends differ by {best.residual / 1e3:.1f} us at a shift of {best.shift}, "
            f"by {following / 1e3:.1f} us at one of {rivals[0].shift}"
        )
    place = np.arange(len(other)) + best.shift
    return LaneMatch(place, _fits(reference, other, best, uncertainty_ns), best.residual, following)


def _meeting_shifts(reference: Lane, other: Lane, uncertainty_ns: float) -> Ints:
    """The shifts at which some collectives of the other rank meet one of the reference in time, ascending."""
    probes = np.flatnonzero(other.meets) if other.meets.any() else np.arange(len(other))
    probes = probes[unique_values(np.linspace(0, len(probes) - 1, PROBES).astype(np.int64))]
    slack = uncertainty_ns + NOISE_NS
    ends = np.maximum.accumulate(reference.end)
    low = np.searchsorted(ends, other.start[probes] - slack, side="left")
    high = np.searchsorted(reference.start, other.end[probes] + slack, side="right")
    found = [np.arange(first, last) - at for first, last, at in zip(low, high, probes, strict=True)]
    return unique_values(np.concatenate(found)).astype(np.int64)


def _finalists(reference: Lane, other: Lane, shifts: Ints, uncertainty_ns: float) -> list[int]:
    """The most promising shifts, judged by samples."""
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
    """What is to be added to the other's times, and the mean distance of the ends that is left."""
    apart = (reference.end[mine] - other.end[its]).astype(np.float64)
    meets = reference.meets[mine]
    apart = apart[meets] if meets.any() else apart
    change = float(np.clip(np.median(apart), -uncertainty_ns, uncertainty_ns))
    return change, float(np.abs(apart - change).mean())


def _meet(reference: Lane, other: Lane, mine: slice, its: slice, change: float, residual: float) -> Flags:
    """Which pairs can be one collective: they have one name, and their intervals meet if they have to."""
    slack = min(SLACK_SPREADS * residual, NOISE_NS)
    start, end = other.start[its] + change, other.end[its] + change
    met = (reference.start[mine] <= end + slack) & (start <= reference.end[mine] + slack)
    meets = reference.meets if reference.meets.any() else ~reference.meets  # nothing else to prove it by
    fits: Flags = (met | ~meets[mine]) & (reference.name[mine] == other.name[its])
    return fits


def _fits(reference: Lane, other: Lane, best: _Judged, uncertainty_ns: float) -> Flags:
    mine, its = _shared(reference, other, best.shift)
    change, residual = _change(reference, other, mine, its, uncertainty_ns)
    fits = np.ones(len(other), np.bool_)
    fits[its] = _meet(reference, other, mine, its, change, residual)
    return fits
