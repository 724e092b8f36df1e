"""Flame graphs: merged stacks, folded to what can be drawn, in order of time, and by function.

A tree is reduced to what fits on a page: frames that would be narrower than a pixel become one frame, "(others)".

Theory of operation
    A frame is kept if it is wide enough and not too deep; if there are too many, the widest are kept. Its caller is
    wider, so it is kept too. Adjacent siblings that are not kept become one frame with the sum of their values and
    their number, so that nothing is lost and all sums stay exact.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Ints, UInts64
from kineto_trace.structure.call_forests import CallForest, StackKind
from kineto_trace.structure.nesting import levels, stack_numbers
from kineto_trace.view_api.result import Result

ROOT = 0
EVERYTHING, ALL_THREADS = "all", "all threads"
Values = AnyArray  # whole numbers, or of a baseline parts of them
NS, SAMPLES = "ns", "samples"  # units
OTHERS = "(others)"
PIXELS = 1200
MAX_DEPTH = 120  # levels below the root
MAX_FRAMES = 1_500  # kept ones; each has at most one "(others)" inside and one after it
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, with bits all over: 2**64 divided by the golden ratio
_SHIFT = np.uint64(29)
Keys = UInts64
NS_PER_US = 1000
_OF_FUNCTION = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameTree:
    """One value per frame. The first one is the root, which stands for everything.

    parent: NOTHING for the root.
    depth: 0 for the root.
    frame: number into `frames`.
    kind: StackKind.
    own, total: ns or samples.
    base_own, base_total: of the baseline, scaled to the same number of steps or seconds; None without one.
    order: among siblings, lowest first.
    start: ns from the root's start; None if siblings are placed side by side.
    merged: whether equal stacks are one frame.
    """

    parent: Ints
    depth: Ints
    frame: Ints
    kind: Ints
    own: Ints
    total: Ints
    base_own: Values | None
    base_total: Values | None
    order: Ints
    start: Ints | None
    merged: bool
    frames: Sequence[str]

    def __len__(self) -> int:
        return len(self.parent)

    def name(self, place: int) -> str:
        """Returns the name of a frame."""
        return self.frames[int(self.frame[place])]


class FlameKind(StrEnum):
    """What a frame is; determines its colour."""

    ALL = "all"  # the outermost frame: everything
    THREAD = "thread"
    FUNCTION = "function"  # or a line of it
    ANNOTATION = "annotation"
    OPERATOR = "operator"
    GPU = "gpu"  # a kernel, copy or fill
    WAITING = "waiting"  # for the GIL
    IDLE = "idle"
    MODULE = "module"
    OTHERS = "others"  # frames too narrow to be drawn, as one


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameNode:
    """A frame and what it called. Values are whole ns or samples: `total` is `own` and the children's totals, exactly.

    key: identifies the frame in addresses; equal stacks have equal keys.
    start, width: where it is drawn, in the same unit from the beginning of the graph; width is the total, except for
        OTHERS in order of time, which spans the frames it represents.
    frames: how many it represents.
    base_total, base_own: of the baseline, scaled to the same number of steps or seconds; None without one.
    """

    name: str
    kind: FlameKind
    key: str
    start: int
    width: int
    total: int
    own: int
    frames: int = 1
    base_total: float | None = None
    base_own: float | None = None
    children: tuple["FlameNode", ...] = ()


class _Group(NamedTuple):
    """One kept frame, or adjacent frames that are not kept: their places, and how many frames they represent."""

    first: int
    last: int
    kept: bool
    offset: int  # of the first one, from its parent's start
    total: int
    frames: int
    base: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTotals:
    """One value per name.

    total: recursive calls count once.
    kind: StackKind.
    stacks: how many end in it.
    The others are as in FlameTree.
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


def totals(parent: Ints, depth: Ints, own: Values) -> Values:
    """Returns for each node the sum over it and all nodes below it."""
    found = own.copy()
    for at in reversed(list(levels(depth))):
        below = at[parent[at] >= 0]
        np.add.at(found, parent[below], found[below])
    return found


def merged_tree(forests: Sequence[CallForest], base: Sequence[CallForest] = (), scale: float = 1.0) -> FlameTree:
    """Returns equal stacks of all forests as one, those with the largest totals first.

    base: of the baseline, whose values are multiplied by `scale`.

    With several forests, all threads become one.
    """
    parts = [*forests, *base]
    calls = join_forests(parts) if len(parts) > 1 else parts[0]
    own = np.where(calls.kind == StackKind.THREAD, 0, calls.own)
    if not base:
        return stack_tree(calls, own)
    ours = np.repeat(np.arange(len(parts)) < len(forests), [len(part) for part in parts])
    return stack_tree(calls, np.where(ours, own, 0), np.where(ours, 0, own) * scale)


