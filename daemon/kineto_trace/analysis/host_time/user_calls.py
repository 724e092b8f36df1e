"""The program's own functions in the training: the tree of their calls, their lines, callees and moments.

Theory of operation
    A node is a user's function below the node that called it, or the first library function that a user's function
    calls (an entry); what a library calls inside belongs to its entry, until it calls the user's code again: the
    DataLoader a data set, a module a user's forward(). So the tree is small however deep the stacks are. A
    comprehension belongs to the node of the user's function around it. All slices of one depth are numbered at once.

    A slice also has the phase that the innermost function of torch around it began (none in the closure of an
    optimizer), and the kind of the outermost library function of a known kind below the innermost user's function, or a
    kind that holds for everything below it.

    Everything below an import, up to the user's code, is importing: the modules of a compiler, of the DataLoader and of
    the optimizers neither compile nor begin a phase when they are imported. An import inside a compilation is part of
    it, but one in the call of torch.compile is not: that call compiles nothing.

Callees of the training thread's lines that are not Python functions but C, according to the samples.
    A slice of a function that calls many operators counts many samples, and only the first one's time is known. The
    callees of the others ("loss.mean", "torch.matmul") name their operators. If nearly all operators of that name on
    the training thread have a backward, those samples are a part of the forward. A method of another class may have
    the same name: then its samples have more time than those operators, and are ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.idle_gaps import measured_steps
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import containing, union
from kineto_trace.arrays.row_groups import group, in_subtrees, places_by_value, sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints, Ints8
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu, op_roles, ops, steps, training_thread
from kineto_trace.structure.library_calls import CallKind, CodePlace, code_place, function_kinds
from kineto_trace.structure.nesting import Nested
from kineto_trace.structure.python_frames import (
    IDLE,
    WAITING,
    CalleeSamples,
    callee_kind,
    callee_samples,
    line_samples,
    python_tree,
    state_counts,
)
from kineto_trace.structure.step_pace import paced_steps
from kineto_trace.structure.step_phases import StepPhase, phases_by_name

EXACT_NS = 100_000
MAX_MOMENTS = 2_000_000  # pieces of exact calls, or samples; if there are more, each represents several
STICKY = (CallKind.COMPILE, CallKind.ANOMALY, CallKind.RESET)  # hold for everything below, including user's code
NEARLY_ALL = 0.9  # of the operators of a name
LONGER = 2  # times the operators: the cost of calling them
FEW = 4  # more samples than this are not chance
FEW_ON_A_LINE = 3  # samples of a call: if there are so few, all agree on its line, or nearly


# The innermost Python function of the training thread at many moments of the steps, and the time each represents.
#
# Theory of operation
# Samples became slices, and slices were moved to where operators begin and end; a sample is now only a count in its
# innermost slice. A slice's own samples are spread evenly over the time in which it is the innermost one, from its
# beginning on, where the first one was. Each represents the same part of the steps' time. Exact calls are cut where
# steps begin and end, and into pieces of EXACT_NS, which represent their lengths.
#
# Only the moments of the training thread within its steps count; without steps, all.


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """The evaluated time (Unix ns), step by step: the measured steps, if there are any.

    thread: the training thread.
    number: of each step.
    told: whether the trace has steps.
    whole: whether these are complete steps; otherwise they are parts of steps that the recording cut off.
    """

    thread: int
    start: Ints
    end: Ints
    number: Ints
    told: bool
    whole: bool

    @property
    def total_ns(self) -> int:
        """Returns the time of all steps."""
        return int((self.end - self.start).sum())

    def of(self, time: Ints) -> Ints:
        """Returns for each moment the place of its step, or -1."""
        return containing(self.start, self.end, time)


@dataclass(frozen=True, slots=True)
class HostMoments:
    """One value per moment.

    place: of the innermost slice in thread_slices.
    weight: ns.
    step: place in TrainingSteps.
    sure: whether this is the time of the sample: of a slice's samples only the first one's is known, the others follow
        it.
    waiting, idle, collecting: the share (0 to 1) of its slice's own samples in which the thread waited for the GIL,
        slept, or ran the garbage collector.
    """

    time: Ints
    place: Ints
    weight: Floats
    step: Ints
    sure: Flags
    waiting: Floats
    idle: Floats
    collecting: Floats

    def __len__(self) -> int:
        return len(self.time)


def host_steps(context: Context) -> TrainingSteps:
    """Returns the steps of the training thread."""
    found, thread = context.get(paced_steps), context.get(training_thread)
    whole = len(found) > 0
    found = found if whole else context.get(steps)
    if not len(found):
        measured = context.get(measured_steps)  # the last range: only the one before it may be left out
        window = measured.start[-1:], measured.end[-1:]
        return TrainingSteps(thread, *window, np.zeros(1, np.int64), told=False, whole=False)
    own = found.thread == thread
    start, end = found.start[own], np.minimum(found.end[own], np.append(found.start[own][1:], found.end[own][-1]))
    return TrainingSteps(thread, start, end, found.number[own], told=True, whole=whole)


@dataclass(frozen=True, slots=True)
class ThreadSlices:
    """The Python slices of the training thread, outer ones first.

    row: of python_function.
    parent: place of the caller's slice as recorded, or NOTHING. By their times, sampled slices may lie inside others:
        some end too early, and some are moved to where operators begin.
    depth: larger than the caller's.
    """

    nested: Nested
    row: Ints
    parent: Ints
    depth: Ints

    def __len__(self) -> int:
        return len(self.row)


def thread_slices(context: Context) -> ThreadSlices:
    """Returns the slices of the thread of host_steps."""
    nested = context.get(python_tree).of_thread(context.get(host_steps).thread)
    table, row = context.trace.table("python_function"), nested.order.astype(np.int64)
    place = np.full(len(table) + 1, NOTHING, np.int64)  # the last one is for "no caller"
    place[row] = np.arange(len(row))
    depth = table["depth"][row].astype(np.int64)
    parent = place[np.clip(table["parent"][row], NOTHING, len(table))]
    inner = np.append(depth, np.iinfo(np.int64).max)[parent] < depth  # files may contain anything
    return ThreadSlices(nested, row, np.where(inner, parent, NOTHING), depth)


def slices_below(context: Context, names: Flags) -> Flags:
    """Returns for each slice of thread_slices whether it, or one around it, has one of these names (per string)."""
    slices = context.get(thread_slices)
    chosen = names[context.trace.table("python_function")["name"][slices.row]]
    return in_subtrees(chosen, slices.nested.tree.stop)


def told_by_samples(context: Context) -> bool:
    """Returns whether the training thread's functions are known by samples, not by exact calls."""
    own = context.trace.table("python_function")["self_samples"][context.get(thread_slices).row]
    return bool((own > 0).any())


