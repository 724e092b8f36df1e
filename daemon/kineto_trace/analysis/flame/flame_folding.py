"""As much of a tree as fits on a page: frames that would be narrower than a pixel are one frame, "(others)".

Theory of operation
    A frame is kept if it is wide enough and not too deep; of too many, the widest are. Its caller is wider, so it is
    kept too. Siblings that are not kept and lie side by side become one frame, which has the sum of their values and
    the number of the frames that it stands for, so that nothing is lost and all sums stay exact.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.flame.flame_nodes import FlameKind, FlameNode
from kineto_trace.analysis.flame.flame_trees import ROOT, FlameTree, Ints, totals
from kineto_trace.structure.stacks.call_forests import StackKind, levels

OTHERS = "(others)"
PIXELS = 1200
MAX_DEPTH = 120  # levels below the root
MAX_FRAMES = 1_500  # kept ones; each has at most one "(others)" inside and one behind it
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, with bits all over: 2**64 divided by the golden ratio
_SHIFT = np.uint64(29)

Keys = npt.NDArray[np.uint64]


def keys(tree: FlameTree) -> Keys:
    """Returns a number for each frame that equal stacks share; in order of time also the start counts."""
    used, number = np.unique(tree.frame, return_inverse=True)
    names = np.array([_hash(tree.frames[each]) for each in used.tolist()], np.uint64)[number.reshape(-1)]
    if not tree.merged:
        names ^= tree.order.astype(np.uint64) * _MIX
    found = names.copy()
    for at in list(levels(tree.depth))[1:]:
        mixed = (found[tree.parent[at]] * _MIX) ^ names[at]
        found[at] = (mixed ^ (mixed >> _SHIFT)) * _MIX
    return found


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def find(found: Keys, key: str) -> int:
    """Returns the frame with this key; the root if there is none."""
    try:
        places = np.flatnonzero(found == np.uint64(int(key, 16)))
    except (ValueError, OverflowError):
        return ROOT
    return int(places[0]) if len(places) else ROOT


def folded(tree: FlameTree, found: Keys, root: int = ROOT) -> FlameNode:
    """Returns a frame with what it called. found: the keys of the tree."""
    inside = _below(tree, root)
    kept = _kept(tree, inside, root)
    there = tree.total > 0 if tree.base_total is None else (tree.total > 0) | (tree.base_total > 0)
    size = totals(tree.parent, tree.depth, (there & inside).astype(np.int64))
    members = np.flatnonzero(inside & there)
    members = members[members != root]
    members = members[kept[tree.parent[members]]]
    members = members[np.lexsort((tree.order[members], tree.parent[members]))]
    return _built(tree, found, root, _groups(tree, members, kept, size))


class _Group(NamedTuple):
    """One kept frame, or neighbours that are not: their places, and how many frames they stand for."""

    first: int
    last: int
    kept: bool
    offset: int  # of the first one, from its parent's start
    total: int
    frames: int
    base: float | None


def _below(tree: FlameTree, root: int) -> npt.NDArray[np.bool_]:
    if root == ROOT:
        return np.ones(len(tree), np.bool_)
    found = np.zeros(len(tree), np.bool_)
    found[root] = True
    for at in list(levels(tree.depth))[int(tree.depth[root]) + 1 :]:
        found[at] = found[tree.parent[at]]
    return found


def _kept(tree: FlameTree, inside: npt.NDArray[np.bool_], root: int) -> npt.NDArray[np.bool_]:
    kept: npt.NDArray[np.bool_] = inside & (tree.total * PIXELS >= tree.total[root]) & (tree.total > 0)
    kept &= tree.depth <= tree.depth[root] + MAX_DEPTH
    if int(kept.sum()) > MAX_FRAMES:
        widths = tree.total[kept]
        kept &= tree.total > np.partition(widths, len(widths) - MAX_FRAMES - 1)[len(widths) - MAX_FRAMES - 1]
    kept[root] = True
    return kept


def _groups(tree: FlameTree, members: Ints, kept: npt.NDArray[np.bool_], size: Ints) -> dict[int, list[_Group]]:
    """Returns for each kept frame what lies inside it, from left to right. members: sorted by parent and order."""
    groups: dict[int, list[_Group]] = {}
    if not len(members):
        return groups
    parent, own = tree.parent[members], kept[members]
    opens = np.append(True, (parent[1:] != parent[:-1]) | own[1:] | own[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(members)) - 1
    total, frames = np.add.reduceat(tree.total[members], first), np.add.reduceat(size[members], first)
    base = [None] * len(first) if tree.base_total is None else np.add.reduceat(tree.base_total[members], first).tolist()
    before = np.cumsum(tree.total[members]) - tree.total[members]
    begins = np.flatnonzero(np.append(True, parent[1:] != parent[:-1]))
    offset = before - before[begins][np.searchsorted(begins, np.arange(len(members)), side="right") - 1]
    for number, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        groups.setdefault(int(parent[begin]), []).append(
            _Group(
                first=int(members[begin]),
                last=int(members[end]),
                kept=bool(own[begin]),
                offset=int(offset[begin]),
                total=int(total[number]),
                frames=int(frames[number]),
                base=base[number],
            )
        )
    return groups


def _built(tree: FlameTree, found: Keys, root: int, groups: dict[int, list[_Group]]) -> FlameNode:
    """Makes the nodes, callees before their callers."""
    starts = {root: 0 if tree.start is None else int(tree.start[root])}
    order = [root]
    for place in order:
        for group in groups.get(place, ()):
            if group.kept:
                starts[group.first] = _start(tree, group, starts[place])
                order.append(group.first)
    made: dict[int, FlameNode] = {}
    for place in reversed(order):
        children = tuple(
            made.pop(group.first) if group.kept else _others(tree, group, starts[place])
            for group in groups.get(place, ())
        )
        total = int(tree.total[place])
        made[place] = FlameNode(
            name=tree.name(place),
            kind=FlameKind.ALL if place == ROOT else FlameKind[StackKind(int(tree.kind[place])).name],
            key=f"{int(found[place]):x}",
            start=starts[place],
            width=total,
            total=total,
            own=int(tree.own[place]),
            base_total=None if tree.base_total is None else float(tree.base_total[place]),
            base_own=None if tree.base_own is None else float(tree.base_own[place]),
            children=children,
        )
    return made[root]


def _start(tree: FlameTree, group: _Group, above: int) -> int:
    return above + group.offset if tree.start is None else int(tree.start[group.first])


def _others(tree: FlameTree, group: _Group, above: int) -> FlameNode:
    start = _start(tree, group, above)
    end = start + group.total
    if tree.start is not None:
        end = int(tree.start[group.last] + tree.total[group.last])
    return FlameNode(
        name=OTHERS,
        kind=FlameKind.OTHERS,
        key="",
        start=start,
        width=end - start,
        total=group.total,
        own=group.total,
        frames=group.frames,
        base_total=group.base,
        base_own=group.base,
    )
