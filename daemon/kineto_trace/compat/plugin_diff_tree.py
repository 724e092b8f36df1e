"""Two traces node by node: matches modules, steps, optimizer steps and data loading of one to those of the other.

Theory of operation
    The trees are those of the TensorBoard plug-in (plugin_tree.py), with its backward nodes; only the first thread of
    each trace counts. The contents of all steps are treated as one list. Two lists are matched in order: every data
    loading, module, backward node, optimizer step or step on the left matches the first one on the right with the same
    kind and name after the last match. Everything between two matches is a composite of both sides; a composite of one
    node is that node. Inside a match, or two single nodes beside each other, their children are matched in the same
    way.

    A node's path is "0" for the whole and "0-2-1" for the child 1 of its child 2. Only nodes on the requested path are
    evaluated, so that large traces answer at once.

    A node's time is its GPU time or, if it has none, its time on the host; that of a composite is the sum over its
    nodes.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kineto_trace.analysis.diff.event_diff_views import (
    OPERATOR_TOTALS,
    OPERATORS,
    Side,
    both_sides,
    by_name,
    delta_columns,
    measure_columns,
)
from kineto_trace.arrays.codec import Events
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Floats, Ints
from kineto_trace.base.quantities import times
from kineto_trace.compat.plugin_backward import Backward, children_left, plugin_backward, thread_span
from kineto_trace.compat.plugin_tree import Node, Tree, base_ns, microseconds, orderable, plugin_tree
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu
from kineto_trace.structure.module_calls import shown_names
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

MATCHED = frozenset({Node.DATA_LOADER, Node.MODULE, Node.OPTIMIZER, Node.STEP})
BACKWARD = -1  # kind of a backward node
COMPOSITE, BLANK = "CompositeNodes", "Blank"
ROOT = "0"
TREE = columns(
    ("path", "text", "", "path of the node, for the option path: 0 is the root, 0-2 its child 2"),
    ("depth", "int", "", "number of nodes above the node"),
    ("name", "text", "", "name of the node in the other trace, or else in the baseline"),
    ("name_baseline", "text", "", "name of the node in the baseline; CompositeNodes: several nodes; Blank: none"),
    ("name_other", "text", "", "name of the node in the other trace"),
    ("children", "int", "", "number of child nodes"),
    *measure_columns("total", "us", "GPU time, or host time where there is no GPU time"),
    *measure_columns("host", "us", "host time"),
    *measure_columns("device", "us", "GPU time"),
    ("accumulated_baseline_us", "float", "us", "running sum of total_baseline over the children"),
    ("accumulated_other_us", "float", "us", "running sum of total_other over the children"),
    ("accumulated_delta_us", "float", "us", "running sum of their difference"),
)


class TreeSide:
    """One trace. An item is a node of its tree or, below 0, -1 less the place of a backward node.

    device: per node of the tree its own GPU time, µs.
    hosted: the backward nodes directly below each node (NOTHING for the root of the main thread).
    """

    def __init__(self, context: Context, device: Floats) -> None:
        self.tree: Tree = context.get(plugin_tree)
        self.moved: Backward = context.get(plugin_backward)
        self.strings = context.get(shown_names)
        self.device_self = device
        self.device_total = self.tree.below(device)
        self.hosted: dict[int, list[int]] = {}
        self._lists: dict[int, Ints] = {}
        self._gone = self.moved.gone()
        for host, own in self.moved.by_host().items():
            items = -1 - self.moved.hung[own]
            self.hosted[host] = items.tolist()
            key = host if host != NOTHING else -1 - self.moved.main
            self._lists[key] = np.insert(self._list(host, self.moved.main), self.moved.at[own], items)

    @cached_property
    def _below(self) -> tuple[Ints, Ints]:
        """Returns the backward node around each item that has one, and these items, sorted by that node."""
        nested = np.flatnonzero(self.moved.parent != NOTHING)
        around = np.concatenate([self.moved.below, self.moved.parent[nested]])
        order = np.argsort(around, kind="stable")
        return around[order], np.concatenate([self.moved.roots, -1 - nested])[order]

    def _list(self, node: int, track: int) -> Ints:
        key = node if node != NOTHING else -1 - track
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = children_left(self.tree, self._gone, node, track)
        return found

    def thread_span(self) -> tuple[float, float]:
        """Returns start and end of the main thread, in µs."""
        return thread_span(self.tree, self.moved.main)

    def span(self, item: int) -> tuple[float, float]:
        """Returns start and end, in µs."""
        if item < 0:
            return float(self.moved.start[-1 - item]), float(self.moved.end[-1 - item])
        return float(self.tree.start[item]), float(self.tree.end[item])

    def spans(self, items: Ints) -> tuple[Floats, Floats]:
        """Returns starts and ends, in µs."""
        starts, ends = np.empty(len(items)), np.empty(len(items))
        for own, start, end in (
            (items >= 0, self.tree.start, self.tree.end),
            (items < 0, self.moved.start, self.moved.end),
        ):
            place = items[own] if start is self.tree.start else -1 - items[own]
            starts[own], ends[own] = start[place], end[place]
        return starts, ends

    def matched(self, items: Ints) -> Ints:
        """Returns the places of the items that may match."""
        kinds = np.append(self.tree.kind, 0)[np.maximum(items, -1)]
        return np.flatnonzero((items < 0) | np.isin(kinds, list(MATCHED)))

    def key(self, item: int) -> tuple[int, str]:
        """Returns the key that must be equal for a match."""
        return (BACKWARD if item < 0 else int(self.tree.kind[item])), self.name(item)

    def name(self, item: int) -> str:
        """Returns the plug-in's name of an item."""
        if item < 0:
            return self.strings[int(self.tree.name[self.moved.module[-1 - item]])] + ".backward"
        return self.strings[int(self.tree.name[item])]

    def children_of_host(self, host: int) -> Ints:
        """Returns the items inside a node of the main thread (NOTHING: its root), backward nodes included."""
        return self._list(host, self.moved.main)

    def children(self, item: int) -> Ints:
        """Returns the children of an item by start."""
        if item >= 0:
            return self._list(item, 0)
        place = -1 - item
        around, items = self._below
        first, stop = np.searchsorted(around, (place, place + 1))
        found = items[first:stop]
        starts, ends = self.spans(found)
        ordered: Ints = found[np.lexsort((-ends, starts))]
        return ordered

    def outermost(self) -> Ints:
        """Returns the items inside all steps of the first thread; without steps, the outermost items of that thread."""
        for track in range(int(self.tree.track.max(initial=-1)) + 1):
            items = self._list(NOTHING, track)
            if len(items):
                nodes = items[items >= 0]
                steps = nodes[self.tree.kind[nodes] == Node.STEP].tolist()
                return np.concatenate([self.children(step) for step in steps]) if steps else items
        return np.empty(0, np.int64)

    def times(self, items: Ints) -> tuple[Floats, Floats]:
        """Returns host and device time of each item, in µs."""
        starts, ends = self.spans(items)
        device = np.zeros(len(items))
        own = items >= 0
        device[own] = self.device_total[items[own]]
        for place in np.flatnonzero(~own).tolist():
            device[place] = self.times(self.children(int(items[place])))[1].sum()
        return ends - starts, device

    def operators(self, items: Ints) -> Ints:
        """Returns for each node of the tree how often its operator is inside these items."""
        weight = np.zeros(len(self.tree) + 1, np.int64)
        waiting = items
        while len(waiting):
            nodes = waiting[waiting >= 0]
            inside = self._spread(nodes)
            weight[:-1] += inside
            removed = self.moved.removed
            weight[:-1] -= self._spread(np.repeat(removed, np.where(np.isin(removed, nodes), 0, inside[removed])))
            hosted = [each for node, each in self.hosted.items() for _ in range(int(inside[node]) if node >= 0 else 0)]
            backward = [self.children(item) for item in waiting[waiting < 0].tolist()]
            waiting = np.concatenate([np.empty(0, np.int64), *map(np.array, hosted), *backward]).astype(np.int64)
        found: Ints = np.where(self.tree.operator, weight[:-1], 0)
        return found

    def _spread(self, nodes: Ints) -> Ints:
        """Returns for each node of the tree how many of these nodes it is or is inside of."""
        count = len(self.tree) + 1
        opened = np.bincount(nodes, minlength=count) - np.bincount(self.tree.stop[nodes], minlength=count)
        return np.cumsum(opened)[:-1]


