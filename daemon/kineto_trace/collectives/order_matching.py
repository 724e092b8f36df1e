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
    their halves, as long as they have LEAST_PIECE collectives. What lies around the loss stays alone.

    The cost is linear. If the clocks are known, only shifts count at which one of PROBES collectives meets another one
    in time. Every shift that counts is judged by SAMPLES collectives, and the best few by all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values

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
_CHUNK = 1 << 16  # shifts that are judged at once


@dataclass(frozen=True, slots=True)
class Lane:
    """Collectives of one rank that all ranks of a group run in the same order. Times in ns, by its own clock's offset.

    name: equal numbers for equal names. step: number of the step that launched it, below 0: none. meets: whether no
    rank leaves it before all others have entered.
    """

    start: Ints
    end: Ints
    name: Ints
    step: Ints
    meets: Flags

    def __len__(self) -> int:
        return len(self.start)

    def part(self, piece: slice) -> "Lane":
        """Returns some of the collectives in a row."""
        return Lane(self.start[piece], self.end[piece], self.name[piece], self.step[piece], self.meets[piece])


@dataclass(frozen=True, slots=True)
class LaneMatch:
    """The proved match.

    place: of each collective in the reference, which may not reach there; fits: whether it is that one. residual_ns:
    the mean distance of the ends; next_ns: that of the second best match, infinity if no other one is possible.
    """

    place: Ints
    fits: Flags
    residual_ns: float
    next_ns: float


@dataclass(frozen=True, slots=True)
class _Judged:
    shift: int
    residual: float
    odd: float
    same_steps: bool


def match_lanes(reference: Lane, other: Lane, uncertainty_ns: float) -> LaneMatch | str:
    """Returns the proved match, or why there is none. uncertainty_ns: by how much the clocks may differ; may be inf."""
    found = _match_whole(reference, other, uncertainty_ns)
    if isinstance(found, LaneMatch) or not np.isfinite(uncertainty_ns) or len(other) < 2 * LEAST_PIECE:
        return found
    middle = len(other) // 2
    parts = [
        match_lanes(reference, other.part(piece), uncertainty_ns) for piece in (slice(middle), slice(middle, None))
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
