"""Functions of the program that compute in many small operators what few large ones could: loops over rows or numbers.

Theory of operation
    An operator belongs to the user's function that is the innermost one when it begins, unless a module runs between
    them: a model of many layers is no loop. On the CPU an operator below a few tens of us is mostly the cost of calling
    it. Each forward operator also has a backward, whose time counts with it. With a GPU the cost shows as idle time,
    which other findings explain.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings import remedies
from kineto_trace.analysis.host_findings.host_figures import is_enough, margin, per_step
from kineto_trace.analysis.host_time.host_moments import host_steps, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes, op_roles
from kineto_trace.analysis.host_time.user_calls import NOTHING, user_calls
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu, ops
from kineto_trace.structure.fwd_bwd import forward_backward
from kineto_trace.structure.python.code_places import code_place

MANY = 200  # outermost operators of one function in a step
SMALL_NS = 50_000  # of the function's time for each of them
REMAINS = 0.2  # of the time, in the large operators that take their place

Ints = npt.NDArray[np.int64]


def small_operators(context: Context) -> Iterator[Finding]:
    """Yields a finding for each function whose forward is a loop of small operators."""
    slices, calls = context.get(thread_slices), context.get(user_calls)
    if len(context.get(gpu)) or not len(calls):
        return
    names = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    rows, caller = _called_directly(context)
    if not len(rows):
        return
    functions, place, counts = np.unique(names[caller], return_inverse=True, return_counts=True)
    steps = max(len(context.get(host_steps).start), 1)
    backward = _backward_ns(context, rows, place.reshape(-1), len(functions))
    for number in np.flatnonzero(counts >= MANY * steps).tolist():
        mine = _moments_of(context, names, int(functions[number]))
        weight = float(context.get(moment_classes).weight[mine].sum())
        if weight > SMALL_NS * counts[number] or not is_enough(context, weight, len(mine)):
            continue
        whole = weight + float(backward[number])
        where = code_place(context.trace.strings[int(functions[number])])
        yield Finding(
            name="small_operators",
            title=f"{where.short} computes in {counts[number] / steps:,.0f} small operators a step",
            saving_ns=int(whole * (1 - REMAINS)),
            advice=remedies.SMALL_OPERATORS,
            evidence=f"{per_step(context, weight)}, {margin(context, weight)}, {weight / counts[number] / 1e3:.0f} us "
            f"for each operator, and {per_step(context, float(backward[number]))} in their backward; the saving "
            f"assumes that {100 * REMAINS:.0f} % of it remains",
            where=str(where),
        )


def _called_directly(context: Context) -> tuple[Ints, Ints]:
    """Outermost operators with a backward that user's functions call without a module: rows, and slices of callers."""
    table, slices, calls = context.trace.table("cpu_op"), context.get(thread_slices), context.get(user_calls)
    window, tree, roles = context.get(host_steps), context.get(ops), context.get(op_roles)
    outermost = tree.nested.tree.parent[tree.place] < 0
    rows = np.flatnonzero(outermost & (table["thread"] == window.thread) & roles.linked & ~roles.backward)
    rows = rows[window.of(table["start"][rows]) >= 0]
    inner = slices.nested.innermost(np.full(len(rows), window.thread, np.uint32), table["start"][rows]).astype(np.int64)
    rows, inner = rows[inner >= 0], inner[inner >= 0]
    caller = calls.user_slice[inner]
    direct = (caller != NOTHING) & (calls.phase[inner] == calls.phase[caller])
    return rows[direct], caller[direct]


def _moments_of(context: Context, names: Ints, function: int) -> Ints:
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    caller = calls.user_slice[found.place]
    direct = (caller != NOTHING) & (calls.phase[found.place] == calls.phase[caller]) & (names[caller] == function)
    return np.flatnonzero(direct & (classes.kind == Class.FORWARD))


def _backward_ns(context: Context, rows: Ints, place: Ints, count: int) -> Ints:
    """The time of the backward operators of these forward ones (with all inside them), by `place`."""
    table, tree = context.trace.table("cpu_op"), context.get(ops)
    links = forward_backward(context.trace.tables)
    group = np.cumsum(tree.nested.tree.parent < 0)[tree.place]  # the outermost operator around each
    of_group = np.full(int(group.max(initial=0)) + 1, NOTHING, np.int64)
    of_group[group[rows]] = place
    owner = of_group[group[links.forward_rows]]
    known = owner != NOTHING
    took = table["duration"][links.backward_rows[known]]
    total: Ints = np.bincount(owner[known], took, count).astype(np.int64)
    return total