def moments(context: Context) -> HostMoments:
    """Returns the moments of the training thread inside its steps."""
    table, window, found = context.trace.table("python_function"), context.get(host_steps), context.get(thread_slices)
    own = _fewer(np.maximum(table["self_samples"][found.row].astype(np.int64), 0))
    stretches = _stretches(found, window)
    sampled = context.get(told_by_samples)
    time, place, weight = _of_samples(stretches, own, found) if sampled else _of_calls(stretches)
    step = window.of(time)
    inside = step >= 0
    time, place, weight, step = time[inside], place[inside], weight[inside], step[inside]
    sure = np.append(True, place[1:] != place[:-1])[: len(place)] if sampled else np.ones(len(place), np.bool_)
    if sampled:
        weight = weight * window.total_ns / max(len(time), 1)
    row = found.row[place]
    counts = state_counts(table)[row]
    seen = np.maximum(counts.sum(axis=1), 1)
    shares = counts[:, WAITING] / seen, counts[:, IDLE] / seen, np.minimum(table["collecting"][row] / seen, 1)
    return HostMoments(time, place, weight, step, sure, *shares)


class _Stretches(NamedTuple):
    """Spans of time, and the innermost slice in each, sorted by slice and time."""

    start: Ints
    length: Ints
    place: Ints