@dataclass(frozen=True)
class DiffNode:
    """Items of both sides beside each other. A side without items is blank, one with several is a composite."""

    left_side: TreeSide
    right_side: TreeSide
    left: Ints
    right: Ints

    def name(self, side: TreeSide, items: Ints) -> str:
        """Returns the plug-in's name of the node."""
        if not len(items):
            return BLANK
        return side.name(int(items[0])) if len(items) == 1 else COMPOSITE

    @cached_property
    def children(self) -> list["DiffNode"]:
        """Returns the matched children; none if one side is blank or if a single node is beside a composite."""
        left, right = self.left, self.right
        if not len(left) or not len(right) or (len(left) == 1) != (len(right) == 1):
            return []
        if len(left) == 1:
            left, right = self.left_side.children(int(left[0])), self.right_side.children(int(right[0]))
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

    def _node(self, left: Ints, right: Ints) -> "DiffNode":
        return DiffNode(self.left_side, self.right_side, left, right)

    def _matches(self, left: Ints, right: Ints) -> list[tuple[int, int]]:
        places: dict[tuple[int, str], list[int]] = {}
        for number in self.right_side.matched(right).tolist():
            places.setdefault(self.right_side.key(int(right[number])), []).append(number)
        found, after = [], 0
        for number in self.left_side.matched(left).tolist():
            known = places.get(self.left_side.key(int(left[number])), [])
            at = bisect_left(known, after)
            if at < len(known):
                found.append((number, known[at]))
                after = known[at] + 1
        return found


