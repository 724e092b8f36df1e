"""What is compared between traces: roles of a step, operators, kernels, modules and call paths, each with its times."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.diff.step_samples import (
    GPU,
    HOST,
    NS_PER_US,
    StepSamples,
    TimedEvents,
    compared_steps,
    gpu_moments,
    samples,
)
from kineto_trace.analysis.host_time.op_times import op_times
from kineto_trace.analysis.overview.step_breakdown import OTHER, ROLES, partition, roles
from kineto_trace.arrays.row_groups import sums
from kineto_trace.kernel_traits.kernel_types import short_name
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING, calls, gpu, inside_equals, ops, owners, step_names
from kineto_trace.structure.event_tree import KINDS, build
from kineto_trace.structure.module_calls import LIGHTNING_MODULE, TORCH_PREFIX, backward_roots, module_calls, paths

STEP = "step"  # the row of the whole step, and the kind of time of the parts that sum up to it
NO_OPERATOR = "(no operator)"
BACKWARD = " (backward)"
_INSIDE = " > "  # between the names of a call path
_STEPS = STEP_PREFIX.rstrip("#")

Ints = npt.NDArray[np.int64]


def role_samples(context: Context) -> StepSamples:
    """The whole step, and the roles of step_breakdown.py that sum up to it."""
    found = compared_steps(context)
    trace, length = context.trace, found.end - found.start
    start, end = (np.append(*pair) for pair in ((found.start, trace.window_start_ns), (found.end, trace.window_end_ns)))
    shares = partition(context.get(roles), start, np.maximum(end, start)) / NS_PER_US
    us, total = np.vstack([length / NS_PER_US, shares[:, :-1]]), np.append(0, shares[:, -1])
    bare = samples(context, (), ())
    return replace(
        bare,
        names=tuple((name, STEP) for name in (STEP, *ROLES, OTHER)),
        us=us,
        calls=(us > 0).astype(np.float64),
        total_us=total,
        total_calls=(total > 0).astype(np.float64),
    )


def operator_samples(context: Context, *, total: bool) -> StepSamples:
    """Operators by name. total: with the operators inside them; inside one of its name an operator adds nothing."""
    table, times, activity = context.trace.table("cpu_op"), context.get(op_times), context.get(gpu)
    name = table["name"].astype(np.int64)
    outer = ~inside_equals(context, name)
    host = TimedEvents(HOST, name, table["start"], times.host_total * outer if total else times.host_exclusive)
    outside = len(context.trace.strings)
    owner = context.get(owners)
    is_step = np.append(context.get(step_names), False)
    owner = np.where((owner == NOTHING) | is_step[owner], outside, owner)
    took, moment = activity.end - activity.start, context.get(gpu_moments).at
    own = TimedEvents(GPU, owner, moment, took)
    if total:
        of, node = _around(activity.op, _op_parents(context))
        of, node = of[outer[node]], node[outer[node]]
        of, key = np.append(of, np.flatnonzero(activity.op < 0)), np.append(name[node], owner[activity.op < 0])
        own = TimedEvents(GPU, key, moment[of], took[of])
    return samples(context, (host, own), (*context.trace.strings, NO_OPERATOR))


def kernel_samples(context: Context, *, short_names: bool) -> StepSamples:
    """Kernels, copies and fills by name."""
    activity, strings = context.get(gpu), context.trace.strings
    key, names = activity.name.astype(np.int64), strings
    if short_names:
        used, place = np.unique(key, return_inverse=True)
        shorter = [short_name(strings[number]) for number in used.tolist()]
        names = list(dict.fromkeys(shorter))
        at = {text: number for number, text in enumerate(names)}
        key = np.array([at[text] for text in shorter], np.int64)[place]
    return samples(context, [TimedEvents(GPU, key, context.get(gpu_moments).at, activity.end - activity.start)], names)


def module_samples(context: Context, *, total: bool) -> StepSamples:
    """Modules by their path, and their backward passes."""
    found, activity, times = context.get(module_calls), context.get(gpu), context.get(op_times)
    table, length = context.trace.table("cpu_op"), found.end - found.start
    inside = np.flatnonzero(found.parent >= 0)
    host = length if total else length - sums(found.parent[inside], length[inside], len(found))
    names = _chains(found.path, found.parent, [_module(text) for text in context.trace.strings], found.name, "/")
    took, moment = activity.end - activity.start, context.get(gpu_moments).at
    of, node = _around(found.activity, found.parent if total else np.full(len(found), NOTHING))
    module = np.append(found.path, NOTHING)[_backward_modules(context, found.op)]  # per row of cpu_op
    back = np.flatnonzero(module >= 0)
    back_of, root = _around(activity.op, _op_parents(context))
    back_of, root = back_of[module[root] >= 0], root[module[root] >= 0]
    parts = [
        TimedEvents(HOST, found.path, found.start, host),
        TimedEvents(GPU, found.path[node], moment[of], took[of]),
        TimedEvents(HOST, len(names) + module[back], table["start"][back], times.host_total[back]),
        TimedEvents(GPU, len(names) + module[root], moment[back_of], took[back_of]),
    ]
    notes = [] if len(found) else ["a trace has no calls of modules: record with with_modules=True or with_stack=True"]
    return samples(context, parts, [*names, *(name + BACKWARD for name in names)], notes)


def _backward_modules(context: Context, call_of_op: Ints) -> Ints:
    """For each row of cpu_op the call of the module whose backward pass it runs; NOTHING: none."""
    found = np.full(len(context.trace.table("cpu_op")), NOTHING, np.int64)
    root, forward = backward_roots(context)
    found[root] = call_of_op[forward]
    return found


def _op_parents(context: Context) -> Ints:
    """For each row of cpu_op the row of the operator around it; NOTHING: none."""
    tree = context.get(ops)
    above = tree.nested.tree.parent[tree.place].astype(np.int64)
    return np.where(above >= 0, tree.row[above], NOTHING) if len(above) else above


def _around(node: Ints, parent: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """All pairs of an item and a node around it. node: the innermost one of each item, NOTHING: none."""
    items, nodes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    item = np.flatnonzero(node >= 0)
    level = node[item].astype(np.int64)
    while len(item):
        items.append(item)
        nodes.append(level)
        level = parent[level].astype(np.int64)
        item, level = item[level >= 0], level[level >= 0]
    return np.concatenate(items), np.concatenate(nodes)


def path_samples(context: Context, *, total: bool) -> StepSamples:
    """Operators and annotations by their chain of names."""
    trace, activity, called = context.trace, context.get(gpu), context.get(calls)
    tree = build({kind: trace.tables[kind] for kind in KINDS[1:] if kind in trace.tables}, trace.window_end_ns)
    name = np.zeros(len(tree), np.int64)
    for number, kind in enumerate(KINDS):
        own = tree.kind == number
        name[own] = trace.table(kind)["name"][tree.row[own]]
    steps = context.get(step_names)
    name = np.where(steps[name], np.argmax(steps), name) if steps.any() else name
    path = paths(tree.parent, tree.depth, name)
    texts = [_STEPS if is_step else text for text, is_step in zip(trace.strings, steps.tolist(), strict=True)]
    names = _chains(path, tree.parent, texts, name, _INSIDE)
    node = np.append(tree.innermost(called.thread, called.start).astype(np.int64), NOTHING)[activity.call]
    took, moment = activity.end - activity.start, context.get(gpu_moments).at
    of, around = _around(node, tree.parent if total else np.full(len(tree), NOTHING))
    host = TimedEvents(HOST, path, tree.start, tree.end - tree.start if total else tree.self_ns)
    return samples(context, [host, TimedEvents(GPU, path[around], moment[of], took[of])], names)


def _chains(
    path: Ints, parent: npt.NDArray[Any], texts: Sequence[str], name: npt.NDArray[Any], between: str
) -> list[str]:
    """The text of each path; outer paths have lower numbers. One loop per path."""
    count = int(path.max(initial=-1)) + 1
    first = np.full(count, len(path), np.int64)
    np.minimum.at(first, path, np.arange(len(path)))
    chains: list[str] = []
    for node in first.tolist():
        own = texts[int(name[node])]
        outer = int(parent[node])
        chains.append(own if outer < 0 else chains[int(path[outer])] + between + own)
    return chains


def _module(text: str) -> str:
    return text.removeprefix(TORCH_PREFIX).removeprefix(LIGHTNING_MODULE)
