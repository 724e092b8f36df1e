"""Divides what the training thread does beside the training into subtrees of its calls, each named after one function.

Theory of operation
    A node of the tree of calls (framework_calls.py) belongs to the loop if the training runs below it; all other code
    hangs below such nodes. Each largest subtree without training is one, for all of its time. It is named after the
    innermost user's function that has nearly all of that time, so that a wrapper is not named for what it wraps, nor
    one of several helpers for what they do together. What a function of the loop does itself is told by line.

    A subtree below a framework's own loop is divided further (framework_parts.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_findings.framework_parts import DOMINATES, FrameworkPart, FrameworkParts
from kineto_trace.analysis.host_time.call_tree import CallTree, heaviest_below, inclusive
from kineto_trace.analysis.host_time.framework_calls import LOOP, TRAINING, framework_calls
from kineto_trace.analysis.host_time.host_moments import NOTHING, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.user_lines import own_lines
from kineto_trace.arrays.row_groups import places_by_value
from kineto_trace.model.context import Context
from kineto_trace.structure.python.library_calls import CallKind

WITHOUT = 0.25  # of the operators without a backward: fewer with one are errors of sampling

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Subtree:
    """A subtree of framework_calls (or a line of the loop) with the moments that it has.

    named: the node with its best name. entry: of the framework whose loop calls it, or whose loop it is; NOTHING: it is
    the user's, or called by the user. of_loop: whether it is what a function of that loop does itself. purpose: of a
    part of a framework's work, if it is known. root: the node at which it begins; NOTHING: it is of the loop.
    """

    named: int
    line: int
    moments: Ints
    entry: int = NOTHING
    of_loop: bool = False
    purpose: int = CallKind.NONE
    root: int = NOTHING


def trains(context: Context) -> bool:
    """Tells whether a forward with a backward, a backward or an optimizer was seen."""
    return bool(np.isin(context.get(moment_classes).kind, TRAINING).any())


def subtrees(context: Context) -> Iterator[Subtree]:
    """Yields all of them. In a program that does not train, each function is one, with what it does itself."""
    found, tree, classes = context.get(moments), context.get(framework_calls), context.get(moment_classes)
    if not len(tree) or not len(found):
        return
    if not trains(context):
        yield from _functions(context)
        return
    node, evaluates = tree.node[found.place], _evaluates(context)
    aside = np.isin(classes.kind, (Class.OTHER, Class.UNLINKED)) | evaluates
    loop = _loop(context, aside)
    other = inclusive(tree, np.bincount(node, classes.weight * aside, len(tree)))
    heaviest, names = heaviest_below(tree, other), frozenset(tree.name[loop].tolist())
    parts = FrameworkParts(context, aside, evaluates, names)
    begins = np.full(len(tree), NOTHING, np.int64)  # the node at which the subtree of a node begins
    named: dict[int, FrameworkPart] = {}
    for place in np.flatnonzero(~loop).tolist():
        above = int(tree.parent[place])
        if place in named:
            begins[place] = place
        elif above != NOTHING and begins[above] != NOTHING:
            begins[place] = begins[above]
        else:
            begins[place] = place
            framework = tree.entry[place] != NOTHING
            divided = parts.of(place) if framework else (FrameworkPart(place, place, CallKind.NONE),)
            named |= {part.root: part for part in divided}
    mine = np.flatnonzero(aside & (classes.weight > 0))
    of_moment = begins[node[mine]]
    aside_of_loop = of_moment != NOTHING
    outside = mine[aside_of_loop]
    for start, places in places_by_value(of_moment[aside_of_loop]):
        best = named[start].named
        if tree.entry[best] == NOTHING:
            best = dominating(tree, other, best, heaviest, names)
        yield Subtree(best, 0, outside[places], int(tree.entry[best]), purpose=named[start].purpose, root=start)
    rest = mine[~aside_of_loop]
    lines = np.where(tree.user[node[rest]], _lines(context, rest), 0)
    keys = node[rest] << 32 | lines
    for key, places in places_by_value(keys):
        at = int(key >> 32)
        yield Subtree(at, key & 0xFFFFFFFF, rest[places], int(tree.entry[at]), of_loop=True)


def _functions(context: Context) -> Iterator[Subtree]:
    """Yields what each function does itself, or in one function of a library, beside running models."""
    found, tree, classes = context.get(moments), context.get(framework_calls), context.get(moment_classes)
    mine = np.flatnonzero((classes.kind == Class.OTHER) & (classes.weight > 0))
    for node, places in places_by_value(tree.node[found.place[mine]].astype(np.int64)):
        if node != NOTHING:
            yield Subtree(node, 0, mine[places])


def _evaluates(context: Context) -> Flags:
    """Tells which moments of the forward, while no operator runs, are in functions whose operators have no backward."""
    found, tree, classes = context.get(moments), context.get(framework_calls), context.get(moment_classes)
    node, forward = tree.node[found.place], classes.kind == Class.FORWARD
    linked = inclusive(tree, np.bincount(node, forward & classes.linked, len(tree)))
    unlinked = inclusive(tree, np.bincount(node, classes.kind == Class.UNLINKED, len(tree)))
    without = (unlinked > 0) & (linked < WITHOUT * unlinked)
    told: Flags = forward & ~classes.linked & without[node]
    return told


def _loop(context: Context, aside: Flags) -> Flags:
    """Tells which nodes have a part of the training below them. In a framework, loading alone is none.

    An evaluation loads, too.
    """
    found, tree, classes = context.get(moments), context.get(framework_calls), context.get(moment_classes)
    node = tree.node[found.place]
    of_framework = tree.entry != NOTHING
    told = np.zeros(len(tree), np.bool_)
    for nodes, counts in ((~of_framework, ~aside), (of_framework, ~aside & np.isin(classes.kind, TRAINING))):
        below = inclusive(tree, np.bincount(node, found.weight * counts, len(tree)))
        told |= nodes & (below > LOOP * float((found.weight * counts).sum()))
    return told


def dominating(tree: CallTree, weight: Floats, start: int, heaviest: Ints, trains: frozenset[int]) -> int:
    """Returns the innermost user's function below `start` that has nearly all of its time, else `start`.

    heaviest: of heaviest_below. trains: names of functions that train elsewhere, which are not to blame for who else
    calls them.
    """
    named = at = start
    while True:
        at = int(heaviest[at])
        if at == NOTHING or weight[at] < DOMINATES * weight[start]:
            return named
        if tree.user[at]:
            if int(tree.name[at]) in trains:
                return named
            named = at


def _lines(context: Context, rows: Ints) -> Ints:
    """The line at which the innermost slice of each of these moments was most often itself; 0: unknown."""
    slices, found = context.get(thread_slices), context.get(moments)
    return context.get(own_lines)[slices.row[found.place[rows]]]
