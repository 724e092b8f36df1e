"""Findings on the user's code in steps outside loading, forward, backward and optimizer, largest function first.

Theory of operation
    framework_parts.py divides it; each subtree is one finding. A function of a framework (train() of a trainer, and its
    loop's callees) is reported like a user's function if its purpose is known: it saves, evaluates, logs, waits. What
    is too small by itself, or belongs to the loop, counts for the framework as a whole, again only for known purposes.
    The rest of the framework's own work is a guess: it may be unavoidable.

    Where no part of a training was seen (inference, or a program without PyTorch), all functions may be the work
    itself: each has a finding for its self time, whose saving is a guess unless it waits, writes logs or the like.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.finding import (
    BLOCKED,
    BUSY,
    COPY_ADVICE,
    EVALUATION_ADVICE,
    FRAMEWORK,
    PAGING,
    REMEDIES,
    SMALL_OPERATORS,
    Finding,
)
from kineto_trace.analysis.host_findings.framework_parts import EVALUATION, Subtree, has_training, settings_of, subtrees
from kineto_trace.analysis.host_findings.threads import idleness, is_enough, margin, per_step
from kineto_trace.analysis.host_time.moment_classes import (
    MomentClass,
    annotated_time,
    framework_calls,
    moment_classes,
    optimizer_time,
)
from kineto_trace.analysis.host_time.user_calls import (
    CallTree,
    commonest_place,
    host_steps,
    moments,
    slice_callees,
    thread_slices,
    trained_callees,
    user_calls,
)
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import containing
from kineto_trace.arrays.row_groups import group, places_by_value
from kineto_trace.base.array_types import NOTHING, AnyArray, Floats, Ints, Ints8
from kineto_trace.kernel_traits.kernel_types import data_loading_names
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import op_roles, ops
from kineto_trace.structure.library_calls import CALLING_BACK, CallKind, CodePlace, code_place, framework_of

WAY = 4  # functions of a framework between the user's code and the function that is named
# from the beginning of one operator to the next: a function with such operators mainly runs operators
DENSE_NS = 100_000
AROUND_NS = 500_000  # around a moment, where operators are counted
MOSTLY = 0.4  # of a finding's time in one kind of callee
ASLEEP = 0.5
TOLD = 0.1  # of a finding's time: callees with less are not named
MOST_TOLD = 3
IN_COLLECTIVES = f"user_code_{CallKind.COLLECTIVE.name.lower()}"  # the name of such findings


class FoundFunction(NamedTuple):
    """A finding, and the nodes of framework_calls at which its calls begin; none if it is the self time of a loop."""

    finding: Finding
    roots: tuple[int, ...] = ()


def user_code(context: Context) -> Iterator[Finding]:
    """Yields a finding for each function that takes enough of the steps."""
    for found in context.get(found_functions):
        yield found.finding


def found_functions(context: Context) -> tuple[FoundFunction, ...]:
    """Returns the findings of user_code(), and where their time is."""
    return tuple(_found(context))


def _found(context: Context) -> Iterator[FoundFunction]:
    merged: dict[str, list[Subtree]] = {}
    for subtree in subtrees(context):
        merged.setdefault(_key(context, subtree), []).append(subtree)
    of_frameworks: dict[int, list[Ints]] = {}
    for same in merged.values():
        best = max(same, key=lambda subtree: len(subtree.moments))
        rows = np.concatenate([subtree.moments for subtree in same])
        if best.entry != NOTHING and (best.of_loop or not _is_enough(context, rows)):
            of_frameworks.setdefault(best.entry, []).append(rows)
        elif _is_enough(context, rows):
            roots = tuple(subtree.root for subtree in same if subtree.root != NOTHING)
            yield FoundFunction(_finding(context, replace(best, moments=rows)), roots)
    for entry, several in of_frameworks.items():
        for kind, rows in _of_framework(context, np.concatenate(several)):
            yield FoundFunction(_finding(context, Subtree(entry, 0, rows, entry, purpose=kind)))


def _key(context: Context, subtree: Subtree) -> str:
    tree = context.get(framework_calls)
    own = [int(tree.name[subtree.named])]
    if not tree.user[subtree.named]:
        own += [int(tree.name[node]) for node in _above(tree, subtree.named) if tree.user[node]][:1]
    return f"{own} {subtree.line} {subtree.entry} {subtree.of_loop} {subtree.purpose}"


def _above(tree: CallTree, node: int) -> Iterator[int]:
    """Yields the nodes that called this one, inner ones first."""
    while tree.parent[node] != NOTHING:
        node = int(tree.parent[node])
        yield node


def _is_enough(context: Context, rows: Ints) -> bool:
    return is_enough(context, float(context.get(moment_classes).weight[rows].sum()), len(rows))


def _of_framework(context: Context, rows: Ints) -> Iterator[tuple[CallKind, Ints]]:
    """Yields the moments of a framework's work by known purpose, and the rest of them.

    Purposes without enough time for a finding are left out.
    """
    calls, found = context.get(user_calls), context.get(moments)
    kinds = calls.kind[found.place[rows]].astype(np.int64)
    rest = []
    for kind, places in places_by_value(kinds):
        if CallKind(kind) in _TITLES and _is_enough(context, rows[places]):
            yield CallKind(kind), rows[places]
        else:
            rest.append(rows[places])
    if rest and _is_enough(context, np.concatenate(rest)):
        yield CallKind.NONE, np.concatenate(rest)


def _finding(context: Context, subtree: Subtree) -> Finding:
    rows, tree = subtree.moments, context.get(framework_calls)
    found, classes = context.get(moments), context.get(moment_classes)
    weight = float(classes.weight[rows].sum())
    place = _place(context, subtree)
    share = classes.weight[rows] / max(weight, 1.0)
    idle = float((found.idle[rows] * share).sum())
    name, what, advice = _judged(context, _purpose(context, subtree, share), subtree, share, idle)
    shown, way = place.short, ""
    if not tree.user[subtree.named]:
        function = code_place(context.trace.strings[int(tree.name[subtree.named])])
        package = framework_of(function)
        shown = f"{function.shown}{f' of {package}' if package else ''}, called in {place.short},"
        way = _way(context, subtree.named)
        advice = f"{advice} {settings_of(package, name)}".rstrip()
    steps = len(unique_values(found.step[rows]))
    told = f" in {steps} of {len(context.get(host_steps).start)} steps" if context.get(host_steps).told else ""
    return Finding(
        name=name,
        title=f"{shown} {what}",
        saving_ns=int(weight),
        advice=advice,
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}; seen at {len(rows)} of {len(found)} moments"
        f"{told}{idleness(context, idle)}{_ops_text(context, rows)}{_callees_text(context, rows, share)}{way}",
        where=str(place),
    )


def _purpose(context: Context, subtree: Subtree, share: Floats) -> int:
    """Returns the purpose of most of the subtree: a CallKind, or EVALUATION."""
    if subtree.entry != NOTHING:
        return subtree.purpose
    calls = context.get(user_calls)
    if _runs_a_model(context, subtree.moments, share):
        return EVALUATION
    place = context.get(moments).place[subtree.moments]
    kind, outer = main_kind(calls.kind[place], share), main_kind(calls.outer[place], share)
    if kind == CallKind.NONE:
        return outer if outer in CALLING_BACK else _kind_by_callees(context, subtree.moments, share)
    return kind


def _kind_by_callees(context: Context, rows: Ints, share: Floats) -> CallKind:
    """Returns the kind of call with most of the time, C functions included."""
    calls, found = context.get(user_calls), context.get(moments)
    return _heaviest(
        np.bincount(calls.kind[found.place[rows]], share, len(CallKind)), _kind_weights(context, rows, share)
    )


def _kind_weights(context: Context, rows: Ints, share: Floats) -> Floats:
    """Returns the weight of each CallKind by the callees of moments whose Python functions have no kind.

    rows: places of moments.
    share: weight of each.
    """
    told, place = context.get(slice_callees), context.get(moments).place[rows]
    unknown = context.get(user_calls).kind[place] == CallKind.NONE
    by_slice = np.bincount(place[unknown], share[unknown], len(context.get(thread_slices)))
    weights: Floats = np.bincount(told.kind, by_slice[told.place] * told.share, len(CallKind)).astype(np.float64)
    return weights


def _callees_text(context: Context, rows: Ints, share: Floats) -> str:
    """Formats what the user's functions called in most of these moments: "; 48 % in pickle.dumps (line 77)".

    rows: places of moments outside the training.
    share: of each, 1 in total.

    "" if no callee has enough of them.
    """
    told, place = context.get(slice_callees), context.get(moments).place[rows]
    own = context.get(user_calls).user_slice[place] == place
    by_slice = np.bincount(place[own], share[own], len(context.get(thread_slices)))
    gone = context.get(trained_callees).callee[told.name]
    left = 1 - np.bincount(told.place, told.share * gone, len(by_slice))  # of each slice's samples
    weight = by_slice[told.place] * np.minimum(told.share / np.maximum(left[told.place], told.share), 1.0) * ~gone
    if not (weight > 0).any():
        return ""
    groups = group([told.name, told.line])
    weights = np.bincount(groups.number, weight)
    best = [place for place in np.argsort(-weights, kind="stable")[:MOST_TOLD].tolist() if weights[place] >= TOLD]
    named = [(weights[at], told.names[told.name[groups.first[at]]], told.line[groups.first[at]]) for at in best]
    return "".join(f"; {100 * part:.0f} % in {name} (line {line})" for part, name, line in named)


def _runs_a_model(context: Context, rows: Ints, share: Floats) -> bool:
    forward = np.isin(context.get(moment_classes).kind[rows], (MomentClass.UNLINKED, MomentClass.FORWARD))
    return float(share[forward].sum()) >= MOSTLY


def _way(context: Context, node: int) -> str:
    """Returns the functions of frameworks through which the user's code called this one, innermost first."""
    tree, way = context.get(framework_calls), list[str]()
    for above in _above(tree, node):
        place = code_place(context.trace.strings[int(tree.name[above])])
        if tree.user[above] or len(way) == WAY:
            break
        if framework_of(place):
            way.append(place.shown)
    return f"; called by {', '.join(way)}" if way else ""


