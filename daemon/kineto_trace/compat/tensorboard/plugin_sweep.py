"""Memory records in the TensorBoard plug-in's tree where backward operators were hung below modules' backward nodes.

Theory of operation
    The plug-in goes through a thread's records and through its tree at once. Once it is in a node it stays there until
    a record is not before its end; then it is back in the node around it, behind that one. In a node it goes into the
    next child that has not ended if that has begun, else the record is the node's. Backward nodes need not lie inside
    the node that they hang in: they may begin before it, and what is after its end goes to them as long as they last.

    Only nodes with backward nodes inside need that walk. Between these, all records up to the next one are taken at
    once: what is deepest without backward nodes has them. In the same way a backward operator has all records until
    its end, or what is deepest inside of it.

    Statistics are summed up while the plug-in goes down the tree. What it comes by several times (an operator and its
    child that start at once bring a backward operator twice) keeps what it summed up before: the second time all sums
    inside are added once more.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.compat.tensorboard.plugin_backward import Backward, outermost
from kineto_trace.compat.tensorboard.plugin_diff_tree import TreeSide
from kineto_trace.compat.tensorboard.plugin_nodes import NOTHING
from kineto_trace.compat.tensorboard.plugin_order import entries_in_order
from kineto_trace.compat.tensorboard.plugin_tree import Tree, subtrees

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Frame:
    """A node that the walk is in. backward: it is a backward node. at: the child that comes next."""

    children: Ints
    starts: Floats
    ends: Floats
    end: float
    backward: bool
    at: int = 0


class MemorySweep:
    """The walk over the records of the main thread. time: µs, ascending; node: their deepest nodes without backward.

    deepest: by track, at each of these times the deepest node. Afterwards: node, what has each record (NOTHING: no
    node of the tree); entered: per backward node; visited: nodes of the tree that the walk was in.
    """

    def __init__(self, side: TreeSide, time: Floats, node: Ints, deepest: dict[int, Ints]) -> None:
        self.node = node.copy()
        self.entered = np.zeros(len(side.moved.module), np.bool_)
        self.visited: list[int] = []
        self._side, self._time, self._deepest = side, time, deepest
        self._special = self._around_hosts()
        self._taken: list[tuple[int, int, int]] = []  # by which backward operator, from which record up to which
        self._walk()
        self._give_to_roots()

    def _around_hosts(self) -> Flags:
        """Tells which nodes have a backward node somewhere inside."""
        tree, found = self._side.tree, np.zeros(len(self._side.tree), np.bool_)
        node = unique_values(self._side.moved.host[self._side.moved.host >= 0])
        while len(node):
            found[node] = True
            node = unique_values(tree.parent[node])
            node = node[node >= 0]
            node = node[~found[node]]
        return found

    def _walk(self) -> None:
        time = self._time
        low, high = self._side.thread_span()
        place = int(np.searchsorted(time, low))
        frames = [self._frame(self._side.children_of_host(NOTHING), high, backward=False)]
        while frames and place < len(time):
            frame, now = frames[-1], time[place]
            if now >= frame.end:
                frames.pop()
                if frames:
                    frames[-1].at += 1
                continue
            lasting = frame.ends[frame.at :] > now
            frame.at += int(np.argmax(lasting)) if lasting.any() else len(lasting)
            until = frame.end
            if frame.at < len(frame.children):
                item, end = int(frame.children[frame.at]), float(frame.ends[frame.at])
                if frame.starts[frame.at] > now:
                    until = min(until, float(frame.starts[frame.at]))
                elif frame.backward and item >= 0:
                    stop = int(np.searchsorted(time, end))
                    self._taken.append((item, place, stop))
                    place = stop
                    frame.at += 1
                    continue
                elif item < 0:
                    self.entered[-1 - item] = True
                    frames.append(self._frame(self._side.children(item), end, backward=True))
                    continue
                else:
                    self.visited.append(item)
                    frames.append(self._frame(self._side.children_of_host(item), end, backward=False))
                    continue
            stop = int(np.searchsorted(time, until))
            if frame.backward:
                self.node[place:stop] = NOTHING
            place = stop

    def _frame(self, children: Ints, end: float, *, backward: bool) -> _Frame:
        if not backward:
            children = children[(children < 0) | self._special[np.maximum(children, 0)]]
        starts, ends = self._side.spans(children)
        return _Frame(children, starts, ends, end, backward)

    def _give_to_roots(self) -> None:
        """Gives records to the backward operators that took them, or to what is deepest inside."""
        tree = self._side.tree
        root, place, stop = np.array(self._taken, np.int64).reshape(-1, 3).T
        sizes = stop - place
        root = np.repeat(root, sizes)
        rows = np.repeat(place - np.cumsum(sizes) + sizes, sizes) + np.arange(len(root))
        for track, deepest in self._deepest.items():
            own = tree.track[root] == track
            found = deepest[rows[own]]
            inside = (found >= root[own]) & (found < tree.stop[root[own]])
            self.node[rows[own]] = np.where(inside, found, root[own])


def traversals(tree: Tree, moved: Backward, entered: Flags, low: float | None, high: float | None) -> Ints:
    """Numbers the visits of each root from 1: one number per entry of moved.roots; 0: the plug-in does not visit it.

    low, high: µs; it does not look into nodes outside of these.
    """
    open_ = entered & moved.placed
    if low is not None:
        open_ &= moved.end >= low
        open_[moved.hung] &= (moved.host < 0) | (tree.end[moved.host] >= low)
    if high is not None:
        open_ &= moved.start <= high
        open_[moved.hung] &= (moved.host < 0) | (tree.start[moved.host] <= high)
    while True:
        still = open_ & ((moved.parent < 0) | open_[moved.parent])
        if np.array_equal(still, open_):
            break
        open_ = still
    found = np.zeros(len(moved.roots), np.int64)
    entries = entries_in_order(tree, moved)
    entries = entries[open_[moved.below[entries]]]
    order = np.argsort(moved.roots[entries], kind="stable")
    root = moved.roots[entries][order]
    begins = np.concatenate([[True], root[1:] != root[:-1]]) if len(root) else np.zeros(0, np.bool_)
    first = np.maximum.accumulate(np.where(begins, np.arange(len(root)), 0))
    found[entries[order]] = np.arange(len(root)) - first + 1
    return found


def visits_of(tree: Tree, moved: Backward, turn: Ints) -> Ints:
    """Returns how often the plug-in visits each node. turn: as traversals() gives it."""
    found, roots = np.ones(len(tree), np.int64), np.zeros(len(tree), np.int64)
    np.maximum.at(roots, moved.roots, turn)
    inside, of_root = subtrees(tree, moved.removed)
    found[inside] = roots[moved.removed][of_root]
    return found


def summed_up(tree: Tree, moved: Backward, turn: Ints, own: Ints) -> Ints:
    """Returns the sum of `own` values that the plug-in gets at each node. turn: as traversals() gives it."""
    times = visits_of(tree, moved, turn)
    found = np.where(times > 0, tree.below(own), 0).astype(np.int64)
    host = np.full(len(moved.module), NOTHING)
    host[moved.hung] = moved.host
    host_of = host[outermost(moved.parent)][moved.below]
    hosted = np.zeros(len(tree), np.int64)
    for number in range(1, int(turn.max(initial=0)) + 1):
        if number > 1:
            again = times >= number
            found = np.where(again, tree.below(np.where(again, found + own, 0)), found).astype(np.int64)
        chosen = np.flatnonzero((turn == number) & (host_of >= 0))
        np.add.at(hosted, host_of[chosen], found[moved.roots[chosen]])
    return found + tree.below(hosted).astype(np.int64)