def diff_node(left: TreeSide, right: TreeSide, path: str) -> DiffNode:
    """Returns the node at a path. Raises ViewError."""
    node = DiffNode(left, right, left.outermost(), right.outermost())
    first, *numbers = path.split("-")
    shown = "0"
    if first != "0" or not all(number.isdecimal() for number in numbers):
        raise ViewError(f"diff: {path!r} is not the path of a node; use 0 for the root, 0-2 for its child 2, and so on")
    for number in numbers:
        if int(number) >= len(node.children):
            raise ViewError(f"diff: no node {path}: node {shown} has {times(len(node.children), 'child', 'children')}")
        node = node.children[int(number)]
        shown += f"-{number}"
    return node


def launched_device_times(context: Context) -> Floats:
    """Returns for each node of the plug-in's tree the GPU time (µs) of calls made while it was the innermost one."""
    tree, activity, launched = context.get(plugin_tree), context.get(gpu), context.get(calls)
    if not len(tree) or not len(activity):
        return np.zeros(len(tree))
    threads, first = np.unique(tree.thread, return_index=True)
    place = np.minimum(np.searchsorted(threads, launched.thread), len(threads) - 1)
    known = threads[place] == launched.thread
    track = np.where(known, tree.track[first[place]], 2**32 - 1).astype(np.uint32)
    events = Events(tree.track, orderable(tree.start), orderable(tree.end))
    moments = Events(track, orderable(microseconds(launched.start, base_ns(context.trace))))
    node = np.append(events.enclosing(tree.parent.astype(np.int32), moments), NOTHING)
    owner = node[activity.call]
    took = (activity.end - activity.start)[owner >= 0] / 1000
    return np.bincount(owner[owner >= 0], weights=took, minlength=len(tree)).astype(np.float64)


