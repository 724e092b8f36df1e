"""Two traces node by node: which modules, steps, optimizer steps and data loading of one belong to which of the other.

Theory of operation
    The trees are those of the TensorBoard plug-in (plugin_tree.py), with its backward nodes; of each trace only the
    first thread counts. What all steps have inside is taken as one list. Two lists are matched in order: every
    data loading, module, backward node, optimizer step or step on the left takes the first one on the right with the
    same kind and name that comes after the last match. What lies between two matches is a composite of both sides; a
    composite of one node is that node. Inside a match, or two single nodes beside each other, their children are
    matched in the same way.

    A node's path is "0" for the whole and "0-2-1" for the child 1 of its child 2. Only nodes on the asked path are
    looked at, so that large traces answer at once.

    A node's time is its GPU time or, if it has none, its time on the host; of a composite the sum over its nodes.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.context import Context
from kineto_trace.analysis.parts import calls, gpu
from kineto_trace.analysis.plugin_backward import Backward, plugin_backward
from kineto_trace.analysis.plugin_nodes import NOTHING, Node, base_ns, microseconds, orderable
from kineto_trace.analysis.plugin_tree import Tree, plugin_tree
from kineto_trace.codec import Events
from kineto_trace.errors import ViewError

MATCHED = frozenset({Node.DATA_LOADER, Node.MODULE, Node.OPTIMIZER, Node.STEP})
BACKWARD = -1  # kind of a backward node
COMPOSITE, BLANK = "CompositeNodes", "Blank"

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Side:
    """One trace. An item is a node of its tree or, below 0, -1 less the place of a backward node.

    device: per node of the tree its own GPU time, µs.
    """

    def __init__(self, context: Context, device: Floats) -> None:
        self.tree: Tree = context.get(plugin_tree)
        self.moved: Backward = context.get(plugin_backward)
        self.strings = context.trace.strings
        self.device_self = device
        self.device_total = self.tree.below(device)
        self._gone = set(self.moved.removed.tolist())
        self._hosted: dict[int, list[int]] = {}  # node (or -1: root of the main thread) -> outermost backward nodes
        self._lists: dict[int, list[int]] = {}
        for place in np.flatnonzero((self.moved.parent == NOTHING) & self.moved.placed):
            self._hang(-1 - int(place))

    def _children_of_tree(self, node: int, track: int) -> list[int]:
        """The children of a node (NOTHING: of the root of a thread) that are left, by start."""
        if node == NOTHING:
            found = np.flatnonzero((self.tree.parent == NOTHING) & (self.tree.track == track))
        else:
            found = np.flatnonzero(self.tree.parent[node + 1 : self.tree.stop[node]] == node) + node + 1
        return [child for child in found.tolist() if child not in self._gone]

    def _list(self, node: int, track: int) -> list[int]:
        key = node if node != NOTHING else -1 - track
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = self._children_of_tree(node, track)
        return found

    def _hang(self, item: int) -> None:
        """Puts an outermost backward node among the children of the innermost node that it overlaps in order."""
        start, end = self.span(item)
        node, track = NOTHING, self.moved.main
        while True:
            siblings = self._list(node, track)
            at = next((n for n, other in enumerate(siblings) if self.span(other)[1] > start), len(siblings))
            if at == len(siblings) or end < self.span(siblings[at])[0] or siblings[at] < 0:
                siblings.insert(at, item)
                self._hosted.setdefault(node, []).append(item)
                return
            node = siblings[at]

    def span(self, item: int) -> tuple[float, float]:
        """Start and end, µs."""
        if item < 0:
            return float(self.moved.start[-1 - item]), float(self.moved.end[-1 - item])
        return float(self.tree.start[item]), float(self.tree.end[item])

    def key(self, item: int) -> tuple[int, str] | None:
        """What has to be equal to match; None: such nodes are not matched."""
        if item < 0:
            return BACKWARD, self.name(item)
        kind = int(self.tree.kind[item])
        return (kind, self.name(item)) if kind in MATCHED else None

    def name(self, item: int) -> str:
        """As the plug-in calls it."""
        if item < 0:
            return self.strings[int(self.tree.name[self.moved.module[-1 - item]])] + ".backward"
        return self.strings[int(self.tree.name[item])]

    def children(self, item: int) -> list[int]:
        """What is inside an item, by start."""
        if item >= 0:
            return list(self._list(item, 0))
        place = -1 - item
        inner = [-1 - n for n in np.flatnonzero(self.moved.parent == place).tolist()]
        found = [*self.moved.roots[self.moved.below == place].tolist(), *inner]
        return sorted(found, key=lambda each: (self.span(each)[0], -self.span(each)[1]))

    def outermost(self) -> list[int]:
        """What all steps of the first thread have inside; without steps, what that thread has."""
        for track in range(int(self.tree.track.max(initial=-1)) + 1):
            items = self._list(NOTHING, track)
            if items:
                steps = [item for item in items if item >= 0 and self.tree.kind[item] == Node.STEP]
                return [child for step in steps for child in self.children(step)] if steps else list(items)
        return []

    def host(self, item: int) -> float:
        """µs."""
        start, end = self.span(item)
        return end - start

    def device(self, item: int) -> float:
        """µs."""
        if item >= 0:
            return float(self.device_total[item])
        return sum(self.device(child) for child in self.children(item))

    def operators(self, items: Sequence[int]) -> Ints:
        """How often the operators at each node of the tree are inside these items."""
        weight = np.zeros(len(self.tree) + 1, np.int64)
        waiting = list(items)
        while waiting:
            item = waiting.pop()
            if item < 0:
                waiting += self.children(item)
                continue
            stop = int(self.tree.stop[item])
            weight[item] += 1
            weight[stop] -= 1
            for root in self.moved.removed[(self.moved.removed > item) & (self.moved.removed < stop)].tolist():
                weight[root] -= 1
                weight[self.tree.stop[root]] += 1
            for node, hosted in self._hosted.items():
                if item <= node < stop:
                    waiting += hosted
        found: Ints = np.where(self.tree.operator, np.cumsum(weight)[:-1], 0)
        return found


@dataclass(frozen=True)
class DiffNode:
    """Items of both sides beside each other; none: blank. single: it is a node, not a composite of one."""

    left_side: Side
    right_side: Side
    left: tuple[int, ...]
    right: tuple[int, ...]

    def name(self, side: Side, items: tuple[int, ...]) -> str:
        """As the plug-in calls it."""
        if not items:
            return BLANK
        return side.name(items[0]) if len(items) == 1 else COMPOSITE

    @cached_property
    def children(self) -> list["DiffNode"]:
        """What is inside, matched; nothing where one side is blank or a single node is beside a composite."""
        if not self.left or not self.right or (len(self.left) == 1) != (len(self.right) == 1):
            return []
        left, right = list(self.left), list(self.right)
        if len(left) == 1:
            left, right = self.left_side.children(left[0]), self.right_side.children(right[0])
        matches = self._matches(left, right)
        if not matches:
            return []
        found, at_left, at_right = [], 0, 0
        for one, other in [*matches, (len(left), len(right))]:
            if at_left < one or at_right < other:
                found.append(self._node(left[at_left:one], right[at_right:other]))
            if one < len(left):
                found.append(self._node(left[one : one + 1], right[other : other + 1]))
            at_left, at_right = one + 1, other + 1
        return found

    def _node(self, left: list[int], right: list[int]) -> "DiffNode":
        return DiffNode(self.left_side, self.right_side, tuple(left), tuple(right))

    def _matches(self, left: list[int], right: list[int]) -> list[tuple[int, int]]:
        places: dict[tuple[int, str], list[int]] = {}
        for number, item in enumerate(right):
            key = self.right_side.key(item)
            if key is not None:
                places.setdefault(key, []).append(number)
        found, after = [], 0
        for number, item in enumerate(left):
            key = self.left_side.key(item)
            known = places.get(key, []) if key is not None else []
            at = bisect_left(known, after)
            if at < len(known):
                found.append((number, known[at]))
                after = known[at] + 1
        return found


def diff_node(left: Side, right: Side, path: str) -> DiffNode:
    """The node at a path. Raises ViewError."""
    node = DiffNode(left, right, tuple(left.outermost()), tuple(right.outermost()))
    first, *numbers = path.split("-")
    shown = "0"
    if first != "0" or not all(number.isdecimal() for number in numbers):
        raise ViewError(f"diff: {path!r} is no path of a node; use 0 for the whole, 0-2 for its child 2, and so on")
    for number in numbers:
        if int(number) >= len(node.children):
            raise ViewError(f"diff: no node {path}: node {shown} has {len(node.children)} children")
        node = node.children[int(number)]
        shown += f"-{number}"
    return node


def launched_device_times(context: Context) -> Floats:
    """Per node of the plug-in's tree the GPU time (µs) of the calls that were made while it was the innermost one."""
    tree, activity, launched = context.get(plugin_tree), context.get(gpu), context.get(calls)
    if not len(tree) or not len(activity):
        return np.zeros(len(tree))
    threads, first = np.unique(tree.thread, return_index=True)
    place = np.minimum(np.searchsorted(threads, launched.thread), len(threads) - 1)
    known = threads[place] == launched.thread
    track = np.where(known, tree.track[first[place]], 2**32 - 1).astype(np.uint32)
    events = Events(tree.track, orderable(tree.start), orderable(tree.end))
    moments = Events(track, orderable(microseconds(launched.start, base_ns(context.trace))))
    order = moments.order()
    node = np.full(len(order) + 1, NOTHING, np.int64)
    node[order] = events.enclosing(tree.parent.astype(np.int32), moments.take(order))
    node[-1] = NOTHING
    owner = node[activity.call]
    took = (activity.end - activity.start)[owner >= 0] / 1000
    return np.bincount(owner[owner >= 0], weights=took, minlength=len(tree)).astype(np.float64)
