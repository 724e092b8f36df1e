"""Which collectives of several ranks are one and the same: by sequence number, or by order and time.

Theory of operation
    A collective with a sequence number is that of its process group with the same number on the other ranks; transfers
    between two ranks are counted apart. Collectives without numbers form lanes, which all ranks of a group run in the
    same order: a process group, or if nothing is known of it, one name. In each lane the rank with the most collectives
    is the reference, and the others are matched with it as order_matching.py describes. Those that cannot be matched
    with it are tried with each other. What is not proved is matched with nothing, and a note says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.collectives.nccl import NO_SEQUENCE, CollectiveDescription
from kineto_trace.collectives.order_matching import Lane, LaneMatch, match_lanes
from kineto_trace.collectives.rank_clocks import MEETINGS, listed

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_NUMBERED, _ORDERED, _ALONE = range(3)
_MAX_REASONS = 4  # in the notes


@dataclass(frozen=True, slots=True)
class CollectiveRows:
    """The collectives of all ranks under each other. rank: place in `ranks`. start, end: with the known offsets (ns).

    on_host: whether it ran on the host. apart: for each two ranks by how much their clocks may differ at most (ns; inf:
    unknown).
    """

    ranks: Sequence[int]
    rank: Ints
    description: Ints
    sequence: Ints
    step: Ints
    start: Ints
    end: Ints
    on_host: npt.NDArray[np.bool_]
    descriptions: Sequence[CollectiveDescription]
    apart: Floats


def group_numbers(descriptions: Sequence[CollectiveDescription]) -> Ints:
    """Returns equal numbers for equal process groups."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault((d.group, d.ranks), len(numbers)) for d in descriptions], np.int64)


def instance_numbers(rows: CollectiveRows) -> tuple[Ints, list[str]]:
    """Returns equal numbers for rows that are one collective, and what was assumed or refused."""
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
    """Equal numbers for descriptions of one lane, and what each lane is called."""
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
    """Collectives that are matched with nothing, and the ranks that have them."""

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
    residual = float(np.average([match.residual_ns for _, match in proved], weights=weights)) / 1e3
    moved = sum(match.place[match.fits][0] != np.flatnonzero(match.fits)[0] for _, match in proved if match.fits.any())
    following = min(match.next_ns for _, match in proved) / 1e3
    refused = sum(match.refused for _, match in proved)
    odd = sum(len(match.fits) - number for number, match in proved) - refused
    return [
        f"{unnumbered} of {count} collectives have no sequence number in the traces: they are matched over ranks by "
        f"order and time. Their ends differ by {residual:.1f} us on average"
        + (f"; matched in any other way, by {following:.1f} us or more" if np.isfinite(following) else
           "; no other way to match them is possible")
        + (f"; {moved} windows begin at another collective than the first rank's" if moved else "")
        + (f"; {odd} collectives fit none of the other rank and are left alone" if odd else "")
        + (f"; {refused} are left alone since their ends differ far more than those of the others, or do not tell two "
           "collectives apart where records were lost" if refused else "")
    ]  # fmt: skip


def _refusals(refused: dict[str, list[_Refused]]) -> list[str]:
    notes = []
    for text, each in refused.items():
        count, ranks = (
            sum(entry.collectives for entry in each),
            sorted({rank for entry in each for rank in entry.ranks}),
        )
        notes.append(f"{count} collectives of ranks {listed(ranks)} are not matched with other ranks' ({text})")
    more = len(notes) - _MAX_REASONS
    return notes[:_MAX_REASONS] + ([f"{more} more groups of collectives are not matched"] if more > 0 else [])