def main_kind(kinds: Ints8, share: Floats) -> CallKind:
    """Returns what most of the time was spent in; NONE if no kind has enough of it."""
    return _heaviest(np.bincount(kinds, share, len(CallKind)))


def _heaviest(*parts: AnyArray) -> CallKind:
    weights = np.sum(parts, axis=0)
    weights[CallKind.NONE] = 0
    best = int(np.argmax(weights))
    return CallKind(best) if weights[best] >= MOSTLY else CallKind.NONE


_TITLES: dict[int, str] = {
    CallKind.TENSOR_PRINT: "prints tensors",
    CallKind.LOGGING: "writes logs",
    CallKind.CHECKPOINT: "saves a checkpoint",
    CallKind.COPY: "makes deep copies",
    CallKind.JSON: "writes or reads JSON",
    CallKind.PICKLE: "pickles objects",
    CallKind.SUBPROCESS: "starts processes",
    CallKind.IMPORT: "imports modules",
    CallKind.TOKENS: "tokenises text",
    CallKind.ARCHIVE: "compresses or unpacks data",
    CallKind.IMAGE: "processes images",
    CallKind.NETWORK: "waits for the network",
    CallKind.FILE: "reads or writes files",
    CallKind.WAIT: "waits for another thread or process",
    CallKind.TABLES: "processes tables",
    CallKind.SLEEP: "sleeps",
    CallKind.ITEM: "reads tensors one number at a time",
    CallKind.GARBAGE: "collects garbage",
    CallKind.COLLECTIVE: "waits in collectives",
    CallKind.CLIP: "clips gradients",
    CallKind.HASH: "computes hashes",
    CallKind.DATABASE: "uses a database",
    CallKind.CONVERT: "converts Python objects to arrays",
}


