"""Which forward op a backward op belongs to (the fwdbwd flows), and so what each op is in the training.

Theory of operation
    Autograd numbers its graph nodes per thread. Every op shows the number that the next node of its thread will
    get, so that several ops have the same one: the op that makes the node is the last of them to begin. A backward
    op has the number of its node and torch's number of the thread that made the node.

    The rule is that of PyTorch's own links. Ops are visited in the order of their ends. A forward op replaces the
    one remembered for its thread and number if it did not start before it. A backward op is linked to the
    remembered one, which is then forgotten, so that every number gives one link, unless it is used again by later
    forward ops. (The op "autograd::engine::evaluate_function: X" around a backward op ends after it and finds
    nothing any more.)

    As array work: with the ops sorted by thread, number and end, every backward op ends a segment; its forward op
    is the last to start in its segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import in_subtrees
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_SEQUENCE, Table
from kineto_trace.structure.activity_links import ops

FUNCTION, BACKWARD_FUNCTION = 0, 1  # at::RecordScope
EVALUATE_FUNCTION = "autograd::engine::evaluate_function: "

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class ForwardBackward(NamedTuple):
    """Rows of cpu_op: forward_rows[n] made the node that backward_rows[n] ran; in the order in which those ended."""

    forward_rows: Ints
    backward_rows: Ints


def forward_backward(tables: Mapping[str, Table]) -> ForwardBackward:
    """The pairs of a trace. Ops without a sequence number, or of threads whose number is unknown, have none."""
    ops = tables.get("cpu_op")
    if ops is None or not (ops["forward_thread"] > 0).any():
        return ForwardBackward(np.empty(0, np.int64), np.empty(0, np.int64))
    backward = ops["forward_thread"] > 0
    thread = np.where(backward, ops["forward_thread"], ops["torch_thread"])
    usable = (ops["sequence"] >= 0) & (thread > 0) & (backward | (ops["scope"] != BACKWARD_FUNCTION))
    rows = np.flatnonzero(usable)
    thread, sequence, start, end = (column[rows] for column in (thread, ops["sequence"], ops["start"], ops.end()))
    order = np.lexsort((end, sequence, thread))
    rows, thread, sequence, start = (column[order] for column in (rows, thread, sequence, start))
    closes = backward[rows]
    opens = np.ones(len(rows), np.bool_)
    opens[1:] = (thread[1:] != thread[:-1]) | (sequence[1:] != sequence[:-1]) | closes[:-1]
    segment = np.cumsum(opens) - 1
    return _pairs(rows, start, end[order], segment, closes)


def _pairs(rows: Ints, start: Ints, end: Ints, segment: Ints, closes: npt.NDArray[np.bool_]) -> ForwardBackward:
    """Each closing op with the op of its segment that started last (of equal starts: that ended last)."""
    forward = np.flatnonzero(~closes)
    forward = forward[np.lexsort((start[forward], segment[forward]))]  # stable: the order of ends remains
    last = np.ones(len(forward), np.bool_)
    last[:-1] = segment[forward][1:] != segment[forward][:-1]
    chosen = np.full(int(segment[-1]) + 1 if len(segment) else 0, -1, np.int64)
    chosen[segment[forward[last]]] = forward[last]
    closing = np.flatnonzero(closes)
    closing = closing[chosen[segment[closing]] >= 0]
    closing = closing[np.lexsort((rows[closing], end[closing]))]
    return ForwardBackward(rows[chosen[segment[closing]]], rows[closing])


def with_evaluated_sequences(ops: Table, strings: Sequence[str]) -> Table:
    """cpu_op with the numbers of backward ops copied to the "evaluate_function" ops that begin right before them.

    PyTorch does this before it writes a trace; an observer of the ops sees no numbers on them.
    """
    evaluate = np.array([text.startswith(EVALUATE_FUNCTION) for text in strings], np.bool_)
    if not len(ops) or not evaluate.any():
        return ops
    order = np.lexsort((ops["start"], ops["thread"]))
    first, second = order[:-1], order[1:]
    follows = (ops["thread"][first] == ops["thread"][second]) & (ops["scope"][second] == BACKWARD_FUNCTION)
    follows &= (
        (ops["scope"][first] == FUNCTION) & evaluate[ops["name"][first]] & (ops["sequence"][first] == NO_SEQUENCE)
    )
    target, source = first[follows], second[follows]
    columns = {name: ops[name].copy() for name in ("sequence", "forward_thread")}
    for name, column in columns.items():
        column[target] = ops[name][source]
    return ops.with_columns(columns)


@dataclass(frozen=True, slots=True)
class OpRoles:
    """Per row of cpu_op: whether its outermost operator has a backward; whether it is, or is inside, a backward."""

    linked: Flags
    backward: Flags


def op_roles(context: Context) -> OpRoles:
    """Returns the roles of all operators."""
    trace, tree = context.trace, context.get(ops)
    table = trace.table("cpu_op")
    outermost = np.cumsum(tree.nested.tree.parent < 0)[tree.place]  # a number that all inside one share
    linked = np.isin(outermost, unique_values(outermost[forward_backward(trace.tables).forward_rows]))
    evaluates = np.array([text.startswith(EVALUATE_FUNCTION) for text in trace.strings], np.bool_)
    backward = (evaluates[table["name"]] if len(table) else linked) | (table["forward_thread"] > 0)
    return OpRoles(linked, in_subtrees(backward[tree.row], tree.nested.tree.stop)[tree.place])
