"""The user's code in the steps that is none of loading, forward, backward and optimizer: the largest functions first.

Theory of operation
    A node of the tree of calls (user_calls.py) belongs to the loop if phases of the training run below it; all other
    code hangs below such nodes. Each largest subtree without phases is one finding, for all of its time. It is named
    after the innermost user's function that has nearly all of that time, so that a wrapper is not named for what it
    wraps, nor one of several helpers for what they do together. What a function of the loop does
    itself is told by line.

    Where no part of a training was seen (inference, or a program without PyTorch), all functions may be the work
    itself: each has a finding for what it does itself, whose saving is a guess unless it waits, writes logs or the
    like.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings import remedies
from kineto_trace.analysis.host_findings.host_figures import idleness, is_enough, margin, per_step
from kineto_trace.analysis.host_time.host_moments import NOTHING, host_steps, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.user_calls import UserCalls, user_calls
from kineto_trace.analysis.host_time.user_lines import commonest_place, own_lines
from kineto_trace.arrays.row_groups import places_by_value
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.python.code_places import CodePlace, code_place
from kineto_trace.structure.python.library_calls import CallKind

LOOP = 0.05  # of the time of the training below a node: then it belongs to the loop
WITHOUT = 0.25  # of the operators without a backward: fewer with one are errors of sampling
DENSE_NS = 100_000  # from the beginning of an operator to the next one's: then operators are what a function does
AROUND_NS = 500_000  # of a moment, where they are counted
DOMINATES = 0.8  # of the time of a function in one that it calls: then that one is named
MOSTLY = 0.4  # of a finding's time: what it calls for most of it
ASLEEP = 0.5
CALLING_BACK = (
    CallKind.LOGGING,
    CallKind.CHECKPOINT,
    CallKind.COPY,
    CallKind.JSON,
    CallKind.PICKLE,
)  # libraries that call the user's code

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Subtree:
    """A subtree (or a line of the loop) with the moments that it has. node: where it begins; named: its best name."""

    node: int
    named: int
    line: int
    moments: Ints


def user_code(context: Context) -> Iterator[Finding]:
    """Yields a finding for each function that takes enough of the steps."""
    merged: dict[str, list[Subtree]] = {}
    for subtree in _subtrees(context):
        merged.setdefault(_key(context, subtree), []).append(subtree)
    for same in merged.values():
        rows = np.concatenate([subtree.moments for subtree in same])
        weight = float(context.get(moment_classes).weight[rows].sum())
        if is_enough(context, weight, len(rows)):
            best = max(same, key=lambda subtree: len(subtree.moments))
            yield _finding(context, best, rows, weight)


def _key(context: Context, subtree: Subtree) -> str:
    calls = context.get(user_calls)
    own = [int(calls.name[subtree.named])]
    if not calls.user[subtree.named] and calls.parent[subtree.named] != NOTHING:
        own.append(int(calls.name[calls.parent[subtree.named]]))
    return f"{own} {subtree.line}"


def inclusive(calls: UserCalls, own: npt.NDArray[Any]) -> Floats:
    """Returns for each node the sum over it and all below it. Inner nodes have larger numbers."""
    total = own.astype(np.float64)
    for node in range(len(calls) - 1, -1, -1):
        above = calls.parent[node]
        if above != NOTHING:
            total[above] += total[node]
    return total


def _subtrees(context: Context) -> Iterator[Subtree]:
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    if not len(calls) or not len(found):
        return
    if not _trains(context):
        yield from _functions(context)
        return
    node, count = calls.node[found.place], len(calls)
    aside = np.isin(classes.kind, (Class.OTHER, Class.UNLINKED)) | _evaluates(context)
    other = inclusive(calls, np.bincount(node, classes.weight * aside, count))
    training = inclusive(calls, np.bincount(node, found.weight * ~aside, count))
    loop = training > LOOP * float((found.weight * ~aside).sum())
    begins = np.full(count, NOTHING, np.int64)  # the node at which the subtree of a node begins
    for place in range(count):
        above = calls.parent[place]
        if not loop[place]:
            begins[place] = place if above == NOTHING or begins[above] == NOTHING else begins[above]
    mine = np.flatnonzero(aside & (classes.weight > 0))
    of_moment = begins[node[mine]]
    trains, heaviest = frozenset(calls.name[loop].tolist()), heaviest_below(calls, other)
    aside_of_loop = of_moment != NOTHING
    outside = mine[aside_of_loop]
    for start, places in places_by_value(of_moment[aside_of_loop]):
        yield Subtree(start, dominating(calls, other, start, heaviest, trains), 0, outside[places])
    rest = mine[~aside_of_loop]
    lines = np.where(calls.user[node[rest]], _lines(context, rest), 0)
    keys = node[rest] << 32 | lines
    for key, places in places_by_value(keys):
        yield Subtree(key >> 32, key >> 32, key & 0xFFFFFFFF, rest[places])


def _trains(context: Context) -> bool:
    """Tells whether a forward with a backward, a backward or an optimizer was seen."""
    return bool(np.isin(context.get(moment_classes).kind, (Class.FORWARD, Class.BACKWARD, Class.OPTIMIZER)).any())


def _functions(context: Context) -> Iterator[Subtree]:
    """Yields what each function does itself, or in one function of a library, beside running models."""
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    mine = np.flatnonzero((classes.kind == Class.OTHER) & (classes.weight > 0))
    for node, places in places_by_value(calls.node[found.place[mine]].astype(np.int64)):
        if node != NOTHING:
            yield Subtree(node, node, 0, mine[places])


def _evaluates(context: Context) -> Flags:
    """Tells which moments of the forward, while no operator runs, are in functions whose operators have no backward."""
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    node, forward = calls.node[found.place], classes.kind == Class.FORWARD
    linked = inclusive(calls, np.bincount(node, forward & classes.linked, len(calls)))
    unlinked = inclusive(calls, np.bincount(node, classes.kind == Class.UNLINKED, len(calls)))
    without = (unlinked > 0) & (linked < WITHOUT * unlinked)
    told: Flags = forward & ~classes.linked & without[node]
    return told


def heaviest_below(calls: UserCalls, weight: Floats) -> Ints:
    """Returns for each node the one directly below it with most weight, of equal ones the first; NOTHING: none."""
    heaviest = np.full(len(calls) + 1, NOTHING, np.int64)  # the last one is for "no caller"
    order = np.lexsort((-np.arange(len(calls)), weight))
    heaviest[calls.parent[order]] = order
    return heaviest[:-1]


def dominating(calls: UserCalls, weight: Floats, start: int, heaviest: Ints, trains: frozenset[int]) -> int:
    """Returns the innermost user's function below `start` that has nearly all of its time, else `start`.

    heaviest: of heaviest_below. trains: names of functions that train elsewhere, which are not to blame for who else
    calls them.
    """
    named = at = start
    while True:
        at = int(heaviest[at])
        if at == NOTHING or weight[at] < DOMINATES * weight[start]:
            return named
        if calls.user[at]:
            if int(calls.name[at]) in trains:
                return named
            named = at


def _lines(context: Context, rows: Ints) -> Ints:
    """The line at which the innermost slice of each of these moments was most often itself; 0: unknown."""
    slices, found = context.get(thread_slices), context.get(moments)
    return context.get(own_lines)[slices.row[found.place[rows]]]


def _finding(context: Context, subtree: Subtree, rows: Ints, weight: float) -> Finding:
    calls, found, classes = context.get(user_calls), context.get(moments), context.get(moment_classes)
    place = _place(context, subtree, rows)
    share = classes.weight[rows] / max(weight, 1.0)
    idle = float((found.idle[rows] * share).sum())
    kind = main_kind(calls.kind[found.place[rows]], share)
    if kind == CallKind.NONE:
        outer = main_kind(calls.outer[found.place[rows]], share)
        kind = outer if outer in CALLING_BACK else kind
    name, what, advice = _judged(context, kind, rows, share, idle)
    callee = ""
    if not calls.user[subtree.named]:
        callee = f", called in {place.short}"
        shown = code_place(context.trace.strings[int(calls.name[subtree.named])]).shown
    else:
        shown = place.short
    steps = len(np.unique(found.step[rows]))
    told = f" in {steps} of {len(context.get(host_steps).start)} steps" if context.get(host_steps).told else ""
    return Finding(
        name=name,
        title=f"{shown}{callee} {what}",
        saving_ns=int(weight),
        advice=advice,
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}; seen at {len(rows)} of {len(found)} moments"
        f"{told}{idleness(context, idle)}{_ops_text(context, rows)}",
        where=str(place),
    )


def main_kind(kinds: npt.NDArray[np.int8], share: Floats) -> CallKind:
    """Returns what most of the time was spent in; NONE if no kind has enough of it."""
    weights = np.bincount(kinds, share, len(CallKind))
    weights[CallKind.NONE] = 0
    best = int(np.argmax(weights))
    return CallKind(best) if weights[best] >= MOSTLY else CallKind.NONE


_TITLES = {
    CallKind.TENSOR_PRINT: "prints tensors",
    CallKind.LOGGING: "writes logs",
    CallKind.CHECKPOINT: "saves a checkpoint",
    CallKind.COPY: "makes deep copies",
    CallKind.JSON: "writes or reads JSON",
    CallKind.PICKLE: "pickles",
    CallKind.SUBPROCESS: "starts processes",
    CallKind.IMPORT: "imports modules",
    CallKind.TOKENS: "tokenises text",
    CallKind.ARCHIVE: "compresses or unpacks",
    CallKind.IMAGE: "works on images",
    CallKind.NETWORK: "waits for the network",
    CallKind.FILE: "reads or writes files",
    CallKind.WAIT: "waits for another thread or process",
    CallKind.TABLES: "works on tables",
    CallKind.SLEEP: "sleeps",
    CallKind.ITEM: "reads single numbers of tensors",
    CallKind.GARBAGE: "collects garbage",
    CallKind.COLLECTIVE: "waits in collectives",
}


def _judged(context: Context, kind: CallKind, rows: Ints, share: Floats, idle: float) -> tuple[str, str, str]:
    """Returns the finding's name, what the code does, and what to do about it."""
    classes = context.get(moment_classes)
    forward = np.isin(classes.kind[rows], (Class.UNLINKED, Class.FORWARD))
    if float(share[forward].sum()) >= MOSTLY:
        return "evaluation_in_the_step", "runs a model without a backward", remedies.EVALUATION
    if kind in _TITLES:
        return f"user_code_{kind.name.lower()}", _TITLES[kind], remedies.REMEDIES[kind]
    op = classes.op[rows]
    if float(share[op >= 0].sum()) >= MOSTLY:
        return _by_ops(context, op[op >= 0])
    waits = _wait(context, rows)
    if waits is not None and idle > MOSTLY:
        return waits
    if idle > ASLEEP:
        return "user_code_blocked", "waits", remedies.BLOCKED
    around = _ops_around(context, rows)
    if len(around) * DENSE_NS > 2 * AROUND_NS * len(rows):
        return _by_ops(context, around)
    if not _trains(context):
        return "busy_function", "takes a part of the time", remedies.BUSY
    return "user_code", "takes a part of the step that trains nothing", remedies.REMEDIES[CallKind.NONE]


