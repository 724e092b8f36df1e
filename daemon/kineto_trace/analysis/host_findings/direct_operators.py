"""Operators that functions of the program call themselves, and what the backward of these takes.

Theory of operation
    An operator belongs to the user's function that is the innermost one when it begins, unless a module runs between
    them. A slice of a function lasts until a sample sees another one, so many operators may begin in the wrong slice:
    samples correct them by name.
"""

import re

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.host_moments import NOTHING, host_steps, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.step_functions import StepPhase
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.arrays.row_groups import places_by_value
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.fwd_bwd import EVALUATE_FUNCTION, forward_backward, op_roles

SEEN = 2  # samples of an operator's name in one function and none in another
_LOW = (1 << 32) - 1
_EVALUATES = re.compile("^" + re.escape(EVALUATE_FUNCTION))

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def called_directly(context: Context) -> tuple[Ints, Ints]:
    """Outermost operators with a backward that user's functions call without a module: rows, and names of callers."""
    table, window = context.trace.table("cpu_op"), context.get(host_steps)
    tree, roles = context.get(ops), context.get(op_roles)
    outermost = tree.nested.tree.parent[tree.place] < 0
    rows = np.flatnonzero(outermost & (table["thread"] == window.thread) & roles.linked & ~roles.backward)
    rows = rows[window.of(table["start"][rows]) >= 0]
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    inner = _slices_at(context, table["start"][rows])
    caller = _as_sampled(context, table["name"][rows].astype(np.int64), _direct_callers(context, inner))
    return rows[caller != NOTHING], caller[caller != NOTHING]


def _slices_at(context: Context, time: Ints) -> Ints:
    """The innermost slice of the training thread at each of these times, or NOTHING."""
    slices, thread = context.get(thread_slices), context.get(host_steps).thread
    return slices.nested.innermost(np.full(len(time), thread, np.uint32), time).astype(np.int64)


def _direct_callers(context: Context, inner: Ints) -> Ints:
    """The name of the user's function around each of these slices; NOTHING: there is none, or a module runs in it."""
    calls, slices = context.get(user_calls), context.get(thread_slices)
    names = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    caller = np.where(inner >= 0, calls.user_slice[inner], NOTHING)
    begun = np.where(inner >= 0, calls.phase_slice[inner], NOTHING)
    depth = np.append(slices.depth, NOTHING)  # the last one is for "none"
    direct = (caller != NOTHING) & (depth[begun] <= depth[caller])
    return np.where(direct, names[caller], NOTHING)


def _as_sampled(context: Context, op: Ints, caller: Ints) -> Ints:
    """The callers, but for those that no sample saw call an operator of that name, while several saw another one do so.

    A slice lasts until a sample sees another function, and thousands of small operators may have run by then. Operators
    that are too short to be sampled belong to the function that has those before and after them. All are in the order
    of their times.
    """
    found, classes = context.get(moments), context.get(moment_classes)
    seen = np.flatnonzero(found.sure & (classes.op >= 0) & np.isin(classes.kind, (Class.FORWARD, Class.OTHER)))
    if not len(seen):
        return caller
    pairs, counts = np.unique(
        _pairs(outermost_names(context, seen), _direct_callers(context, found.place[seen])), return_counts=True
    )
    told, known, sure = caller.copy(), set(pairs.tolist()), np.ones(len(caller), np.bool_)
    best: dict[int, tuple[int, int]] = {}
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        best[pair >> 32] = max(best.get(pair >> 32, (0, 0)), (count, pair & _LOW))
    for pair, rows in places_by_value(_pairs(op, caller)):
        count, other = best.get(pair >> 32, (0, 0))
        if pair not in known:
            sure[rows] = count >= SEEN
            told[rows] = other + NOTHING if count >= SEEN else caller[rows]
    return _between(told, sure)


def _between(caller: Ints, sure: Flags) -> Ints:
    """The callers, with that of the sure ones before and after in the place of those that are not, if these agree."""
    places = np.flatnonzero(sure)
    if not len(places):
        return caller
    after = np.searchsorted(places, np.arange(len(caller)))
    before = caller[places[np.maximum(after - 1, 0)]]
    agree = ~sure & (after > 0) & (after < len(places))
    agree &= before == caller[places[np.minimum(after, len(places) - 1)]]
    return np.where(agree, before, caller)


