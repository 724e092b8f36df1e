"""The order in which HTA opens and closes the rows of a thread, before it nests them.

Theory of operation
    HTA sorts the beginnings and ends of rows by time; of an equal time ends come before beginnings, of beginnings the
    longest row first, of ends the shortest, of equally long rows the first one outside. Rows of no length come after
    what begins there and before what ends there. Where all three meet these rules go round in a circle, and the order
    is what Python's sort makes of it, from an order that numpy's unstable sort by time left. So threads with such
    places are sorted by Python here as well. Only what meets there is compared by the rules: all else is a plain
    number, which costs Python little.
"""

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def boundaries(track: Ints, start: Ints, end: Ints) -> Ints:
    """The order of beginnings (numbers from 0 on) and ends (from the number of rows on) of all rows, by track."""
    count = len(track)
    opens = np.arange(2 * count) < count
    tracks, time = np.tile(track, 2), np.concatenate([start, end])
    length, empty = np.tile(end - start, 2), np.tile(start == end, 2)
    places = group([tracks, time])
    number, size = places.number, len(places)
    bridged, begun, ended = (
        np.bincount(number[chosen], minlength=size) > 0 for chosen in (empty, opens & ~empty, ~opens & ~empty)
    )
    rank = np.where(opens, np.where(bridged[number], 0, 1), np.where(bridged[number], 3, 0))
    rank = np.where(empty, np.where(opens, 1, 2), rank)
    row = np.tile(np.arange(count), 2)
    order = np.lexsort((np.where(opens, row, -row), np.where(opens, -length, length), rank, time, tracks))
    circular = (bridged & begun & ended)[number]
    if circular.any():
        _sort_by_rules(order, tracks, time, circular, number)
    return order


class _Boundary(int):
    """A beginning or end where the rules go round in a circle; its value is the place of the first one there."""

    opens: bool
    length: int
    row: int
    number: int

    def __lt__(self, other: int) -> bool:
        if type(other) is not _Boundary or int(self) != int(other):
            return int(self) < int(other)
        if self.row == other.row:
            return self.opens
        if not self.length and not other.length:
            if self.opens == other.opens:
                return (self.row < other.row) == self.opens
            return self.opens
        if not self.length:
            return not other.opens
        if not other.length:
            return self.opens
        if self.opens != other.opens:
            return other.opens
        if self.length != other.length:
            return (self.length > other.length) == self.opens
        return (self.row < other.row) == self.opens


def _sort_by_rules(order: Ints, tracks: Ints, time: Ints, circular: Flags, number: Ints) -> None:
    """Puts what is circular into the order that HTA's sort would give it."""
    count = len(order) // 2
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    first = np.full(int(number.max()) + 1, len(order), np.int64)
    np.minimum.at(first, number[circular], place[circular])
    value = np.where(circular, first[number], place)
    length = time[count:] - time[:count]
    for track in unique_values(tracks[circular]).tolist():
        own = np.flatnonzero(tracks == track)
        own = own[np.argsort(time[own].astype(np.float64), kind="quicksort")]
        values: list[int] = value[own].tolist()
        chosen = np.flatnonzero(circular[own])
        for at, what in zip(chosen.tolist(), own[chosen].tolist(), strict=True):
            boundary = _Boundary(values[at])
            boundary.opens, boundary.row, boundary.number = what < count, what % count, what
            boundary.length = int(length[what % count])
            values[at] = boundary
        found = [entry.number for entry in sorted(values) if type(entry) is _Boundary]
        order[np.sort(place[own[chosen]])] = found
