"""Puts the clocks of several ranks on one: offsets that were given or measured, and their refinement by collectives.

Theory of operation
    A rank's offset (ns) is added to its times; its uncertainty is the maximum error of the offset, on either side.
    Offsets come from the user's file, else from the trace (`clock_offset_ns` and `clock_uncertainty_ns`, if the host's
    clock was measured), else they are 0, of unknown uncertainty.

    Processes of one host have one clock: ranks of the reference's host without other information are accurate to
    TIMESTAMP_NS, unless their collectives contradict that (hosts can have the same name). Ranks of another host get the
    clock of the one among them that collectives determine best.

    In a merged file only the differences between ranks matter. So everything is relative to one rank, the reference:
    the one with the smallest uncertainty, or the first of equal ones. It keeps its offset.

    Refinement. No rank can leave an all_reduce, all_gather, reduce_scatter or barrier before every other one has
    entered it. Each such collective that two ranks have (same process group and sequence number) thus bounds how far
    their clocks are apart, from both sides: x, added to the times of the other rank, is at least
    start(reference) - end(other), and at most end(reference) - start(other). The bounds of all collectives and of the
    uncertainty that was known before hold together. Inside them the estimate is the median difference of the ends, as
    ranks leave a collective at nearly the same time; the remaining uncertainty is the distance from there to the
    farther bound: the truth cannot be outside it.

    Wrong matches would make wrong bounds. So a collective whose ends differ by much more than those of the others is
    not used; if that is more than one in ten, or the bounds contradict each other or the previous uncertainty, the
    offset is unchanged, and a note says why. The same holds if fewer than MIN_COLLECTIVES are shared, or if refinement
    would not make the uncertainty smaller. Clocks that drift apart while recording have no single offset: a drift that
    is larger than the bounds allow is a contradiction, a smaller one goes unnoticed. Ranks that share too few
    collectives with the reference are aligned through ranks that do; their uncertainties add up.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kineto_trace.base.array_types import Ints, UInts64
from kineto_trace.collectives.nccl import NO_SEQUENCE, CollectiveDescription
from kineto_trace.errors import FileError
from kineto_trace.model.target_info import MAX_OFFSET_NS

BLOCKING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
MEETINGS = BLOCKING | {"all_to_all"}  # no rank can leave one before all others have entered it
MIN_COLLECTIVES = 8  # shared by two ranks
MAX_ODD_SHARE = 0.1  # of those: more outliers than that are a contradiction
ODD_SPREADS = 10  # median deviations from the median beyond which a difference is an outlier
ODD_NS = 100_000  # and minimum distance of an outlier
MAX_LISTED = 8  # ranks in a note
TIMESTAMP_NS = 1_000  # possible error of the times of GPU activities themselves

NO_HOSTS = frozenset({"", "localhost", "localhost.localdomain"})  # names that identify no host

UNKNOWN = -1  # of compute_ns

Method = Literal["none", "given", "trace", "host", "collectives"]


@dataclass(frozen=True, slots=True)
class RankClock:
    """The clock of one rank. uncertainty_ns: None if unknown; after `align`, relative to the reference.

    method: source of the offset. collectives: how many were used. spread_ns: the median deviation of their ends.
    """

    offset_ns: int = 0
    uncertainty_ns: int | None = None
    method: Method = "none"
    collectives: int = 0
    spread_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clocks of all ranks in the given order. reference: place of the clock that the others follow."""

    clocks: tuple[RankClock, ...]
    reference: int
    notes: tuple[str, ...] = ()

    @property
    def uncertainty_ns(self) -> int | None:
        """Returns the largest uncertainty; None if that of any rank is unknown."""
        known = [clock.uncertainty_ns for clock in self.clocks if clock.uncertainty_ns is not None]
        return max(known, default=0) if len(known) == len(self.clocks) else None


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """The collectives of one rank, in the order of their starts (Unix ns). One value per collective.

    compute_ns: time in which other kernels of its device ran; UNKNOWN if it ran on the host.
    step: number of the step that launched it, or NOTHING.
    launch: when it was launched; its start if unknown.
    stream: equal numbers for kernels of one stream.
    kernels: their number; 0 if it ran on the host.
    clock: as stated in the trace.
    """

    host: str
    clock: RankClock
    start: Ints
    end: Ints
    description: Ints
    sequence: Ints
    step: Ints
    launch: Ints
    stream: Ints
    compute_ns: Ints
    kernels: Ints
    descriptions: tuple[CollectiveDescription, ...]

    def __len__(self) -> int:
        return len(self.start)