def join_forests(forests: Sequence[CallForest]) -> CallForest:
    """Returns the calls of several traces as one forest, in which all threads have the same name."""
    frames: dict[str, int] = {}
    parts = []
    first = 0
    for calls in forests:
        used, number = np.unique(calls.frame, return_inverse=True)
        threads = set(calls.frame[(calls.kind == StackKind.THREAD) & (calls.thread != NOTHING)].tolist())
        texts = [ALL_THREADS if each in threads else calls.frames[each] for each in used.tolist()]
        numbers = np.array([frames.setdefault(text, len(frames)) for text in texts], np.int64)
        parent = np.where(calls.parent >= 0, calls.parent + first, NOTHING)
        parts.append(replace(calls, frame=numbers[number.reshape(-1)], parent=parent))
        first += len(calls)
    names = ("parent", "frame", "kind", "own", "thread", "start", "end", "depth")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return CallForest(**columns, frames=list(frames))


def merge_equal_stacks(calls: CallForest) -> CallForest:
    """Merges equal stacks into one call each: all that merging traces needs, in little memory."""
    stack, parent, frame = stack_numbers(calls.parent, calls.frame, calls.depth)
    kind, depth, thread = (np.full(len(parent), NOTHING) for _ in range(3))
    kind[stack], depth[stack], thread[stack] = calls.kind, calls.depth, calls.thread
    own = _summed(stack, calls.own, len(parent))
    nothing = np.zeros(len(parent), np.int64)
    return CallForest(parent, frame, kind, own, thread, nothing, nothing, depth, calls.frames)


def stack_tree(calls: CallForest, own: Ints, base_own: Values | None = None) -> FlameTree:
    """Merges equal stacks of these calls. own, base_own: the values of each call."""
    stack, parent, frame = stack_numbers(calls.parent, calls.frame, calls.depth)
    kind, depth = np.zeros(len(parent), np.int64), np.zeros(len(parent), np.int64)
    kind[stack], depth[stack] = calls.kind, calls.depth
    sums = [_summed(stack, each, len(parent)) for each in (own, base_own) if each is not None]
    return rooted(parent, depth, frame, kind, sums, calls.frames)


def rooted(
    parent: Ints, depth: Ints, frame: Ints, kind: Ints, owns: Sequence[Values], frames: Sequence[str]
) -> FlameTree:
    """Returns these stacks below a root, those with the largest totals first. owns: own values, and the baseline's."""
    parent, depth = np.append(NOTHING, parent + 1), np.append(0, depth + 1)
    own, *base = (np.append(np.zeros(1, each.dtype), each) for each in owns)
    total = totals(parent, depth, own)
    return FlameTree(
        parent=parent,
        depth=depth,
        frame=np.append(len(frames), frame),
        kind=np.append(StackKind.THREAD, kind),
        own=own,
        total=total,
        base_own=base[0] if base else None,
        base_total=totals(parent, depth, base[0]) if base else None,
        order=-total,
        start=None,
        merged=True,
        frames=[*frames, EVERYTHING],
    )


def timed_tree(calls: CallForest, start: int | None) -> FlameTree:
    """Returns every call by itself, in the order in which they began.

    start: the moment (Unix ns) relative to which they are placed by time; None if they are placed side by side.
    """
    tree = rooted(calls.parent, calls.depth, calls.frame, calls.kind, [calls.own], calls.frames)
    begin = np.append(0, calls.start)
    placed = None if start is None else np.append(0, calls.start - start)
    return replace(tree, order=begin, start=placed, merged=False)


def _summed(number: Ints, values: Values, count: int) -> Values:
    found = np.zeros(count, values.dtype)
    np.add.at(found, number, values)
    return found


def keys(tree: FlameTree) -> Keys:
    """Returns a number for each frame that equal stacks share; in order of time it depends on the start too."""
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


def _below(tree: FlameTree, root: int) -> Flags:
    if root == ROOT:
        return np.ones(len(tree), np.bool_)
    found = np.zeros(len(tree), np.bool_)
    found[root] = True
    for at in list(levels(tree.depth))[int(tree.depth[root]) + 1 :]:
        found[at] = found[tree.parent[at]]
    return found