_WAITS = {  # columns of python_function
    "idle_sleep": ("user_code_sleep", "sleeps", remedies.REMEDIES[CallKind.SLEEP]),
    "idle_lock": ("user_code_lock", "waits for a lock", remedies.REMEDIES[CallKind.WAIT]),
    "idle_poll": ("user_code_network", "waits for a socket or a pipe", remedies.REMEDIES[CallKind.NETWORK]),
    "idle_io": ("user_code_file", "reads or writes files", remedies.REMEDIES[CallKind.FILE]),
    "idle_memory": ("user_code_paging", "waits for memory from storage", remedies.PAGING),
    "idle_child": ("user_code_subprocess", "waits for a process", remedies.REMEDIES[CallKind.SUBPROCESS]),
}


def _wait(context: Context, rows: Ints) -> tuple[str, str, str] | None:
    """What the thread waits for in most of its idle samples, by the system calls; None: unknown."""
    slices, found = context.get(thread_slices), context.get(moments)
    table, row = context.trace.table("python_function"), slices.row[np.unique(found.place[rows])]
    counts = {name: int(table[name][row].sum()) for name in _WAITS}
    best = max(counts, key=lambda name: counts[name])
    return _WAITS[best] if 2 * counts[best] > int(table["idle"][row].sum()) else None