class Blocking(NamedTuple):
    """The blocking collectives of one rank by ascending key, which their counterparts have too. Times in Unix ns."""

    key: UInts64
    start: Ints
    end: Ints


def blocking(found: RankCollectives) -> Blocking:
    """Selects collectives with a sequence number: nothing else identifies them if the windows of ranks differ."""
    used = [description.collective in BLOCKING for description in found.descriptions]
    groups = [
        _hash(f"{description.group}\0{description.ranks}\0{description.collective}")
        for description in found.descriptions
    ]
    chosen = np.array(used, np.bool_)[found.description] & (found.sequence != NO_SEQUENCE) if used else found.start < 0
    group = np.array(groups, np.uint64)[found.description[chosen]] if used else np.empty(0, np.uint64)
    key = group + found.sequence[chosen].astype(np.uint64)  # wraps around
    key, first = np.unique(key, return_index=True)
    return Blocking(key, found.start[chosen][first], found.end[chosen][first])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


# ------------------------------------------------------------ given offsets


def read_clocks(path: Path) -> dict[int, RankClock]:
    """Reads a JSON object: rank -> offset_ns, or {"offset_ns": …, "uncertainty_ns": …}. Raises FileError."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as exc:
        raise FileError(f"cannot read {path}: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise FileError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(values, dict):
        raise FileError(f'{path}: expected an object like {{"0": {{"offset_ns": 1500, "uncertainty_ns": 200}}}}')
    return {_rank(key, path): _clock(value, f"{path}: rank {key}") for key, value in values.items()}


def _rank(key: str, path: Path) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise FileError(f"{path}: expected a rank such as 3, got {key!r}")
    return int(key)


def _clock(value: Any, where: str) -> RankClock:
    if isinstance(value, dict):
        unknown = sorted(set(value) - {"offset_ns", "uncertainty_ns"})
        if unknown:
            raise FileError(f"{where}: unknown key {unknown[0]!r}; known keys: offset_ns, uncertainty_ns")
        offset, uncertainty = value.get("offset_ns", 0), value.get("uncertainty_ns")
    else:
        offset, uncertainty = value, None
    if not is_offset(offset):
        raise FileError(f"{where}: offset_ns: expected a whole number of nanoseconds, got {offset!r:.40}")
    if uncertainty is not None and (not is_offset(uncertainty) or uncertainty < 0):
        raise FileError(f"{where}: uncertainty_ns: expected nanoseconds (zero or more), got {uncertainty!r:.40}")
    return RankClock(offset, uncertainty, "given")


def is_offset(value: object) -> bool:
    """Returns whether this is a valid number of nanoseconds for shifting times."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_OFFSET_NS


def clock_of(offset_ns: object, uncertainty_ns: object) -> RankClock:
    """Returns the clock that a trace states; values that are not numbers are ignored."""
    if not isinstance(offset_ns, int) or not is_offset(offset_ns):
        return RankClock()
    known = isinstance(uncertainty_ns, int) and is_offset(uncertainty_ns) and uncertainty_ns >= 0
    return RankClock(offset_ns, uncertainty_ns if isinstance(uncertainty_ns, int) and known else None, "trace")


# ------------------------------------------------------------ alignment


