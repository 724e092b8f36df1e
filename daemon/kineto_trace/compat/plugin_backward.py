"""Backward passes as the TensorBoard plug-in shows them: below "<module>.backward", beside the forward modules.

Theory of operation
    This applies only if the trace has calls of nn.Module, backward operators and links between forward and backward.
    The backward operators are those of the engine ("autograd::engine::evaluate_function: …") outside everything but
    steps; one that accumulates gradients belongs to the previous one. All of them are removed from the tree. The link
    of a forward operator identifies the group of its backward operator by its start time; the group returns below the
    backward node of the module around the forward operator, once for every operator there that starts at that time (an
    operator and its child may start at the same microsecond), or never, if no module's operator has a link to it.

    A backward node spans from its first child's start to the end of the child that starts last; without children it
    has the times of its module. The outermost ones are inserted into the main thread's tree by their times, in the
    order of their starts: each descends from the place of the previous one (or from an enclosing node that has not
    ended) into the first node that ends after it starts, as long as that does not start after it ends. One that ends
    before the node reached by this search starts, or starts after the end of the thread, is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, UInts64
from kineto_trace.compat.plugin_tree import Node, Tree, base_ns, microseconds, plugin_tree, subtrees
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING
from kineto_trace.structure.activity_links import forward_backward

EVALUATE = "autograd::engine::evaluate_function:"
ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
LINKS = "fwdbwd"  # category of the flows

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Backward:
    """How backward operators moved.

    visits: per node of the tree how often the plug-in visits it.
    removed: roots of backward operators that left their place.
    main: track of the main thread; NOTHING without threads.

    Per backward node:

    module: node of the tree.
    parent: place of the backward node around it, or NOTHING.
    start, end: µs.
    placed: whether it is in the tree.

    Its children, beside other backward nodes, are roots[n] for all n with below[n] = its place.

    hung: the outermost ones in the tree, in the order of insertion.
    host: the node around each of these (NOTHING for the root of the main thread).
    at: how many children of that node precede it.
    """

    visits: Ints
    removed: Ints
    main: int
    module: Ints
    parent: Ints
    start: Floats
    end: Floats
    placed: Flags
    below: Ints
    roots: Ints
    hung: Ints
    host: Ints
    at: Ints

    def gone(self) -> Flags:
        """Returns for each node of the tree whether it is one of the removed roots."""
        found = np.zeros(len(self.visits), np.bool_)
        found[self.removed] = True
        return found

    def by_host(self) -> dict[int, Ints]:
        """Returns for each host the places of its backward nodes in `hung`, in their order."""
        order = np.argsort(self.host, kind="stable")
        hosts, first = np.unique(self.host[order], return_index=True)
        return dict(zip(hosts.tolist(), np.split(order, first[1:]), strict=True)) if len(order) else {}


def plugin_backward(context: Context) -> Backward:
    """Returns how backward operators move; if none moves, every node is visited once."""
    tree = context.get(plugin_tree)
    main = _main_track(context, tree)
    forward, backward = _links(context)
    free = _inside_steps_only(tree)
    evaluates = _named(context, tree, lambda text: text.startswith(EVALUATE))
    outer = np.flatnonzero(free & (tree.kind == Node.MODULE))
    roots = np.flatnonzero(free & evaluates & (tree.kind != Node.MODULE) & (tree.kind != Node.STEP))
    if not len(forward) or not len(outer) or not len(roots):
        no_times = np.empty(0, np.float64)
        ones = np.ones(len(tree), np.int64)
        return Backward(ones, _NONE, main, _NONE, _NONE, no_times, no_times, _NONE > 0, *[_NONE] * 5)
    roots = _in_visiting_order(tree, roots)
    group = np.maximum(np.cumsum(~_named(context, tree, lambda text: text == ACCUMULATE)[roots]) - 1, 0)
    starts, groups = _groups_of_starts(tree, roots, group, evaluates, forward, backward)
    module, parent = _modules_below(tree, outer)
    below, root = _hung(tree, module, starts, groups, roots, group)
    start, end = _times(tree, module, parent, below, root)
    hung, host, at = _hosts(tree, roots, main, parent, start, end)
    placed = np.isin(outermost(parent), hung)
    visits = np.zeros(len(tree) + 1, np.int64)
    visits[0] = 1
    np.add.at(visits, roots, -1)
    np.add.at(visits, tree.stop[roots], 1)
    shown = root[placed[below]]
    np.add.at(visits, shown, 1)
    np.add.at(visits, tree.stop[shown], -1)
    return Backward(
        np.cumsum(visits)[:-1], roots, main, module, parent, start, end, placed, below, root, hung, host, at
    )


def _named(context: Context, tree: Tree, wanted: Callable[[str], bool]) -> Flags:
    """Returns for each node whether its name is wanted."""
    return np.array([wanted(text) for text in context.trace.strings], np.bool_)[tree.name]


def _main_track(context: Context, tree: Tree) -> int:
    """Returns the last thread with a step; without steps, the longest one that does not run backward operators."""
    if not len(tree):
        return NOTHING
    steps = np.flatnonzero(_named(context, tree, lambda text: text.startswith(STEP_PREFIX)))
    if len(steps):
        return int(tree.track[steps].max())
    tracks = unique_values(tree.track)
    evaluates = _named(context, tree, lambda text: text.startswith(EVALUATE))
    engine = tree.track[evaluates & (tree.parent == NOTHING)].min(initial=len(tree))
    spans = {int(track): thread_span(tree, track) for track in tracks if len(tracks) == 1 or track != engine}
    return max(spans, key=lambda track: spans[track][1] - spans[track][0])


def thread_span(tree: Tree, track: int) -> tuple[float, float]:
    """Returns the start of a thread's first outermost node and the end of the one that starts last, in µs."""
    outermost = np.flatnonzero((tree.track == track) & (tree.parent == NOTHING))
    return float(tree.start[outermost[0]]), float(tree.end[outermost[-1]])


