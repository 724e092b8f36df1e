"""Frames below one root with their totals: merged stacks of one or several traces, or calls in their order of time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.structure.stacks.call_forests import NOTHING, CallForest, StackKind, levels
from kineto_trace.structure.stacks.merged_stacks import stack_numbers

ROOT = 0
EVERYTHING, ALL_THREADS = "all", "all threads"

Ints = npt.NDArray[np.int64]
Values = npt.NDArray[Any]  # whole numbers, or of a baseline parts of them


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameTree:
    """One value per frame. The first one is the root, which stands for everything.

    parent: NOTHING for the root. depth: 0 for the root. frame: number into `frames`. kind: StackKind. own, total: ns or
    samples. base_own, base_total: of the baseline, scaled to as many steps or seconds; None without one. order: of
    siblings, the lowest first. start: ns from the root's start; None: siblings lie side by side. merged: whether equal
    stacks are one frame.
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


def totals(parent: Ints, depth: Ints, own: Values) -> Values:
    """Returns for each node the sum over it and all below it."""
    found = own.copy()
    for at in reversed(list(levels(depth))):
        below = at[parent[at] >= 0]
        np.add.at(found, parent[below], found[below])
    return found


def merged_tree(forests: Sequence[CallForest], base: Sequence[CallForest] = (), scale: float = 1.0) -> FlameTree:
    """Returns equal stacks of all forests as one, those with the largest totals first.

    base: of the baseline, whose values count `scale` times. Of several forests, the threads are one.
    """
    parts = [*forests, *base]
    calls = joined(parts) if len(parts) > 1 else parts[0]
    own = np.where(calls.kind == StackKind.THREAD, 0, calls.own)
    if not base:
        return stack_tree(calls, own)
    ours = np.repeat(np.arange(len(parts)) < len(forests), [len(part) for part in parts])
    return stack_tree(calls, np.where(ours, own, 0), np.where(ours, 0, own) * scale)


def joined(forests: Sequence[CallForest]) -> CallForest:
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


def compact(calls: CallForest) -> CallForest:
    """Returns equal stacks as one call each: all that merging needs of a trace, in little memory."""
    stack, parent, frame = stack_numbers(calls.parent, calls.frame, calls.depth)
    kind, depth, thread = (np.full(len(parent), NOTHING) for _ in range(3))
    kind[stack], depth[stack], thread[stack] = calls.kind, calls.depth, calls.thread
    own = _summed(stack, calls.own, len(parent))
    nothing = np.zeros(len(parent), np.int64)
    return CallForest(parent, frame, kind, own, thread, nothing, nothing, depth, calls.frames)


def stack_tree(calls: CallForest, own: Ints, base_own: Values | None = None) -> FlameTree:
    """Returns equal stacks of these calls as one. own, base_own: the values of each call."""
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

    start: the moment (Unix ns) from which on they are placed by their times; None: they lie side by side.
    """
    tree = rooted(calls.parent, calls.depth, calls.frame, calls.kind, [calls.own], calls.frames)
    begin = np.append(0, calls.start)
    placed = None if start is None else np.append(0, calls.start - start)
    return replace(tree, order=begin, start=placed, merged=False)


def _summed(number: Ints, values: Values, count: int) -> Values:
    found = np.zeros(count, values.dtype)
    np.add.at(found, number, values)
    return found