def align(
    ranks: Sequence[int],
    clocks: Sequence[RankClock],
    found: Sequence[Blocking] | None,
    hosts: Sequence[str] = (),
) -> Alignment:
    """Aligns the clocks to one of them, refined by collectives (None: no refinement).

    ranks: their names in notes. hosts: where each rank ran; none, or "" if unknown.
    """
    if not ranks:
        raise ValueError("no clock to align")
    reference = min(range(len(clocks)), key=lambda place: (_or_infinite(clocks[place].uncertainty_ns), place))
    same_host = _on_its_host(clocks, reference, hosts)
    known = tuple(
        replace(clock, uncertainty_ns=TIMESTAMP_NS, method="host") if place in same_host else clock
        for place, clock in enumerate(_relative(clocks, reference))
    )
    if found is None or len(ranks) == 1:
        return Alignment(known, reference)
    moved = [_moved(*pair) for pair in zip(found, clocks, strict=True)]
    refined = _Refinement(ranks, known, moved, reference, same_host).result()
    return replace(refined, clocks=_by_host(refined.clocks, clocks, hosts))


def _by_host(refined: Sequence[RankClock], given: Sequence[RankClock], hosts: Sequence[str]) -> tuple[RankClock, ...]:
    """Gives all ranks of a host the clock of the best known one among them, unless their collectives contradict it."""
    found = list(refined)
    for host in sorted(set(hosts) - NO_HOSTS):
        places = [place for place, name in enumerate(hosts) if name == host and given[place].method != "given"]
        if len({(given[place].offset_ns, given[place].method) for place in places}) != 1:
            continue
        best = min((refined[place] for place in places), key=lambda clock: _or_infinite(clock.uncertainty_ns))
        if best.method != "collectives":
            continue
        apart = [abs(refined[place].offset_ns - best.offset_ns) for place in places]
        doubt = [_or_infinite(refined[place].uncertainty_ns) + _or_infinite(best.uncertainty_ns) for place in places]
        if all(distance <= allowed for distance, allowed in zip(apart, doubt, strict=True)):
            found = [best if place in places else clock for place, clock in enumerate(found)]
    return tuple(found)


def _on_its_host(clocks: Sequence[RankClock], reference: int, hosts: Sequence[str]) -> frozenset[int]:
    """Returns the places of ranks of the reference's host, whose clock is the same one."""
    own = clocks[reference]
    if not hosts or hosts[reference] in NO_HOSTS or own.method == "given":
        return frozenset()
    return frozenset(
        place
        for place, (host, clock) in enumerate(zip(hosts, clocks, strict=True))
        if place != reference
        and host == hosts[reference]
        and (clock.offset_ns, clock.method) == (own.offset_ns, own.method)
    )


def _or_infinite(value: int | None) -> float:
    return float("inf") if value is None else value


def _relative(clocks: Sequence[RankClock], reference: int) -> tuple[RankClock, ...]:
    """Returns the clocks with uncertainties relative to the reference."""
    own = clocks[reference].uncertainty_ns
    found = []
    for place, clock in enumerate(clocks):
        known = clock.uncertainty_ns
        apart = None if known is None or own is None else known + own
        found.append(replace(clock, uncertainty_ns=0 if place == reference else apart))
    return tuple(found)


def _moved(found: Blocking, clock: RankClock) -> Blocking:
    return Blocking(found.key, found.start + clock.offset_ns, found.end + clock.offset_ns)


def format_ranks(ranks: Sequence[int]) -> str:
    """Formats some numbers for a note."""
    shown = ", ".join(map(str, ranks[:MAX_LISTED]))
    return shown + (f", … ({len(ranks)} in all)" if len(ranks) > MAX_LISTED else "")


class _Bounds(NamedTuple):
    """Bounds for the shift of a rank's times, in ns. used: number of collectives; spread: median deviation."""

    low: int
    high: int
    median: int
    used: int
    spread: int