def _links(context: Context) -> tuple[Floats, Floats]:
    """Returns the starts (µs) of linked forward and backward operators: one pair per forward start, in links' order."""
    trace = context.trace
    base = base_ns(trace)
    if trace.head is None:
        pairs, ops = forward_backward(trace.tables), trace.table("cpu_op")
        forward, backward = ops["start"][pairs.forward_rows], ops["start"][pairs.backward_rows]
    else:
        flows = trace.table("flow")
        own = np.array([text == LINKS for text in trace.strings] + [False])[flows["category"]]
        own &= flows["category"] != NO_STRING
        ends = [np.flatnonzero(own & (flows["phase"] == ord(phase))) for phase in "sf"]
        ids = [flows["id"][rows].astype(np.uint64) for rows in ends]
        other = lookup(ids[0], ids[1], ends[1], NOTHING)
        forward, backward = flows["start"][ends[0][other >= 0]], flows["start"][other[other >= 0]]
    if not len(forward):
        return np.empty(0), np.empty(0)
    _, first = np.unique(forward, return_index=True)
    _, last = np.unique(forward[::-1], return_index=True)
    order = np.argsort(first)
    return microseconds(forward[first][order], base), microseconds(backward[::-1][last][order], base)


def _inside_steps_only(tree: Tree) -> Flags:
    """Returns for each node whether it is inside steps only."""
    others = np.flatnonzero(tree.kind != Node.STEP)
    around = np.zeros(len(tree) + 1, np.int64)
    np.add.at(around, others + 1, 1)
    np.add.at(around, tree.stop[others], -1)
    found: Flags = np.cumsum(around)[:-1] == 0
    return found


def _in_visiting_order(tree: Tree, roots: Ints) -> Ints:
    """Sorts the roots as the plug-in collects them: parent by parent, in the order of each parent's first root."""
    parent = np.where(tree.parent[roots] >= 0, tree.parent[roots], -1 - tree.track[roots])
    _, first, of_root = np.unique(parent, return_index=True, return_inverse=True)
    return roots[np.lexsort((roots, first[of_root]))]


def _groups_of_starts(
    tree: Tree, roots: Ints, group: Ints, evaluates: Flags, forward: Floats, backward: Floats
) -> tuple[Floats, Ints]:
    """Returns starts of forward operators and the group of backward operators of each; every group appears once."""
    sizes = tree.stop[roots] - roots - 1
    offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    inner = np.repeat(roots, sizes) + 1 + offset
    found = lookup(_bits(backward), _bits(tree.start[inner])[::-1], inner[::-1], NOTHING)  # the first one counts
    known = found >= 0
    forward, above = forward[known], tree.parent[found[known]]
    while True:
        further = np.flatnonzero(~evaluates[above])
        if not len(further):
            break
        above[further] = tree.parent[above[further]]
    heads = np.unique(group, return_index=True)[1]
    number = lookup(above.astype(np.uint64), roots[heads].astype(np.uint64), group[heads], NOTHING)
    forward, number = forward[number >= 0], number[number >= 0]
    once = np.unique(number, return_index=True)[1]
    return forward[once], number[once]


def _bits(times: Floats) -> UInts64:
    return np.ascontiguousarray(times).view(np.uint64)


def _modules_below(tree: Tree, outer: Ints) -> tuple[Ints, Ints]:
    """Returns these outermost modules and all inside them, and for each the place of the enclosing module."""
    inside = np.zeros(len(tree) + 1, np.int64)
    np.add.at(inside, outer, 1)
    np.add.at(inside, tree.stop[outer], -1)
    module = np.flatnonzero((np.cumsum(inside)[:-1] > 0) & (tree.kind == Node.MODULE))
    return module, _module_around(tree, module, module)