def _judged(context: Context, purpose: int, subtree: Subtree, share: Floats, idle: float) -> tuple[str, str, str]:
    """Returns the finding's name, what the code does, and the advice."""
    classes, rows = context.get(moment_classes), subtree.moments
    if purpose == EVALUATION:
        what = "runs a model without a backward pass" if _runs_a_model(context, rows, share) else "evaluates"
        return "evaluation_in_the_step", what, EVALUATION_ADVICE
    if purpose in _TITLES:
        kind = CallKind(purpose)
        return f"user_code_{kind.name.lower()}", _TITLES[kind], REMEDIES[kind]
    op = classes.op[rows]
    if subtree.entry == NOTHING and float(share[op >= 0].sum()) >= MOSTLY:
        return _by_ops(context, op[op >= 0])
    waits = _wait(context, rows)
    if waits is not None and idle > MOSTLY:
        return waits
    if idle > ASLEEP:
        return "user_code_blocked", "waits", BLOCKED
    if subtree.entry != NOTHING:
        return "framework_work", "spends part of the step on work other than training", FRAMEWORK
    around = _ops_of(context, rows)
    if len(around):
        return _by_ops(context, around)
    if not has_training(context):
        return "busy_function", "takes up part of the time", BUSY
    return "user_code", "takes up part of the step, but does no training", REMEDIES[CallKind.NONE]


_WAITS = {  # columns of python_function
    "idle_sleep": ("user_code_sleep", "sleeps", REMEDIES[CallKind.SLEEP]),
    "idle_lock": ("user_code_lock", "waits for a lock", REMEDIES[CallKind.WAIT]),
    "idle_poll": ("user_code_network", "waits for a socket or a pipe", REMEDIES[CallKind.NETWORK]),
    "idle_io": ("user_code_file", "reads or writes files", REMEDIES[CallKind.FILE]),
    "idle_memory": ("user_code_paging", "waits for memory to be read from storage", PAGING),
    "idle_child": ("user_code_subprocess", "waits for a process", REMEDIES[CallKind.SUBPROCESS]),
}


