"""Merged stacks by the function, operator or kernel that they end in, and the stacks above and below one of these."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.flame.flame_trees import ROOT, FlameTree, Ints, Values, rooted, stack_tree
from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.row_groups import group
from kineto_trace.structure.stacks.call_forests import NOTHING, CallForest, StackKind, levels

_OF_FUNCTION = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTotals:
    """One value per name. kind: StackKind. stacks: how many end in it. The others as in FlameTree.

    total: recursive calls count once.
    """

    names: list[str]
    kind: Ints
    stacks: Ints
    own: Ints
    total: Ints
    base_own: Values | None
    base_total: Values | None

    def __len__(self) -> int:
        return len(self.names)


def function_totals(tree: FlameTree) -> FunctionTotals:
    """Returns the totals of all names; the one with the most of its own comes first."""
    places = np.flatnonzero(tree.kind != StackKind.THREAD)
    groups = group([tree.frame[places]])
    outer = ~_nested(tree)[places]
    count = len(groups)
    own, total = _sum(groups.number, tree.own[places], count), _sum(groups.number, tree.total[places] * outer, count)
    base_own = base_total = None
    if tree.base_own is not None and tree.base_total is not None:
        base_own = _sum(groups.number, tree.base_own[places], count)
        base_total = _sum(groups.number, tree.base_total[places] * outer, count)
    order = np.lexsort((-total, -own)) if count else np.empty(0, np.int64)
    return FunctionTotals(
        names=[tree.frames[number] for number in tree.frame[places][groups.first[order]].tolist()],
        kind=tree.kind[places][groups.first[order]],
        stacks=groups.sizes()[order],
        own=own[order],
        total=total[order],
        base_own=None if base_own is None else base_own[order],
        base_total=None if base_total is None else base_total[order],
    )


def callees(tree: FlameTree, name: str) -> FlameTree:
    """Returns what a function called: its stacks from every caller, merged. Empty below the root if there is none."""
    begins = _outermost(tree, name)
    inside = np.zeros(len(tree), np.bool_)
    inside[begins] = True
    above = tree.parent.copy()
    above[begins] = NOTHING
    for at in list(levels(tree.depth))[1:]:
        inside[at] |= inside[tree.parent[at]]
    kept = np.flatnonzero(inside)
    place = np.full(len(tree) + 1, NOTHING)  # the last one is for "no caller"
    place[kept] = np.arange(len(kept))
    offset = np.zeros(len(tree), np.int64)
    offset[begins] = tree.depth[begins]
    for at in list(levels(tree.depth))[1:]:
        below = at[above[at] >= 0]
        offset[below] = offset[above[below]]
    nothing = np.zeros(len(kept), np.int64)
    calls = CallForest(
        parent=place[above[kept]],
        frame=tree.frame[kept],
        kind=tree.kind[kept],
        own=tree.own[kept],
        thread=nothing,
        start=nothing,
        end=nothing,
        depth=(tree.depth - offset)[kept],
        frames=list(tree.frames),
    )
    return stack_tree(calls, calls.own, None if tree.base_own is None else tree.base_own[kept])


def callers(tree: FlameTree, name: str) -> FlameTree:
    """Returns who called a function: below it its callers, below these theirs, with its totals. Threads are last."""
    begins = _outermost(tree, name)
    known = Interner()
    at = begins
    node = np.zeros(len(at), np.int64)
    ends = np.zeros(len(at), np.int64)
    depths: list[Ints] = []
    going = np.arange(len(at))
    level = 0
    while len(going):
        keys = node[going].astype(np.uint64) << _OF_FUNCTION | tree.frame[at[going]].astype(np.uint64)
        node[going] = known.intern(keys).astype(np.int64) + 1
        depths.append(np.full(len(known) - sum(map(len, depths)), level))
        ends[going] = node[going] - 1
        at = at.copy()
        at[going] = tree.parent[at[going]]
        going = going[at[going] != ROOT]
        level += 1
    keys = known.keys()
    frame = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    kind = np.zeros(int(tree.frame.max()) + 1, np.int64)
    kind[tree.frame] = tree.kind
    values = [tree.total, *([] if tree.base_total is None else [tree.base_total])]
    owns = [_sum(ends, each[begins], len(keys)) for each in values]
    parent = (keys >> _OF_FUNCTION).astype(np.int64) - 1
    return rooted(parent, np.concatenate([np.empty(0, np.int64), *depths]), frame, kind[frame], owns, tree.frames)


def _outermost(tree: FlameTree, name: str) -> Ints:
    """Returns the places of a function that are not inside it."""
    numbers = [number for number, text in enumerate(tree.frames) if text == name]
    return np.flatnonzero(np.isin(tree.frame, numbers) & (tree.kind != StackKind.THREAD) & ~_nested(tree))


def _nested(tree: FlameTree) -> npt.NDArray[np.bool_]:
    """Tells for each node whether one around it has the same frame."""
    first, stop = _preorder(tree)
    order = np.lexsort((first, tree.frame))
    part = np.cumsum(np.append(0, np.diff(tree.frame[order]) != 0)) * (len(tree) + 1)  # frames one behind the other
    reach = np.maximum.accumulate(stop[order] + part)
    found = np.zeros(len(tree), np.bool_)
    found[order[1:]] = (first[order] + part)[1:] < reach[:-1]
    return found


def _preorder(tree: FlameTree) -> tuple[Ints, Ints]:
    """Returns the place of each node in preorder, and the place after the last node below it."""
    size = np.ones(len(tree), np.int64)
    rows = list(levels(tree.depth))
    for at in reversed(rows[1:]):
        np.add.at(size, tree.parent[at], size[at])
    first = np.zeros(len(tree), np.int64)
    for at in rows[1:]:
        siblings = at[np.argsort(tree.parent[at], kind="stable")]
        above = tree.parent[siblings]
        before = np.cumsum(size[siblings]) - size[siblings]
        begins = np.flatnonzero(np.append(True, above[1:] != above[:-1]))
        base = np.repeat(before[begins], np.diff(np.append(begins, len(siblings))))
        first[siblings] = first[above] + 1 + before - base
    return first, first + size


def _sum(number: Ints, values: Values, count: int) -> Values:
    found = np.zeros(count, values.dtype)
    np.add.at(found, number, values)
    return found