class _Refinement:
    """Joins the ranks to the reference one after the other."""

    def __init__(
        self,
        ranks: Sequence[int],
        known: Sequence[RankClock],
        found: Sequence[Blocking],
        reference: int,
        same_host: frozenset[int],
    ) -> None:
        self._ranks, self._known, self._found, self._reference = ranks, known, found, reference
        self._same_host = same_host
        self._clocks = list(known)
        self._joined: dict[int, int] = {reference: 0}  # place -> correction of its times
        self._notes: list[str] = []

    def result(self) -> Alignment:
        """Returns the clocks of all ranks."""
        waiting = [place for place in range(len(self._ranks)) if place != self._reference]
        round_ = [self._reference]
        while waiting and round_:
            joined = []
            for place in waiting:
                over = self._neighbour(place, round_)
                if over is not None:
                    joined.append(place)
                    self._join(place, over)
            waiting = [place for place in waiting if place not in joined]
            round_ = [place for place in joined if place in self._joined]
        if waiting:
            names = format_ranks([self._ranks[place] for place in waiting])
            self._notes.append(
                f"the clocks of ranks {names} are not refined: they share fewer than {MIN_COLLECTIVES} numbered "
                f"blocking collectives with rank {self._ranks[self._reference]} or with ranks aligned to it"
            )
        return Alignment(tuple(self._clocks), self._reference, tuple(self._notes))

    def _neighbour(self, place: int, among: Sequence[int]) -> int | None:
        """Returns the aligned rank that shares most collectives with this one; None if each shares too few."""
        own = self._found[place].key
        shared = [(len(np.intersect1d(own, self._found[other].key, assume_unique=True)), other) for other in among]
        count, other = max(shared, key=lambda entry: (entry[0], -entry[1]))
        return other if count >= MIN_COLLECTIVES else None

    def _join(self, place: int, over: int) -> None:
        """Refines the clock of one rank by another one, where that adds information."""
        bounds = _bounds(self._found[over], self._found[place])
        if isinstance(bounds, str):
            self._refuse(place, over, bounds)
            return
        change, margin = self._joined[over], self._clocks[over].uncertainty_ns or 0
        before = _or_infinite(self._known[place].uncertainty_ns)
        low = max(bounds.low + change - margin, -before)
        high = min(bounds.high + change + margin, before)
        if low > high and place in self._same_host:
            self._notes.append(
                f"rank {self._ranks[place]} has the same host name as rank {self._ranks[self._reference]}, but their "
                "collectives show that its clock is a different one"
            )
            before, low, high = float("inf"), bounds.low + change - margin, bounds.high + change + margin
        if low > high:
            self._refuse(place, over, "their collectives contradict the stated uncertainty of the offsets")
            return
        added = int(min(max(bounds.median + change, low), high))
        uncertainty = int(max(high - added, added - low))
        if uncertainty < before:
            self._joined[place] = added
            self._clocks[place] = RankClock(
                self._known[place].offset_ns + added, uncertainty, "collectives", bounds.used, bounds.spread
            )
        else:
            self._joined[place] = 0

    def _refuse(self, place: int, over: int, reason: str) -> None:
        self._notes.append(
            f"the clock of rank {self._ranks[place]} is not refined by that of rank {self._ranks[over]}: {reason}"
        )


def _bounds(reference: Blocking, other: Blocking) -> _Bounds | str:
    """Returns the bounds from the shared collectives, or why there are none."""
    _, mine, its = np.intersect1d(reference.key, other.key, assume_unique=True, return_indices=True)
    ends = reference.end[mine] - other.end[its]
    median = int(np.median(ends))
    deviation = np.abs(ends - median)
    spread = int(np.median(deviation))
    fits = deviation <= max(ODD_SPREADS * spread, ODD_NS)
    odd = len(fits) - int(fits.sum())
    if odd > MAX_ODD_SHARE * len(fits):
        return f"the ends of {odd} of {len(fits)} collectives differ far more than those of the rest"
    mine, its = mine[fits], its[fits]
    low = int((reference.start[mine] - other.end[its]).max()) - TIMESTAMP_NS
    high = int((reference.end[mine] - other.start[its]).min()) + TIMESTAMP_NS
    if low > high:
        return f"{len(mine)} collectives contradict each other: no offset fits them all (the clocks may drift)"
    return _Bounds(low, high, median, len(mine), spread)


# ------------------------------------------------------------ metadata


def to_dict(clock: RankClock) -> Mapping[str, Any]:
    """Returns the clock for the metadata of a merged file."""
    return {
        "clock_offset_ns": clock.offset_ns,
        "clock_uncertainty_ns": clock.uncertainty_ns,
        "clock_method": clock.method,
        "clock_collectives": clock.collectives,
        "clock_spread_ns": clock.spread_ns,
    }