def _by_ops(context: Context, op: Ints) -> tuple[str, str, str]:
    names = _top_ops(context, op)
    if names and names[0] in ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"):
        return "user_code_item", _TITLES[CallKind.ITEM], remedies.REMEDIES[CallKind.ITEM]
    if names and names[0] in ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::to", "aten::contiguous"):
        return "user_code_copies", "copies tensors", remedies.COPIES
    what = "runs operators that train nothing" if _trains(context) else "runs many operators"
    return "user_code_operators", what, remedies.SMALL_OPERATORS


def _ops_around(context: Context, rows: Ints) -> Ints:
    """Rows of the outermost operators that begin near these moments, once for each moment."""
    table, tree = context.trace.table("cpu_op"), context.get(ops)
    thread = context.get(host_steps).thread
    own = np.flatnonzero((tree.nested.tree.parent[tree.place] < 0) & (table["thread"] == thread))
    own = own[np.argsort(table["start"][own], kind="stable")]
    time = context.get(moments).time[rows]
    first, last = (np.searchsorted(table["start"][own], time + side) for side in (-AROUND_NS, AROUND_NS))
    count = last - first
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    found: Ints = own[np.repeat(first, count) + within]
    return found


def _top_ops(context: Context, op: Ints) -> list[str]:
    names, counts = np.unique(context.trace.table("cpu_op")["name"][op], return_counts=True)
    return [context.trace.strings[int(name)] for name in names[np.argsort(-counts, kind="stable")][:3]]


def _ops_text(context: Context, rows: Ints) -> str:
    op = context.get(moment_classes).op[rows]
    listed = _top_ops(context, op[op >= 0])
    share = np.count_nonzero(op >= 0) / max(len(op), 1)
    return f"; {100 * share:.0f} % in operators, most in {', '.join(listed)}" if listed and share > 0.1 else ""


def _place(context: Context, subtree: Subtree, rows: Ints) -> CodePlace:
    """The user's function, and the line at which it was most often."""
    calls, found, slices = context.get(user_calls), context.get(moments), context.get(thread_slices)
    node = subtree.named
    while not calls.user[node] and calls.parent[node] != NOTHING:
        node = int(calls.parent[node])
    text = context.trace.strings[int(calls.name[node])]
    if subtree.line:
        return code_place(text, subtree.line)
    inner = context.trace.table("python_function")["name"][slices.row[calls.user_slice[found.place[rows]]]]
    own = rows[inner == calls.name[node]]
    return commonest_place(context, own, np.ones(len(own))) or code_place(text)
