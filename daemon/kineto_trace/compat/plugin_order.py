"""The order in which the TensorBoard plug-in visits the nodes of its tree, with backward operators at their places.

Theory of operation
    The plug-in collects operators thread by thread, those inside a node before the node. The first call of an
    operator decides whether all of its calls are eligible for tensor cores, and which of two operators with equal
    times comes first.

    A node's number is its place among all nodes, those inside first: with `stop` after its last descendant and `depth`
    enclosing nodes, stop - 1 - depth. An outermost backward node comes after the node to its left, or first in the
    enclosing node; of several at one place the one that is further outside comes first. The nodes below it come in the
    order of starts, level by level.
"""

import numpy as np

from kineto_trace.base.array_types import NOTHING, Ints
from kineto_trace.compat.plugin_backward import Backward, children_left, depths, outermost, plugin_backward
from kineto_trace.compat.plugin_tree import Tree, plugin_tree, subtrees
from kineto_trace.model.context import Context


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