def _stretches(found: ThreadSlices, window: TrainingSteps) -> _Stretches:
    nested = found.nested
    edges = unique_values(np.concatenate([nested.events.start, nested.tree.end, window.start, window.end]))
    inner = nested.innermost(np.full(len(edges) - 1, window.thread, np.uint32), edges[:-1]).astype(np.int64)
    order = np.argsort(inner, kind="stable")
    order = order[inner[order] >= 0]
    return _Stretches(edges[:-1][order], np.diff(edges)[order], inner[order])


def _fewer(own: Ints) -> Ints:
    """Scales the samples of all slices down to the maximum in total: a file may contain any number."""
    until = np.cumsum(own)
    share = -(-int(until[-1]) // MAX_MOMENTS) if len(own) else 1
    return np.diff(until // share, prepend=0) if share > 1 else own


def _of_samples(stretches: _Stretches, own: Ints, found: ThreadSlices) -> tuple[Ints, Ints, Floats]:
    """Returns times, slices and weights (1) of samples."""
    total = sums(stretches.place, stretches.length, len(found))
    ends = np.cumsum(stretches.length)
    base = np.zeros(len(found), np.int64)  # where the spans of each slice begin, if concatenated
    base[1:] = np.cumsum(total)[:-1]
    place = np.repeat(np.arange(len(found)), own)
    within = np.arange(len(place)) - np.repeat(np.cumsum(own) - own, own)
    at = base[place] + within * total[place] // own[place]
    stretch = np.minimum(np.searchsorted(ends, at, side="right"), max(len(ends) - 1, 0))
    offset = at - (ends[stretch] - stretches.length[stretch])
    time = np.where(total[place] > 0, stretches.start[stretch] + offset, found.nested.events.start[place])
    return time, place, np.ones(len(place))


def _of_calls(stretches: _Stretches) -> tuple[Ints, Ints, Floats]:
    """Returns times, slices and weights (ns) of pieces of exact calls."""
    piece = max(EXACT_NS, int(stretches.length.sum()) // MAX_MOMENTS)
    count = np.maximum((stretches.length + piece // 2) // piece, 1)
    place = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count)
    length = stretches.length / count
    time = stretches.start[place] + (within * length[place]).astype(np.int64)
    return time, stretches.place[place], length[place]


def host_time_lost(context: Context) -> Flags:
    """Returns for each moment whether the host loses time then: while no GPU works. Without GPU work: always."""
    found, activity = context.get(moments), context.get(gpu)
    if not len(activity):
        return np.ones(len(found), np.bool_)
    free: Flags = containing(*union(activity.start, activity.end), found.time) < 0
    return free


@dataclass(frozen=True, slots=True)
class CallTree:
    """A tree of calls.

    name, parent, user: of each node; outer ones first.
    node: of each slice of thread_slices.
    """

    name: Ints
    parent: Ints
    user: Flags
    node: Ints

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class UserCalls(CallTree):
    """The nodes, and of each slice of thread_slices:

    phase: innermost StepPhase.
    kind: CallKind.
    outer: the kind of the library that called the innermost user's function.
    loading: whether the slice is below the DataLoader.
    part: whether the slice is a part of a user's function around it.
    user_slice, phase_slice: place of the innermost slice at or above each slice that is of a user's function, or began
        a phase (a module's forward begins one inside another one, too).
    """

    phase: Ints8
    kind: Ints8
    outer: Ints8
    loading: Flags
    part: Flags
    user_slice: Ints
    phase_slice: Ints


@dataclass(frozen=True, slots=True)
class SliceCallees:
    """Callees of the slices of thread_slices, one value per slice, line and callee.

    name: place in `names`.
    kind: CallKind.
    share: of the slice's own samples.
    """

    names: list[str]
    place: Ints
    line: Ints
    name: Ints
    kind: Ints
    share: Floats


@dataclass(frozen=True, slots=True)
class TrainedCallees:
    """Callees whose samples are in operators with a backward.

    callee: per name of slice_callees.
    moment: per moment.
    """

    callee: Flags
    moment: Flags


def user_calls(context: Context) -> UserCalls:
    """Returns the tree of the training thread."""
    slices, kinds, begins = context.get(thread_slices), context.get(function_kinds), context.get(phases_by_name)
    name = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    user, own_phase, own_kind = kinds.user[name], begins[name], kinds.call[name]
    count = len(slices)
    phase, kind, outer = (np.zeros(count + 1, np.int8) for _ in range(3))  # the last one is for "no caller"
    loading = np.zeros(count + 1, np.bool_)
    part = kinds.part[name]
    in_user, in_phase = (np.full(count + 1, NOTHING, np.int64) for _ in range(2))
    for at, above in levels(slices):
        part[at] &= in_user[above] != NOTHING
        user[at] &= ~part[at]
        in_user[at] = np.where(user[at], at, in_user[above])
        calling = np.where(kind[above] != CallKind.NONE, kind[above], outer[above])
        outer[at] = np.where(user[at], calling, outer[above])
        kind[at] = _kinds(own_kind[at], kind[above], user[at])
        again = (own_phase[at] == StepPhase.FORWARD) & (phase[above] == StepPhase.RECOMPUTATION)
        own_phase[at] = np.where(again, StepPhase.RECOMPUTATION, own_phase[at])
        begins_phase = ~np.isin(own_phase[at], (StepPhase.NONE, StepPhase.CLOSURE)) & (kind[at] != CallKind.IMPORT)
        in_phase[at] = np.where(begins_phase, at, in_phase[above])
        leaves = (own_phase[at] == StepPhase.CLOSURE) & (phase[above] == StepPhase.OPTIMIZER)
        phase[at] = np.select([begins_phase, leaves], [own_phase[at], StepPhase.NONE], phase[above])
        loading[at] = loading[above] | (begins_phase & (own_phase[at] == StepPhase.LOADING))
    tree = call_tree(slices, name, user, opens=user, part=part)
    return UserCalls(
        tree.name,
        tree.parent,
        tree.user,
        tree.node,
        phase[:-1],
        kind[:-1],
        outer[:-1],
        loading[:-1],
        part,
        in_user[:-1],
        in_phase[:-1],
    )


def _kinds(own: Ints8, above: Ints8, user: Flags) -> Ints8:
    """The kind of each slice. own: of its function alone. above: of its caller's slice."""
    kept = np.where(user & ~np.isin(above, STICKY), CallKind.NONE, above)
    stronger = np.isin(own, STICKY) & ~np.isin(kept, (*STICKY, CallKind.IMPORT))
    stronger |= (own == CallKind.IMPORT) & (kept == CallKind.RESET)
    kinds: Ints8 = np.where((kept == CallKind.NONE) | stronger, own, kept)
    return kinds


def levels(slices: ThreadSlices) -> Iterator[tuple[Ints, Ints]]:
    """Yields the places of the slices of each depth, outer ones first, and the places of their callers."""
    order = np.argsort(slices.depth, kind="stable")
    bounds = np.append(np.unique(slices.depth[order], return_index=True)[1], len(order))
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        at = order[first:last]
        yield at, slices.parent[at]


def call_tree(slices: ThreadSlices, name: Ints, user: Flags, opens: Flags, part: Flags) -> CallTree:
    """Returns the tree of these slices. User's functions, and the callees of slices that open, have nodes.

    name, user, opens: of each slice. All others belong to the node of their caller, and so do parts of a function.
    """
    node = np.full(len(slices) + 1, NOTHING, np.int64)  # the last one is for "no caller"
    opens = np.append(opens, True)
    names, parents, users = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
    made = 0
    for at, above in levels(slices):
        new = (user[at] | opens[above]) & ~part[at]
        opens[at] |= part[at] & opens[above]
        node[at] = node[above]
        groups = group([node[above[new]], name[at[new]]])
        node[at[new]] = groups.number + made
        first = at[new][groups.first]
        names.append(name[first])
        parents.append(node[slices.parent[first]])
        users.append(user[first])
        made += len(groups)
    return CallTree(np.concatenate(names), np.concatenate(parents), np.concatenate(users), node[:-1])


def inclusive_sums(tree: CallTree, own: AnyArray) -> Floats:
    """Returns for each node the sum over it and all nodes below. own: a value, or a row of values, for each node."""
    total = own.astype(np.float64)
    for node in range(len(tree) - 1, -1, -1):  # inner nodes have larger numbers
        above = tree.parent[node]
        if above != NOTHING:
            total[above] += total[node]
    return total


def below(tree: CallTree, begins: Flags) -> Flags:
    """Returns for each node whether it, or one that called it, is one of these."""
    found = begins.copy()
    for node in range(len(tree)):  # outer nodes have smaller numbers
        found[node] |= tree.parent[node] != NOTHING and found[tree.parent[node]]
    return found


def heaviest_below(tree: CallTree, weight: Floats) -> Ints:
    """Returns for each node the child with most weight (the first if equal), or NOTHING."""
    heaviest = np.full(len(tree) + 1, NOTHING, np.int64)  # the last one is for "no caller"
    order = np.lexsort((-np.arange(len(tree)), weight))
    heaviest[tree.parent[order]] = order
    return heaviest[:-1]


def slice_callees(context: Context) -> SliceCallees:
    """Returns the callees of the training thread."""
    told, slices, table = context.get(_samples), context.get(thread_slices), context.trace.table("python_function")
    place = np.full(len(table), NOTHING, np.int64)
    place[slices.row] = np.arange(len(slices))
    own = place[told.row] != NOTHING
    row, name = told.row[own], told.name[own]
    kinds = np.array([callee_kind(text) for text in told.names], np.int64)
    share = np.minimum(told.counts[own].sum(axis=1) / np.maximum(table["self_samples"][row], 1), 1.0)
    return SliceCallees(told.names, place[row], told.line[own], name, kinds[name] if len(name) else name, share)


def own_callees(context: Context) -> tuple[list[str], Ints]:
    """Returns the names of callees, and for each row of python_function the place of its callee among them.

    That is the callee with most samples at the line of own_lines; NOTHING if more of these have none.
    """
    told, lines = context.get(_samples), context.get(own_lines)
    all_of_line = np.zeros(len(lines), np.int64)
    by_line = line_samples(context.trace)
    here = by_line.line == lines[by_line.row]
    np.add.at(all_of_line, by_line.row[here], by_line.counts[here].sum(axis=1))
    found = np.full(len(lines), NOTHING, np.int64)
    mine = np.flatnonzero(told.line == lines[told.row])
    counts = told.counts[mine].sum(axis=1)
    order = np.argsort(counts, kind="stable")
    mine, counts = mine[order], counts[order]
    without = all_of_line.copy()
    np.subtract.at(without, told.row[mine], counts)
    best = counts >= without[told.row[mine]]
    found[told.row[mine[best]]] = told.name[mine[best]]
    return told.names, found


def _samples(context: Context) -> CalleeSamples:
    return callee_samples(context.trace)


def trained_callees(context: Context) -> TrainedCallees:
    """Returns which callees of the user's functions are operators with a backward, and which moments count for them."""
    told, found, calls = context.get(slice_callees), context.get(moments), context.get(user_calls)
    slices = len(context.get(thread_slices))
    chosen, took = np.zeros(len(found), np.bool_), _took(context, told.names)
    own = (calls.kind == CallKind.NONE) & (calls.user_slice == np.arange(slices))
    use = np.flatnonzero(own[told.place])
    weight = np.bincount(found.place, found.weight, slices)
    spent = np.bincount(told.name[use], weight[told.place[use]] * told.share[use], len(took))
    callee: Flags = (took > 0) & (spent <= LONGER * took + FEW * weight.sum() / max(len(found), 1))
    use = use[callee[told.name[use]]]
    share = np.minimum(np.bincount(told.place[use], told.share[use], slices), 1.0)
    mine = np.flatnonzero(share[found.place] > 0)
    for place, rows in places_by_value(found.place[mine].astype(np.int64)):
        count = round(float(share[place]) * len(rows))
        chosen[mine[rows[len(rows) - count :]]] = True
    return TrainedCallees(callee, chosen)


def _took(context: Context, names: list[str]) -> Floats:
    """Returns for each callee the time (ns) of the operators of its name; 0 unless nearly all have a backward."""
    table, window, tree = context.trace.table("cpu_op"), context.get(host_steps), context.get(ops)
    outermost = (tree.nested.tree.parent[tree.place] < 0) & (table["thread"] == window.thread)
    rows = np.flatnonzero(outermost)
    rows = rows[window.of(table["start"][rows]) >= 0]
    linked, name = context.get(op_roles).linked[rows], table["name"][rows]
    count = len(context.trace.strings)
    total, trained = np.bincount(name, minlength=count), np.bincount(name, linked, count)
    time = np.bincount(name, table["duration"][rows] * linked, count) * (trained >= NEARLY_ALL * np.maximum(total, 1))
    place = {context.trace.strings[number]: number for number in np.flatnonzero(time > 0).tolist()}
    at = [place.get("aten::" + text.rpartition(".")[2], NOTHING) if "." in text else NOTHING for text in names]
    return np.append(time, 0.0)[np.array(at, np.int64)] if at else np.zeros(0)


def own_lines(context: Context) -> Ints:
    """Returns for each row of python_function the line with most of its own samples; 0 if unknown."""
    told = line_samples(context.trace)
    known = told.line > 0
    lines = context.trace.table("python_function")["line"].astype(np.int64)
    order = np.argsort(told.counts.sum(axis=1), kind="stable")
    order = order[known[order]]
    lines[told.row[order]] = told.line[order]
    return lines


def user_lines(context: Context) -> Ints:
    """Returns for each moment the line in its innermost function of the user; 0 if unknown.

    A slice states the line at which it was called. Where a trace does not record that, a slice that calls others has
    the line of most of its samples, if there are few of them or all belong to one child.
    """
    found, calls, slices = context.get(moments), context.get(user_calls), context.get(thread_slices)
    if not len(calls):
        return np.zeros(len(found), np.int64)
    table = context.trace.table("python_function")
    inner = calls.user_slice[found.place]
    row = slices.row[inner]
    samples = table["samples"][slices.row].astype(np.int64)
    entry = _child_toward(found.place, inner, slices.parent)
    sure = (samples[inner] <= FEW_ON_A_LINE) | (2 * samples[entry] > samples[inner])
    told = table["call_line"][slices.row[entry]]
    called = np.where(told > 0, told, np.where(sure, table["line"][row], 0))
    lines: Ints = np.where(inner == found.place, context.get(own_lines)[row], called)
    return np.where(inner == NOTHING, 0, lines)


def commonest_place(context: Context, rows: Ints, weight: Floats) -> CodePlace | None:
    """Returns the user's function, with its line, that has most weight of these moments; None if none is known.

    rows: places of moments.
    weight: of each of them.

    Moments whose line is unknown count only if no line is known.
    """
    calls, slices = context.get(user_calls), context.get(thread_slices)
    inner, lines = calls.user_slice[context.get(moments).place[rows]], context.get(user_lines)[rows]
    known = (inner != NOTHING) & (weight > 0)
    if (known & (lines > 0)).any():
        known &= lines > 0
    if not known.any():
        return None
    names = context.trace.table("python_function")["name"][slices.row[inner[known]]].astype(np.int64)
    groups = group([names, lines[known]])
    best = int(groups.first[int(np.argmax(groups.sums(weight[known])))])
    return code_place(context.trace.strings[int(names[best])], int(lines[known][best]))


def _child_toward(place: Ints, inner: Ints, parent: Ints) -> Ints:
    """Returns the slice directly below `inner` on the path to `place`; `place` itself where they are the same."""
    at = place.copy()
    while True:
        up = (at != inner) & (inner != NOTHING) & (parent[at] != inner)
        if not up.any():
            return at
        at[up] = parent[at[up]]