def outermost_names(context: Context, rows: Ints) -> Ints:
    """The name of the outermost operator at each of these moments; NOTHING: none runs."""
    op, tree = context.get(moment_classes).op[rows], context.get(ops)
    if not len(tree.row):
        return np.full(len(rows), NOTHING)
    begins = tree.nested.tree.parent < 0
    outermost = tree.row[np.flatnonzero(begins)[np.cumsum(begins) - 1]]  # by place
    names: Ints = context.trace.table("cpu_op")["name"][outermost[tree.place[op]]].astype(np.int64)
    return np.where(op >= 0, names, NOTHING)


def _pairs(op: Ints, caller: Ints) -> Ints:
    """One number for the name of an operator and that of its caller, which may be NOTHING."""
    return op << 32 | (caller - NOTHING)


def called_in_backward(context: Context) -> tuple[Ints, Ints]:
    """Operators that user's functions call inside the backward (an autograd.Function, a hook): rows, and callers."""
    table, slices, calls = context.trace.table("cpu_op"), context.get(thread_slices), context.get(user_calls)
    window, tree = context.get(host_steps), context.get(ops)
    engine = matches(context.trace.strings, _EVALUATES)[table["name"]] | (table["forward_thread"] > 0)
    above = tree.nested.tree.parent[tree.place]
    called = np.append(engine, False)[np.where(above >= 0, tree.row[above], -1) if len(tree.row) else above]
    rows = np.flatnonzero(called & ~engine & (table["thread"] == window.thread))
    rows = rows[window.of(table["start"][rows]) >= 0]
    inner = _slices_at(context, table["start"][rows])
    caller = np.where(inner >= 0, calls.user_slice[inner], NOTHING)
    own = (caller != NOTHING) & (calls.phase[caller] == StepPhase.BACKWARD)
    names = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    return rows[own], names[caller[own]]


def _moment_callers(context: Context) -> Ints:
    """The direct caller at each moment."""
    return _direct_callers(context, context.get(moments).place)


def moments_of(context: Context, function: int, in_backward: bool = False) -> Ints:
    """The moments at which this function (a name) calls operators directly, in the forward or inside the backward."""
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    caller = calls.user_slice[found.place]
    direct = context.get(_moment_callers) == function
    if in_backward:
        return np.flatnonzero(direct & (calls.phase[caller] == StepPhase.BACKWARD))
    return np.flatnonzero(direct & (classes.kind == Class.FORWARD))


def backward_ns(context: Context, rows: Ints, place: Ints, count: int) -> Floats:
    """The time of the backward of these forward operators, by `place`.

    Each node of the graph has the time of the engine's operator around it, and an equal part of the time of the
    backward in which no operator runs: the engine sorts the graph, calls its nodes and frees them.
    """
    table, tree, classes = context.trace.table("cpu_op"), context.get(ops), context.get(moment_classes)
    links, window = forward_backward(context.trace.tables), context.get(host_steps)
    outermost = np.cumsum(tree.nested.tree.parent < 0)[tree.place]  # a number that all inside one share
    of_group = np.full(int(outermost.max(initial=0)) + 1, NOTHING, np.int64)
    of_group[outermost[rows]] = place
    owner = of_group[outermost[links.forward_rows]]
    engine = matches(context.trace.strings, _EVALUATES)[table["name"]] & (window.of(table["start"]) >= 0)
    took = np.zeros(len(of_group), np.int64)
    took[outermost[engine]] = table["duration"][engine]
    around = outermost[links.backward_rows]
    own = np.where(took[around] > 0, took[around], table["duration"][links.backward_rows])
    known = owner != NOTHING
    between = float(classes.weight[(classes.kind == Class.BACKWARD) & (classes.op < 0)].sum())
    nodes = max(int(np.count_nonzero(engine)), len(links.backward_rows), 1)
    return np.bincount(owner[known], own[known] + between / nodes, count).astype(np.float64)
