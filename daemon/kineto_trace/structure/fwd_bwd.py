"""Matches backward operators to forward operators, and finds the training thread.

Theory of operation
    Autograd numbers its graph nodes per thread. Every op shows the number that the next node of its thread will get, so
    several ops have the same one: the op that makes the node is the last of them to begin. A backward op has the number
    of its node and torch's number of the thread that made the node.

    The rule is that of PyTorch's own links. Ops are visited in the order of their ends. A forward op replaces the one
    remembered for its thread and number if it did not start before it. A backward op is linked to the remembered one,
    which is then forgotten, so that every number gives one link, unless later forward ops reuse it. (The op
    "autograd::engine::evaluate_function: X" around a backward op ends after it and finds no forward op any more.)

    As array work: with the ops sorted by thread, number and end, every backward op ends a segment; its forward op is
        the last to start in its segment.

The rule for the training thread, shared by all analyses of the host:
    The thread with most steps trains; completely recorded steps take precedence. In a trace without steps, it is the
    thread with most time in operators, without those that autograd runs backward on threads of its own. Without
    operators it is the thread that launches most GPU work, otherwise the one on which Python was busy longest (in
    samples that were not idle, or in recorded calls).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import in_subtrees, sums
from kineto_trace.base.array_types import Flags, Ints, UInts32
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_SEQUENCE, Table
from kineto_trace.structure.activity_links import calls, gpu, ops, steps, whole_steps
from kineto_trace.structure.python_frames import python_tree

FUNCTION, BACKWARD_FUNCTION = 0, 1  # at::RecordScope
EVALUATE_FUNCTION = "autograd::engine::evaluate_function: "
NO_THREAD = 0
Weighted = tuple[UInts32, Ints]  # threads, any number of times, and what counts for each


class ForwardBackward(NamedTuple):
    """Rows of cpu_op: forward_rows[n] made the node that backward_rows[n] ran; in order of the backward's ends."""

    forward_rows: Ints
    backward_rows: Ints


@dataclass(frozen=True, slots=True)
class OpRoles:
    """Per row of cpu_op: whether its outermost operator has a backward; whether it is, or is inside, a backward."""

    linked: Flags
    backward: Flags


def forward_backward(tables: Mapping[str, Table]) -> ForwardBackward:
    """Returns the pairs of a trace. Ops without a sequence number, or of threads with an unknown number, have none."""
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


def _pairs(rows: Ints, start: Ints, end: Ints, segment: Ints, closes: Flags) -> ForwardBackward:
    """Returns each closing op with the op of its segment that started last (of equal starts: that ended last)."""
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
    """Returns cpu_op with the numbers of backward ops copied to the "evaluate_function" ops right before them.

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


def op_roles(context: Context) -> OpRoles:
    """Returns the roles of all operators."""
    trace, tree = context.trace, context.get(ops)
    table = trace.table("cpu_op")
    outermost = np.cumsum(tree.nested.tree.parent < 0)[tree.place]  # a number that all nested operators share
    linked = np.isin(outermost, unique_values(outermost[forward_backward(trace.tables).forward_rows]))
    evaluates = np.array([text.startswith(EVALUATE_FUNCTION) for text in trace.strings], np.bool_)
    backward = (evaluates[table["name"]] if len(table) else linked) | (table["forward_thread"] > 0)
    return OpRoles(linked, in_subtrees(backward[tree.row], tree.nested.tree.stop)[tree.place])


def training_thread(context: Context) -> int:
    """Returns the training thread; NO_THREAD if no row of the trace has a thread."""
    for rule in _RULES:
        thread, weight = rule(context)
        if weight.any():
            threads, place = np.unique(thread, return_inverse=True)
            return int(threads[np.argmax(sums(place.reshape(-1), weight, len(threads)))])
    return NO_THREAD


def _of_steps(context: Context) -> Weighted:
    found = context.get(whole_steps)
    found = found if len(found) else context.get(steps)
    return found.thread, np.ones(len(found), np.int64)


def _of_operators(context: Context) -> Weighted:
    table, tree = context.trace.table("cpu_op"), context.get(ops)
    evaluates = np.array([text.startswith(EVALUATE_FUNCTION) for text in context.trace.strings], np.bool_)
    forward = (tree.nested.tree.parent[tree.place] < 0) & (table["forward_thread"] == 0)
    rows = np.flatnonzero(forward)
    rows = rows[~evaluates[table["name"][rows]]]
    return table["thread"][rows], table["duration"][rows]


def _of_launches(context: Context) -> Weighted:
    call = context.get(gpu).call
    thread = context.get(calls).thread[call[call >= 0]]
    return thread, np.ones(len(thread), np.int64)


def _of_python(context: Context) -> Weighted:
    table = context.trace.table("python_function")
    if table["self_samples"].any():
        return table["thread"], table["self_samples"].astype(np.int64) - table["idle"]
    nested = context.get(python_tree)
    rows = nested.order[nested.tree.parent < 0]
    return table["thread"][rows], table["duration"][rows]


_RULES: tuple[Callable[[Context], Weighted], ...] = (_of_steps, _of_operators, _of_launches, _of_python)
