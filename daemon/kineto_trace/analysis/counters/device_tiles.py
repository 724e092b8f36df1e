"""Which groups of GPU activities run when on one GPU: pieces of time in which nothing changes, without holes.

Theory of operation
    The starts and ends of all activities, in order, cut the time into tiles. Three running sums tell what runs in a
    tile: how many activities (c), the sum of the numbers of their groups (s) and of the squares of these (q). All are
    of one group exactly if c·q = s² (Cauchy and Schwarz), and the group is then s / c. What several groups run in is
    told by a sum of random numbers, one for each group, modulo 2**64.

    A tile has a column: that of its group, one for the time in which nothing runs, or one for each set of groups that
    run at once; of these the MAX_SETS with the most time have a column of their own, and all others share one. Of the
    groups, MAX_GROUPS have columns, those with the most time; the rest share one.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.active_sets import cut
from kineto_trace.arrays.codec import Interner

MAX_GROUPS, MAX_SETS = 200, 24  # columns of a fit, whose cost grows with their square
NOTHING = -1

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Runs(NamedTuple):
    """GPU activities of one GPU (Unix ns), each with the number of its group, 0 to `groups` - 1."""

    start: Ints
    end: Ints
    group: Ints
    groups: int


class DeviceTiles(NamedTuple):
    """Tiles in order, without holes. column: of each.

    groups: the group of each of the first columns, those of groups alone; behind them come the column of all other
    groups and that of idle time. columns: their number. total_ns: of each of all groups, the sum of its durations;
    shared_ns: of that, the part in which other groups ran as well, or that has no column of its own.
    """

    start: Ints
    end: Ints
    column: Ints
    groups: Ints
    columns: int
    total_ns: Ints
    shared_ns: Ints

    @property
    def idle(self) -> int:
        """Returns the column of the time in which nothing runs."""
        return len(self.groups) + 1


class Pieces(NamedTuple):
    """Parts of samples in order of time. share: of the sample's length that lies in a tile of this column."""

    sample: Ints
    column: Ints
    share: Floats


def device_tiles(runs: Runs, low: int, high: int) -> DeviceTiles:
    """Returns what runs when in [low, high). Activities are cut off at both ends; those without duration are none."""
    start, end = np.clip(runs.start, low, high), np.clip(runs.end, low, high)
    lasting = end > start
    start, end, number = start[lasting], end[lasting], runs.group[lasting]
    total = np.bincount(number, end - start, runs.groups).astype(np.int64)
    order = np.argsort(-total, kind="stable")[: int(np.count_nonzero(total))]
    groups = order[:MAX_GROUPS]
    dense = np.full(runs.groups, len(groups), np.int64)  # what has no column of its own shares the next one
    dense[groups] = np.arange(len(groups))
    dense = dense[number]
    tile_start, tile_end, column, running = _tiled(start, end, dense, len(groups) + 1, low, high)
    alone = (column >= 0) & (column < len(groups))
    unshared = np.bincount(column[alone], (tile_end - tile_start)[alone] * running[alone], len(groups))
    shared = total.copy()
    shared[groups] -= unshared.astype(np.int64)
    columns = int(column.max(initial=NOTHING)) + 1
    return DeviceTiles(tile_start, tile_end, column, groups, max(columns, len(groups) + 2), total, shared)


def _tiled(start: Ints, end: Ints, group: Ints, groups: int, low: int, high: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Starts, ends and columns of tiles, and how many activities run in each."""
    time = np.concatenate([[low], start, end])
    order = np.argsort(time, kind="stable")
    time = time[order]
    sign = np.concatenate([[0], np.ones(len(start), np.int64), -np.ones(len(start), np.int64)])[order]
    number = np.concatenate([[0], group, group])[order]
    until = np.append(time[1:], high)
    lasting = until > time
    count, total, squares = (np.cumsum(sign * each)[lasting] for each in (np.ones_like(number), number, number**2))
    key = np.random.default_rng(0).integers(1, 1 << 63, groups, np.int64).astype(np.uint64)
    signed = np.where(sign > 0, key[number], np.uint64(0) - key[number]) * (sign != 0).astype(np.uint64)
    several = (count > 0) & (count * squares != total**2)
    column = np.where(count > 0, total // np.maximum(count, 1), groups)
    places = np.cumsum(signed)[lasting][several]
    column[several] = groups + 1 + _sets(places, (until - time)[lasting][several])
    return time[lasting], until[lasting], column, count


def _sets(key: npt.NDArray[np.uint64], length: Ints) -> Ints:
    """Numbers of the sets with these keys: the longest first, those behind them all the same."""
    interner = Interner()
    number: Ints = interner.intern(key).astype(np.int64)
    took = np.bincount(number, length, len(interner.keys()))
    rank = np.empty(len(took), np.int64)
    rank[np.argsort(-took, kind="stable")] = np.arange(len(took))
    found: Ints = np.minimum(rank, MAX_SETS)[number]
    return found


def pieces_of(tiles: DeviceTiles, start: Ints, end: Ints) -> Pieces:
    """Cuts samples, which are in order and do not overlap, at the borders of the tiles."""
    borders = np.concatenate([start, end])
    borders.sort(kind="stable")
    found = cut(tiles.start, tiles.end, borders)
    sample = np.searchsorted(start, found.start, side="right") - 1
    inside = (sample >= 0) & (found.start < np.append(end, 0)[sample])
    sample = sample[inside]
    share = (found.end - found.start)[inside] / (end - start)[sample]
    return Pieces(sample, tiles.column[found.owner[inside]], share)