def _tree(partials: Sequence[tuple[int, TreeSide]], *, path: str = ROOT) -> Answer:
    left, right = both_sides(partials)
    node = diff_node(left, right, path)
    nodes = [node, *node.children]
    times = [_times(left, each.left) + _times(right, each.right) for each in nodes]
    table = np.array(times, np.float64).reshape(len(nodes), 6)
    values: dict[str, Any] = {}
    for number, name in enumerate(("total", "host", "device")):
        values |= delta_columns(name, "us", table[:, number], table[:, number + 3])
    running = np.cumsum(table[1:], axis=0)
    values["accumulated_baseline_us"] = np.concatenate([[np.nan], running[:, 0]])
    values["accumulated_other_us"] = np.concatenate([[np.nan], running[:, 3]])
    values["accumulated_delta_us"] = values["accumulated_other_us"] - values["accumulated_baseline_us"]
    values["path"] = [path, *(f"{path}-{number}" for number in range(len(node.children)))]
    values["depth"] = [each.count("-") for each in values["path"]]
    values["name"] = [each.name(*((right, each.right) if len(each.right) else (left, each.left))) for each in nodes]
    values["name_baseline"] = [each.name(left, each.left) for each in nodes]
    values["name_other"] = [each.name(right, each.right) for each in nodes]
    values["children"] = [len(each.children) for each in nodes]
    return Answer(values)


@view("diff_tree", TREE, reduce=_tree)
def diff_tree(context: Context) -> TreeSide:
    """The matched modules of two traces: the node at `path` in the first row, then its children in order.

    Steps, modules, their backward passes, optimizer steps and data loading are matched by kind and name in order, as in
    the diff view of the TensorBoard profiler plug-in; everything between them is grouped. Times are sums over all
    steps. Only the first thread counts. GPU time counts for the node that launched the work.

    Options:
    - path: the node, as in the column `path`: 0 is the root, 0-2 its child 2.
    """
    return TreeSide(context, context.get(launched_device_times))


def _tree_operators(partials: Sequence[tuple[int, TreeSide]], *, path: str = ROOT) -> Answer:
    left, right = both_sides(partials)
    node = diff_node(left, right, path)
    sides = [(0, _inside(left, node.left)), (1, _inside(right, node.right))]
    return Answer(by_name(sides, OPERATORS, ("device_total", "host_total")))


@view("diff_tree_operators", OPERATOR_TOTALS, reduce=_tree_operators)
def diff_tree_operators(context: Context) -> TreeSide:
    """The operators inside one node of the view diff_tree in two traces, by name: sums over all steps.

    Rows are sorted by difference in GPU time, then in host time; the largest come first.

    Options:
    - path: the node, as in the column `path` of diff_tree: 0 is the root, 0-2 its child 2.
    """
    return diff_tree.function(context)  # type: ignore[no-any-return]


@diff_tree.variant(Compat.PLUGIN)
@diff_tree_operators.variant(Compat.PLUGIN)
def plugin_tree_side(context: Context) -> TreeSide:
    """compat=plugin: the diff view of the TensorBoard profiler plug-in, which assigns GPU time by external ids."""
    return TreeSide(context, context.get(plugin_tree).device_self)


def _times(side: TreeSide, items: Ints) -> list[float]:
    """Returns total, host and device time, in µs."""
    host, device = side.times(items)
    return [float(np.where(device != 0, device, host).sum()), float(host.sum()), float(device.sum())]


def _inside(side: TreeSide, items: Ints) -> Side:
    tree, weight = side.tree, side.operators(items)
    nodes = np.flatnonzero(weight > 0)
    groups, times = group([tree.name[nodes]]), weight[nodes]
    columns_us = {
        "device_total": side.device_total,
        "device_self": side.device_self,
        "host_total": tree.end - tree.start,
        "host_self": tree.host_self,
    }

    def total(values: Floats) -> Floats:
        return np.bincount(groups.number, weights=values, minlength=len(groups)).astype(np.float64)

    measures = {name: total(column[nodes] * times) for name, column in columns_us.items()}
    names = [side.strings[number] for number in tree.name[nodes][groups.first].tolist()]
    return Side(names, {"calls": total(times.astype(np.float64)), **measures})
