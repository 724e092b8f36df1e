"""What each moment of the training thread was for: a phase of the step, evaluation, or the user's other code.

Theory of operation
    The Python stack shows the phase (user_calls.py), and otherwise the running operator: one that autograd runs
    backward, or a forward one that has a backward. So a model that is written without modules has a forward, too.

    Only the time of a slice's first sample is known, so it decides for all of them: a slice may extend from a
    function's call in one step to the next call in another. Where the samples show the callee, those in operators with
    a backward are the forward (user_calls.py).

    Inside the forward, the user's code counts as other if it calls a library for something else (to print, to
    wait …), sleeps, runs operators without a backward in a function of its own, or runs no operator for longer than
    LONG_GAP_NS: shorter stretches between operators of the forward are what calling them takes.

    An optimizer may be called with a closure that runs the whole step (Lightning always does). Its annotation contains
    the closure, which is not the optimizer's: it lasts as long as its Python functions, or, without Python functions,
    from the beginning of the annotation to the end of the last backward in it.

The tree of user_calls, extended by nodes for the callees of a framework's training loop.
    Where a framework has the loop (train() of a trainer), all of the training is one call of the user's: one entry of
    user_calls. Such an entry, below which the training runs, is opened: every function of a library in it has a node,
    down to where a phase of the training begins, a library of a known kind is called, or the user's code is called
    back. All other entries stay as they are.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.host_time.user_calls import (
    CallTree,
    call_tree,
    host_steps,
    host_time_lost,
    inclusive_sums,
    moments,
    thread_slices,
    trained_callees,
    user_calls,
)
from kineto_trace.arrays.intervals import Union, containing, difference, intersection, union
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, Ints8
from kineto_trace.kernel_traits.kernel_types import data_loading_names, matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import op_roles, ops
from kineto_trace.structure.library_calls import CallKind
from kineto_trace.structure.step_phases import StepPhase, phases_by_name

LONG_GAP_NS = 1_000_000
ASLEEP = 0.5
LOOP = 0.05  # of the time of the training below a node: then the node belongs to the loop
_STEP, _ZERO_GRAD = re.compile(r"^Optimizer\.step#"), re.compile(r"^Optimizer\.zero_grad#")


class MomentClass(IntEnum):
    """What a moment was for. FORWARD: with a backward, or unknown. UNLINKED: a forward without a backward."""

    OTHER = 0
    LOADING = 1
    FORWARD = 2
    UNLINKED = 3
    BACKWARD = 4
    OPTIMIZER = 5
    COMPILE = 6
    ANOMALY = 7


TRAINING = (MomentClass.FORWARD, MomentClass.BACKWARD, MomentClass.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class MomentClasses:
    """One value per moment.

    op: row of cpu_op, or -1.
    weight: ns that the host lost and in which it neither waited for the GIL nor collected garbage.
    """

    kind: Ints8
    weight: Floats
    op: Ints
    linked: Flags


class _Gaps(NamedTuple):
    """Per moment: whether no operator of the thread runs for long; whether the operators around it are forward.

    Both are false inside an operator.
    """

    long: Flags
    forward: Flags


@dataclass(frozen=True, slots=True)
class FrameworkCalls(CallTree):
    """entry: per node, the node of the opened entry that contains it, or NOTHING."""

    entry: Ints


def moment_classes(context: Context) -> MomentClasses:
    """Returns the class of each moment."""
    found, calls = context.get(moments), context.get(user_calls)
    roles, tree = context.get(op_roles), context.get(ops)
    thread = np.full(len(found), context.get(host_steps).thread, np.uint32)
    inside = tree.nested.innermost(thread, found.time).astype(np.int64)
    op = np.where(inside >= 0, tree.row[inside], -1) if len(tree.row) else np.full(len(found), -1)
    op = op[np.maximum.accumulate(np.where(found.sure, np.arange(len(op)), 0))] if len(op) else op
    linked, backward = (np.append(flags, False)[op] for flags in (roles.linked, roles.backward))
    linked |= context.get(trained_callees).moment & (found.idle <= ASLEEP)
    phase, kind = calls.phase[found.place], calls.kind[found.place]
    gaps = _gaps(context)
    between = (op < 0) & ~gaps.long & gaps.forward & (kind == CallKind.NONE) & (found.idle <= ASLEEP)
    forward = (phase == StepPhase.FORWARD) | ((phase == StepPhase.NONE) & (linked | between))
    in_user = calls.user[calls.node[found.place]] if len(calls) else np.zeros(len(found), np.bool_)
    aside = ~linked & ((kind != CallKind.NONE) | (found.idle > ASLEEP) | (in_user & ((op >= 0) | gaps.long)))
    classes = np.select(
        [
            np.isin(kind, (CallKind.COMPILE, CallKind.RESET)),
            (kind == CallKind.ANOMALY) & ((op >= 0) | _calls_operators(context)),
            calls.loading[found.place] | _in_loader(context),
            np.isin(phase, (StepPhase.BACKWARD, StepPhase.RECOMPUTATION)) | ((phase == StepPhase.NONE) & backward),
            phase == StepPhase.OPTIMIZER,
            forward & ~aside & ((op < 0) | linked | (found.time >= _last_backward(context))),
            forward & ~aside,
        ],
        [
            MomentClass.COMPILE,
            MomentClass.ANOMALY,
            MomentClass.LOADING,
            MomentClass.BACKWARD,
            MomentClass.OPTIMIZER,
            MomentClass.FORWARD,
            MomentClass.UNLINKED,
        ],
        int(MomentClass.OTHER),
    ).astype(np.int8)
    weight = (
        _calibrated(context, classes)
        * np.maximum(1 - found.waiting - found.collecting, 0)
        * context.get(host_time_lost)
    )
    return MomentClasses(classes, weight, op, linked)


def _calls_operators(context: Context) -> Flags:
    """Returns for each moment whether a stack recorded then is that of an operator, though none is seen.

    A slice may begin before the operator that it was sampled in. A module that the user calls records no stacks itself;
    and where anomaly mode is known to be on, it records them.
    """
    calls, slices, place = context.get(user_calls), context.get(thread_slices), context.get(moments).place
    if context.trace.target.settings.get("torch.anomaly_mode") is True:
        return np.ones(len(place), np.bool_)
    depth = np.append(slices.depth, NOTHING)  # the last one is for "none"
    told: Flags = calls.phase[place] == StepPhase.FORWARD
    told &= depth[calls.phase_slice[place]] > depth[calls.user_slice[place]]
    return told


def _calibrated(context: Context, classes: Ints8) -> Floats:
    """The weights of the moments, so that loading and the optimizer have the time of their exact annotations.

    How long an optimizer with a closure takes is no better known by its annotations than by its samples.
    """
    found, window = context.get(moments), context.get(host_steps)
    weight, total = found.weight.copy(), found.weight.sum()
    rest = np.ones(len(weight), np.bool_)
    annotated = [(MomentClass.LOADING, annotated_time(context, context.get(data_loading_names)))]
    if not len(context.get(optimizer_closures).start):
        annotated.append((MomentClass.OPTIMIZER, context.get(optimizer_time)))
    for kind, time in annotated:
        own = classes == kind
        exact, sampled = time.within(window.start, window.end).sum(), weight[own].sum()
        if exact and sampled and 0.5 <= exact / sampled <= 2:
            weight[own] *= exact / sampled
            rest &= ~own
    left = weight[rest].sum()
    weight[rest] *= max(total - weight[~rest].sum(), 0) / left if left else 1
    return weight


def annotated_time(context: Context, names: Flags) -> Union:
    """Returns when the training thread was in annotations of these names."""
    table = context.trace.table("user_annotation")
    own = names[table["name"]] & (table["thread"] == context.get(host_steps).thread)
    return union(table["start"][own], table.end()[own])


def _last_backward(context: Context) -> int:
    """Returns when the last backward of the trace began: the backward of later operators is not in the trace."""
    table, backward = context.trace.table("cpu_op"), context.get(op_roles).backward
    return int(table["start"][backward].max()) if backward.any() else 0


def _gaps(context: Context) -> _Gaps:
    found, table, tree = context.get(moments), context.trace.table("cpu_op"), context.get(ops)
    own = (table["thread"] == context.get(host_steps).thread) & (tree.nested.tree.parent[tree.place] < 0)
    rows = np.flatnonzero(own)
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    if not len(rows):
        return _Gaps(*np.zeros((2, len(found)), np.bool_))
    start, end, linked = table["start"][rows], table.end()[rows], np.append(context.get(op_roles).linked[rows], False)
    at = np.searchsorted(start, found.time, side="right") - 1
    before = np.where(at >= 0, end[at], 0)
    after = np.append(start, np.iinfo(np.int64).max)[at + 1]
    free = found.time >= before
    return _Gaps(free & (after - before > LONG_GAP_NS), free & (at >= 0) & linked[at] & linked[at + 1])


def _in_loader(context: Context) -> Flags:
    """Returns for each moment whether the thread fetches a batch, by its annotations."""
    found, fetching = context.get(moments), annotated_time(context, context.get(data_loading_names))
    within: Flags = containing(*fetching, found.time) >= 0
    return within


def framework_calls(context: Context) -> FrameworkCalls:
    """Returns the tree of the training thread."""
    slices, calls, found = context.get(thread_slices), context.get(user_calls), context.get(moments)
    classes = context.get(moment_classes)
    node = calls.node[found.place]
    trains = np.isin(classes.kind, TRAINING)
    below = inclusive_sums(calls, np.bincount(node[trains], found.weight[trains], len(calls)))
    loops = ~calls.user & (below > LOOP * float(found.weight[trains].sum()))
    name = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    user = np.zeros(len(slices), np.bool_)
    user[calls.user_slice[calls.user_slice == np.arange(len(slices))]] = True
    opened = loops[calls.node]
    aside = (calls.phase == StepPhase.NONE) & (calls.kind == CallKind.NONE) & ~calls.loading
    tree = call_tree(slices, name, user, user | (opened & aside), calls.part)
    in_opened = np.zeros(len(tree), np.bool_)
    in_opened[tree.node[opened]] = True
    entry = np.full(len(tree), NOTHING, np.int64)
    for place in np.flatnonzero(in_opened).tolist():
        above = int(tree.parent[place])
        entry[place] = entry[above] if above != NOTHING and entry[above] != NOTHING else place
    return FrameworkCalls(tree.name, tree.parent, tree.user, tree.node, entry)


def optimizer_steps(context: Context) -> Union:
    """Returns when an optimizer was in its step, without the closures that it called."""
    return difference(_called_steps(context), context.get(optimizer_closures))


def optimizer_time(context: Context) -> Union:
    """Returns when the training thread was in an optimizer's step or zero_grad, without the closures of its steps."""
    zero_grad = annotated_time(context, matches(context.trace.strings, _ZERO_GRAD))
    step = annotated_time(context, matches(context.trace.strings, _STEP))
    step = difference(step, context.get(optimizer_closures))
    return union(np.concatenate([zero_grad.start, step.start]), np.concatenate([zero_grad.end, step.end]))


def optimizer_closures(context: Context) -> Union:
    """Returns when the closures ran that optimizers called in their steps."""
    step, functions = _called_steps(context), context.trace.table("python_function")
    closure = (context.get(phases_by_name) == StepPhase.CLOSURE)[functions["name"]]
    if closure.any():
        return intersection(union(functions["start"][closure], functions.end()[closure]), step)
    table, backward = context.trace.table("cpu_op"), context.get(op_roles).backward
    place = containing(*step, table["start"][backward])
    last = step.start.copy()
    np.maximum.at(last, place[place >= 0], table.end()[backward][place >= 0])
    calls = last > step.start
    return Union(step.start[calls], np.minimum(last, step.end)[calls])


def _called_steps(context: Context) -> Union:
    table = context.trace.table("user_annotation")
    own = matches(context.trace.strings, _STEP)[table["name"]]
    return union(table["start"][own], table.end()[own])


def optimizer_name(context: Context) -> str:
    """Returns the class and method of the first optimizer, such as SGD.step; "" if none stepped."""
    return next((_STEP.sub("", text) for text in context.trace.strings if _STEP.match(text)), "")
