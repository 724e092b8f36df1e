"""Equal stacks as one: calls have the same stack if their callers have the same stack and their names are equal."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Interner
from kineto_trace.structure.stacks.call_forests import CallForest, levels

NOTHING = -1

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stacks:
    """Distinct stacks, callers before callees.

    parent: place of the stack without its innermost frame; NOTHING: none. frame: the innermost frame, a number into
    `frames`. kind: StackKind of that frame. weight: the stack's own weight, in ns or samples. depth: number of callers.
    """

    parent: Ints
    frame: Ints
    kind: Ints
    weight: Ints
    depth: Ints
    frames: Sequence[str]

    def __len__(self) -> int:
        return len(self.parent)


def merged(forest: CallForest) -> Stacks:
    """Returns the stacks of a forest with the sums of their own values."""
    stack, parent, frame = stack_numbers(forest.parent, forest.frame, forest.depth)
    kind, weight, depth = (np.zeros(len(parent), np.int64) for _ in range(3))
    kind[stack], depth[stack] = forest.kind, forest.depth
    np.add.at(weight, stack, forest.own)
    return Stacks(parent, frame, kind, weight, depth, forest.frames)


def stack_numbers(parent: Ints, frame: Ints, depth: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns the stack of each node of a forest, and for each stack the stack of its caller and its frame."""
    known, stack = Interner(), np.empty(len(parent), np.int64)
    for at in levels(depth):
        above = np.where(parent[at] >= 0, stack[parent[at]], NOTHING)
        stack[at] = known.intern((above + 1).astype(np.uint64) << np.uint64(32) | frame[at].astype(np.uint64))
    keys = known.keys()
    return stack, (keys >> np.uint64(32)).astype(np.int64) - 1, (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
