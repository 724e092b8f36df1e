"""Why the kernels of one rank take longer than those of the others: more of them, larger ones, or slower ones.

Theory of operation
    Kernels are those of the operators that launched them in measured steps, per step: their calls, their time and their
    blocks. A rank is compared with the median of the others. If the operator with most of the additional time is called
    more often, the rank has other work. If it is called as often, but kernels have larger grids, the rank has more
    data. (Kernels of some matrix products have one grid for all sizes, so those whose grid grew decide.) If neither
    is so, equal work takes longer: the GPU is slower, or shares something with others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, NOTHING, calls, gpu
from kineto_trace.structure.steps.step_pace import paced_steps

MORE_CALLS = 1.05  # times as many
MORE_BLOCKS = 1.03  # times as many in one call
LEAST_SHARE = 0.01  # of the kernels' time: operators with less are not looked at
NO_OPERATOR = "no operator"
_GRID = ("grid_x", "grid_y", "grid_z")


class OpKernels(NamedTuple):
    """The kernels of one operator in a mean step."""

    calls: float
    ns: float
    blocks: float


@dataclass(frozen=True, slots=True)
class RankKernels:
    """The kernels of a rank by the names of their operators, without collectives."""

    of: Mapping[str, OpKernels]

    def get(self, op: str) -> OpKernels:
        """Returns those of one operator; zeros if it has none."""
        return self.of.get(op, OpKernels(0.0, 0.0, 0.0))


def rank_kernels(context: Context) -> RankKernels:
    """Returns what one rank contributes; empty without whole steps or kernels."""
    activity, called, steps = context.get(gpu), context.get(calls), context.get(paced_steps)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication)
    call = activity.call[rows]
    launch = activity.start[rows].copy()
    launch[call >= 0] = called.start[call[call >= 0]]
    rows = rows[steps.number_at(launch) != NOTHING]
    if not len(rows):
        return RankKernels({})
    table = context.trace.table("kernel")
    blocks = np.prod([table[name][activity.row[rows]].astype(np.float64) for name in _GRID], axis=0)
    op = activity.op[rows]
    names = np.where(op >= 0, np.append(context.trace.table("cpu_op")["name"].astype(np.int64), NOTHING)[op], NOTHING)
    distinct, number = np.unique(names, return_inverse=True)
    sums = [
        np.bincount(number, weights) / len(steps)
        for weights in (np.ones(len(rows)), activity.end[rows] - activity.start[rows], blocks)
    ]
    texts = [context.trace.strings[name] if name != NOTHING else NO_OPERATOR for name in distinct.tolist()]
    return RankKernels({text: OpKernels(*map(float, each)) for text, each in zip(texts, zip(*sums), strict=True)})


def slower_kernels(own: RankKernels, others: Sequence[RankKernels]) -> str | None:
    """Returns what makes the kernels of a rank take longer than those of the others; None if nothing does."""
    known = [other for other in others if other.of]
    if not own.of or not known:
        return None
    middle = {
        op: OpKernels(*(median(values) for values in zip(*(other.get(op) for other in known), strict=True)))
        for op in own.of
    }
    total = sum(each.ns for each in middle.values())
    longer = {op: own.get(op).ns - each.ns for op, each in middle.items()}
    if not total or sum(longer.values()) < LEAST_SHARE * total:
        return None
    most = max(longer, key=lambda op: longer[op])
    mine, theirs = own.get(most), middle[most]
    if mine.calls > MORE_CALLS * theirs.calls:
        return f"{mine.calls:.3g} kernels of {most} a step, the others {theirs.calls:.3g}"
    grown = {
        op: own.get(op).blocks / own.get(op).calls / (each.blocks / each.calls)
        for op, each in middle.items()
        if each.blocks > 0 and each.ns > LEAST_SHARE * total
    }
    grown = {op: ratio for op, ratio in grown.items() if ratio > MORE_BLOCKS}
    if grown:
        ratio = sum(grown[op] * middle[op].ns for op in grown) / sum(middle[op].ns for op in grown)
        return f"its kernels work on {ratio:.2f} times as much data"
    known_grids = any(each.blocks > 0 for each in middle.values())
    return f"its kernels take {1 + sum(longer.values()) / total:.2f} times as long" + " with equal grids" * known_grids
