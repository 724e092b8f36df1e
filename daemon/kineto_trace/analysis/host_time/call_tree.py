"""Trees of calls: a node for each function below the node that called it, and sums over what nodes have below them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.host_moments import NOTHING, ThreadSlices
from kineto_trace.arrays.row_groups import group

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CallTree:
    """name, parent, user: of each node; outer ones first. node: of each slice of thread_slices."""

    name: Ints
    parent: Ints
    user: Flags
    node: Ints

    def __len__(self) -> int:
        return len(self.name)


def levels(slices: ThreadSlices) -> Iterator[tuple[Ints, Ints]]:
    """Yields the places of the slices of each depth, outer ones first, and the places of their callers."""
    order = np.argsort(slices.depth, kind="stable")
    bounds = np.append(np.unique(slices.depth[order], return_index=True)[1], len(order))
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        at = order[first:last]
        yield at, slices.parent[at]


def call_tree(slices: ThreadSlices, name: Ints, user: Flags, opens: Flags) -> CallTree:
    """Returns the tree of these slices. The user's functions, and those that a slice that opens calls, have nodes.

    name, user, opens: of each slice. All others belong to the node of their caller.
    """
    node = np.full(len(slices) + 1, NOTHING, np.int64)  # the last one is for "no caller"
    opens = np.append(opens, True)
    names, parents, users = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
    made = 0
    for at, above in levels(slices):
        new = user[at] | opens[above]
        node[at] = node[above]
        groups = group([node[above[new]], name[at[new]]])
        node[at[new]] = groups.number + made
        first = at[new][groups.first]
        names.append(name[first])
        parents.append(node[slices.parent[first]])
        users.append(user[first])
        made += len(groups)
    return CallTree(np.concatenate(names), np.concatenate(parents), np.concatenate(users), node[:-1])


def inclusive(tree: CallTree, own: npt.NDArray[Any]) -> Floats:
    """Returns for each node the sum over it and all below it. own: a value, or a row of values, for each node."""
    total = own.astype(np.float64)
    for node in range(len(tree) - 1, -1, -1):  # inner nodes have larger numbers
        above = tree.parent[node]
        if above != NOTHING:
            total[above] += total[node]
    return total


def below(tree: CallTree, begins: Flags) -> Flags:
    """Tells for each node whether it, or one that called it, is one of these."""
    found = begins.copy()
    for node in range(len(tree)):  # outer nodes have smaller numbers
        found[node] |= tree.parent[node] != NOTHING and found[tree.parent[node]]
    return found


def heaviest_below(tree: CallTree, weight: Floats) -> Ints:
    """Returns for each node the one directly below it with most weight, of equal ones the first; NOTHING: none."""
    heaviest = np.full(len(tree) + 1, NOTHING, np.int64)  # the last one is for "no caller"
    order = np.lexsort((-np.arange(len(tree)), weight))
    heaviest[tree.parent[order]] = order
    return heaviest[:-1]