def _wait(context: Context, rows: Ints) -> tuple[str, str, str] | None:
    """Returns what the thread waits for in most of its idle samples, by the system calls; None if unknown."""
    slices, found = context.get(thread_slices), context.get(moments)
    table, row = context.trace.table("python_function"), slices.row[unique_values(found.place[rows])]
    counts = {name: int(table[name][row].sum()) for name in _WAITS}
    best = max(counts, key=lambda name: counts[name])
    return _WAITS[best] if 2 * counts[best] > int(table["idle"][row].sum()) else None


def _by_ops(context: Context, op: Ints) -> tuple[str, str, str]:
    names = _top_ops(context, op)
    if names and names[0] in ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"):
        return "user_code_item", _TITLES[CallKind.ITEM], REMEDIES[CallKind.ITEM]
    if names and names[0] in ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::to", "aten::contiguous"):
        return "user_code_copies", "copies tensors", COPY_ADVICE
    what = "runs operators that are not part of the training" if has_training(context) else "runs many operators"
    return "user_code_operators", what, SMALL_OPERATORS


def _ops_of(context: Context, rows: Ints) -> Ints:
    """Returns the operators around these moments, once for each moment, if most of the moments run operators.

    Only operators outside the training count, and only where they are dense. The time of a moment may be off by a step
    or more, and then it lies among the operators of other functions. So these operators, with the cost of calling them,
    must also have enough time for most of the moments.
    """
    table, found = context.trace.table("cpu_op"), context.get(moments)
    aside, took = context.get(_ops_aside)
    if took < MOSTLY * float(found.weight[rows].sum()):
        return aside[:0]
    rows = rows[found.sure[rows]]
    start = table["start"][aside]
    first, last = (np.searchsorted(start, found.time[rows] + side) for side in (-AROUND_NS, AROUND_NS))
    dense = (last - first) * DENSE_NS > 2 * AROUND_NS
    first, count = first[dense], (last - first)[dense]
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    around: Ints = aside[np.repeat(first, count) + within]
    return around if np.count_nonzero(dense) >= MOSTLY * len(rows) else around[:0]


def _ops_aside(context: Context) -> tuple[Ints, float]:
    """Returns the rows of the thread's outermost operators outside the training, and their time (ns).

    The time of each includes the cost of calling it: until the next operator begins, but no more than DENSE_NS.
    """
    table, tree, roles = context.trace.table("cpu_op"), context.get(ops), context.get(op_roles)
    window = context.get(host_steps)
    rows = np.flatnonzero((tree.nested.tree.parent[tree.place] < 0) & (table["thread"] == window.thread))
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    start, duration = table["start"][rows], table["duration"][rows]
    took = np.minimum(np.diff(start, append=np.iinfo(np.int64).max), duration + DENSE_NS)
    aside = ~roles.linked[rows] & ~roles.backward[rows] & (window.of(start) >= 0)
    for taken in (annotated_time(context, context.get(data_loading_names)), context.get(optimizer_time)):
        aside &= containing(*taken, start) < 0
    return rows[aside], float(took[aside].sum())


def _top_ops(context: Context, op: Ints) -> list[str]:
    names, counts = np.unique(context.trace.table("cpu_op")["name"][op], return_counts=True)
    return [context.trace.strings[int(name)] for name in names[np.argsort(-counts, kind="stable")][:3]]


def _ops_text(context: Context, rows: Ints) -> str:
    op = context.get(moment_classes).op[rows]
    listed = _top_ops(context, op[op >= 0])
    share = np.count_nonzero(op >= 0) / max(len(op), 1)
    return f"; {100 * share:.0f} % in operators, mostly {', '.join(listed)}" if listed and share > 0.1 else ""


def _place(context: Context, subtree: Subtree) -> CodePlace:
    """Returns the user's function, and the line at which it was most often."""
    calls, tree, found = context.get(user_calls), context.get(framework_calls), context.get(moments)
    slices, rows = context.get(thread_slices), subtree.moments
    above = (node for node in (subtree.named, *_above(tree, subtree.named)) if tree.user[node])
    node = next(above, subtree.named)
    text = context.trace.strings[int(tree.name[node])]
    if subtree.line:
        return code_place(text, subtree.line)
    inner = context.trace.table("python_function")["name"][slices.row[calls.user_slice[found.place[rows]]]]
    own = rows[inner == tree.name[node]]
    return commonest_place(context, own, np.ones(len(own))) or code_place(text)