def _kept(tree: FlameTree, inside: Flags, root: int) -> Flags:
    kept: Flags = inside & (tree.total * PIXELS >= tree.total[root]) & (tree.total > 0)
    kept &= tree.depth <= tree.depth[root] + MAX_DEPTH
    if int(kept.sum()) > MAX_FRAMES:
        widths = tree.total[kept]
        kept &= tree.total > np.partition(widths, len(widths) - MAX_FRAMES - 1)[len(widths) - MAX_FRAMES - 1]
    kept[root] = True
    return kept


def _groups(tree: FlameTree, members: Ints, kept: Flags, size: Ints) -> dict[int, list[_Group]]:
    """Returns for each kept frame its parts, from left to right. members: sorted by parent and order."""
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
    """Builds the nodes, callees before their callers."""
    starts = {root: 0 if tree.start is None else int(tree.start[root])}
    order = [root]
    for place in order:
        for each in groups.get(place, ()):
            if each.kept:
                starts[each.first] = _start(tree, each, starts[place])
                order.append(each.first)
    made: dict[int, FlameNode] = {}
    for place in reversed(order):
        children = tuple(
            made.pop(each.first) if each.kept else _others(tree, each, starts[place]) for each in groups.get(place, ())
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


def flame_of_rows(result: Result) -> tuple[FlameNode, str] | None:
    """Returns the merged stacks of all ranks below one root, and their unit; None without rows.

    A frame that is never innermost in a row has the kind of what it called.
    """
    rows = result.rows()
    unit = NS if any(row["self_us"] is not None for row in rows) else SAMPLES
    several = len({row["rank"] for row in rows}) > 1
    parent, depth, frame, kind, own = (list[int]() for _ in range(5))
    frames: dict[str, int] = {}
    places: dict[tuple[int, str], int] = {}
    for row in rows:
        place = NOTHING
        for level, name in enumerate(_stack(row, several)):
            found = places.get((place, name))
            if found is None:
                found = places[place, name] = len(parent)
                parent.append(place)
                depth.append(level)
                frame.append(frames.setdefault(name, len(frames)))
                kind.append(_kind(row) if level else StackKind.THREAD)
                own.append(0)
            place = found
        if place != NOTHING:
            own[place] += _amount(row, unit)
            kind[place] = _kind(row)
    if not parent:
        return None
    tree = rooted(_whole(parent), _whole(depth), _whole(frame), _whole(kind), [_whole(own)], list(frames))
    return folded(tree, keys(tree)), unit


def _whole(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def _stack(row: Mapping[str, Any], several: bool) -> Sequence[str]:
    """Returns the frames from outside in; with several ranks, all threads become one."""
    stack: list[str] = row["stack"]
    return [ALL_THREADS, *stack[1:]] if several and len(stack) > 1 else stack


def _kind(row: Mapping[str, Any]) -> StackKind:
    return StackKind[row["kind"].upper()] if row["kind"] else StackKind.THREAD


def _amount(row: Mapping[str, Any], unit: str) -> int:
    if unit == NS:
        return round((row["self_us"] or 0.0) * NS_PER_US)
    return int(row["samples"] or 0)


def function_totals(tree: FlameTree) -> FunctionTotals:
    """Returns the totals of all names, the largest own total first."""
    places = np.flatnonzero(tree.kind != StackKind.THREAD)
    groups = group([tree.frame[places]])
    outer = ~_nested(tree)[places]
    count = len(groups)
    own, total = (
        _summed(groups.number, tree.own[places], count),
        _summed(groups.number, tree.total[places] * outer, count),
    )
    base_own = base_total = None
    if tree.base_own is not None and tree.base_total is not None:
        base_own = _summed(groups.number, tree.base_own[places], count)
        base_total = _summed(groups.number, tree.base_total[places] * outer, count)
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
    """Returns who called a function, with its totals: callers, below them their callers, and so on; threads last."""
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
    owns = [_summed(ends, each[begins], len(keys)) for each in values]
    parent = (keys >> _OF_FUNCTION).astype(np.int64) - 1
    return rooted(parent, np.concatenate([np.empty(0, np.int64), *depths]), frame, kind[frame], owns, tree.frames)


def _outermost(tree: FlameTree, name: str) -> Ints:
    """Returns the places of a function that are not nested in itself."""
    numbers = [number for number, text in enumerate(tree.frames) if text == name]
    return np.flatnonzero(np.isin(tree.frame, numbers) & (tree.kind != StackKind.THREAD) & ~_nested(tree))


def _nested(tree: FlameTree) -> Flags:
    """Returns for each node whether an outer one has the same frame."""
    first, stop = _preorder(tree)
    order = np.lexsort((first, tree.frame))
    part = np.cumsum(np.append(0, np.diff(tree.frame[order]) != 0)) * (len(tree) + 1)  # consecutive frames
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