def _module_around(tree: Tree, module: Ints, nodes: Ints) -> Ints:
    """Returns for each node the place (in `module`) of the innermost module around it, or NOTHING."""
    above = tree.parent[nodes]
    while True:
        further = np.flatnonzero((above >= 0) & (tree.kind[above] != Node.MODULE))
        if not len(further):
            break
        above[further] = tree.parent[above[further]]
    found: Ints = lookup(above.astype(np.uint64), module.astype(np.uint64), np.arange(len(module)), NOTHING)
    return np.where(above >= 0, found, NOTHING)


def _hung(tree: Tree, module: Ints, starts: Floats, groups: Ints, roots: Ints, group: Ints) -> tuple[Ints, Ints]:
    """Returns pairs of a backward node and a root of backward operators below it, as two arrays."""
    number = lookup(_bits(tree.start), _bits(starts), groups, NOTHING)
    hits = np.flatnonzero((number >= 0) & tree.operator)
    around = _module_around(tree, module, hits)
    hits, around = hits[around >= 0], around[around >= 0]
    first = np.searchsorted(group, number[hits], side="left")
    sizes = np.searchsorted(group, number[hits], side="right") - first
    offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(around, sizes), roots[np.repeat(first, sizes) + offset]


def _times(tree: Tree, module: Ints, parent: Ints, below: Ints, root: Ints) -> tuple[Floats, Floats]:
    """Returns starts and ends (µs) of the backward nodes, computed from the innermost to the outermost ones."""
    start, end = tree.start[module], tree.end[module]
    depth = depths(parent)
    for level in range(int(depth.max(initial=-1)), -1, -1):
        inner = np.flatnonzero((parent >= 0) & (depth == level + 1))
        own = np.flatnonzero(depth[below] == level)
        node = np.concatenate([below[own], parent[inner]])
        starts = np.concatenate([tree.start[root[own]], start[inner]])
        ends = np.concatenate([tree.end[root[own]], end[inner]])
        order = np.lexsort((-ends, starts, node))
        node = node[order]
        nodes, first = np.unique(node, return_index=True)
        start[nodes] = starts[order][first]
        end[nodes] = ends[order][np.append(first[1:], len(node))[: len(nodes)] - 1]
    return start, end


def _hosts(tree: Tree, removed: Ints, main: int, parent: Ints, start: Floats, end: Floats) -> tuple[Ints, Ints, Ints]:
    """Returns `hung`, `host` and `at` of Backward. There is one loop per outermost backward node."""
    tops = np.flatnonzero(parent == NOTHING)
    tops = tops[np.lexsort((-end[tops], start[tops]))]
    found: list[tuple[int, int, int]] = []
    spans, gone = {NOTHING: thread_span(tree, main)}, np.zeros(len(tree), np.bool_)
    gone[removed] = True
    node, at, children = NOTHING, 0, children_left(tree, gone, NOTHING, main)
    around: list[tuple[int, int, Ints]] = []
    for top in tops.tolist():
        first, last = float(start[top]), float(end[top])
        while first > spans[node][1] and last >= spans[node][0] and around:
            node, at, children = around.pop()
            at += 1
        if first > spans[node][1] or last < spans[node][0]:
            continue  # once a start is after the end of the thread, all that follow are
        while True:
            at = max(at, int(np.searchsorted(tree.end[children], first, side="right")))
            if at >= len(children) or last < tree.start[children[at]]:
                break
            around.append((node, at, children))
            node = int(children[at])
            spans[node] = float(tree.start[node]), float(tree.end[node])
            at, children = 0, children_left(tree, gone, node, main)
        found.append((top, node, at))
    hung, host, place = np.array(found, np.int64).reshape(-1, 3).T
    return hung, host, place


def children_left(tree: Tree, gone: Flags, node: int, track: int) -> Ints:
    """Returns the children of a node (NOTHING: of the root of a thread) that were not removed, by start."""
    if node == NOTHING:
        found = np.flatnonzero((tree.parent == NOTHING) & (tree.track == track))
    else:
        found = np.flatnonzero(tree.parent[node + 1 : tree.stop[node]] == node) + node + 1
    return found[~gone[found]]


def depths(parent: Ints) -> Ints:
    """Returns the depth of each node of a forest, given by its parent or NOTHING."""
    depth = np.zeros(len(parent), np.int64)
    while True:
        deeper = np.where(parent >= 0, depth[parent] + 1, 0)
        if np.array_equal(deeper, depth):
            return depth
        depth = deeper


def outermost(parent: Ints) -> Ints:
    """Returns for each backward node the place of the outermost one around it."""
    top = np.arange(len(parent))
    while True:
        above = np.where(parent[top] >= 0, parent[top], top)
        if np.array_equal(above, top):
            return top
        top = above


# The order in which the TensorBoard plug-in visits the nodes of its tree, with backward operators at their places.
# Theory of operation
# The plug-in collects operators thread by thread, those inside a node before the node. The first call of an
# operator decides whether all of its calls are eligible for tensor cores, and which of two operators with equal
# times comes first.
# A node's number is its place among all nodes, those inside first: with `stop` after its last descendant and `depth`
# enclosing nodes, stop - 1 - depth. An outermost backward node comes after the node to its left, or first in the
# enclosing node; of several at one place the one that is further outside comes first. The nodes below it come in the
# order of starts, level by level.


def visiting_order(context: Context) -> Ints:
    """Returns for each node of plugin_tree() the place of its first visit; a node never visited has any place."""
    tree, moved = context.get(plugin_tree), context.get(plugin_backward)
    number = _numbers(tree)
    entries = entries_in_order(tree, moved)
    if not len(entries):
        return number
    root, first = np.unique(moved.roots[entries], return_index=True)
    inside, of_root = subtrees(tree, root)
    place = _places(tree, moved)[0]
    where, turn = 2 * number, np.zeros(len(tree), np.int64)
    where[inside] = place[outermost(moved.parent)[moved.below[entries[first]]]][of_root]
    turn[inside] = first[of_root]
    order = np.lexsort((number, turn, where))
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order))
    return found


def entries_in_order(tree: Tree, moved: Backward) -> Ints:
    """Returns the places in moved.roots of those in the tree, in the order of the plug-in's visits."""
    entries = np.flatnonzero(moved.placed[moved.below])
    if not len(entries):
        return entries
    place, level = _places(tree, moved)
    top = outermost(moved.parent)[moved.below[entries]]
    turn = np.empty(len(moved.module), np.int64)
    turn[moved.hung] = np.arange(len(moved.hung))
    return entries[np.lexsort((_turns(tree, moved)[entries], turn[top], level[top], place[top]))]


def _depth(tree: Tree) -> Ints:
    """Returns the depth of each node: the nodes that began before it minus those that ended."""
    found: Ints = np.arange(len(tree)) - np.cumsum(np.bincount(tree.stop, minlength=len(tree) + 1))[:-1]
    return found


def _numbers(tree: Tree) -> Ints:
    found: Ints = tree.stop - 1 - _depth(tree)
    return found


def _places(tree: Tree, moved: Backward) -> tuple[Ints, Ints]:
    """Returns for each inserted backward node its place between the doubled numbers of nodes, and its depth."""
    depth, number = _depth(tree), _numbers(tree)
    place, level = np.zeros(len(moved.module), np.int64), np.zeros(len(moved.module), np.int64)
    gone = moved.gone()
    for host, own in moved.by_host().items():
        children = children_left(tree, gone, host, moved.main)
        if host == NOTHING:
            before = int(np.argmax(tree.track == moved.main))
        else:
            before = int(number[host]) - (int(tree.stop[host]) - host - 1)
            level[moved.hung[own]] = depth[host] + 1
        left = np.append(2 * number[children] + 1, 2 * before - 1)
        place[moved.hung[own]] = left[moved.at[own] - 1]
    return place, level


def _turns(tree: Tree, moved: Backward) -> Ints:
    """Returns for each of moved.roots how many others below its outermost backward node come before it."""
    count, nested = len(moved.module), np.flatnonzero(moved.parent >= 0)
    depth = depths(moved.parent)
    held = np.bincount(moved.below, minlength=count)
    for deep in range(int(depth.max(initial=0)), 0, -1):
        nodes = nested[depth[nested] == deep]
        np.add.at(held, moved.parent[nodes], held[nodes])
    around = np.concatenate([moved.below, moved.parent[nested]])
    start = np.concatenate([tree.start[moved.roots], moved.start[nested]])
    end = np.concatenate([tree.end[moved.roots], moved.end[nested]])
    weight = np.concatenate([np.ones(len(moved.below), np.int64), held[nested]])
    order = np.lexsort((-end, start, around))
    before = np.cumsum(weight[order]) - weight[order]
    begins = np.concatenate([[True], around[order][1:] != around[order][:-1]])
    before -= np.maximum.accumulate(np.where(begins, before, 0))
    local = np.empty(len(order), np.int64)
    local[order] = before
    base = np.zeros(count, np.int64)
    for deep in range(1, int(depth.max(initial=0)) + 1):
        chosen = depth[nested] == deep
        base[nested[chosen]] = base[moved.parent[nested[chosen]]] + local[len(moved.below) :][chosen]
    found: Ints = base[moved.below] + local[: len(moved.below)]
    return found
