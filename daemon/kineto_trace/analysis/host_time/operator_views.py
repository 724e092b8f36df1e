"""The operator table: host and device time of every operator, by name, by input shapes, by call stack."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.op_inputs import input_shapes
from kineto_trace.analysis.host_time.op_times import op_times, tensor_times
from kineto_trace.arrays.row_groups import Groups, group
from kineto_trace.compat.tensorboard.plugin_backward import plugin_backward
from kineto_trace.compat.tensorboard.plugin_order import visiting_order
from kineto_trace.compat.tensorboard.plugin_steps import plugin_roles
from kineto_trace.compat.tensorboard.plugin_tree import plugin_tree
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.call_stacks import NO_STACK, call_stacks, told_stacks
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

NAME, NAME_AND_SHAPE = "name", "name+shape"
NO_SHAPE = "[]"  # the plug-in's shape of an operator whose inputs were not recorded
NS_PER_US = 1000
_ON_GPU = 3  # of the plug-in's roles: kernels that do not communicate, copies, fills

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@view(
    "operators",
    columns(
        ("name", "text", "", "operator"),
        ("input_shape", "text", "", "shapes of its inputs; only with group_by=name+shape, if they were recorded"),
        ("calls", "int", "", "how often it ran"),
        ("device_self_us", "float", "us", "GPU time that its own calls caused, summed"),
        ("device_total_us", "float", "us", "and that of the operators inside it"),
        ("host_self_us", "float", "us", "host time less that of operators inside it and of its own runtime calls"),
        ("host_exclusive_us", "float", "us", "host time less that of operators inside it (PyTorch's self CPU time)"),
        ("host_total_us", "float", "us", "host time from start to end"),
        ("tensor_core_eligible", "bool", "", "it, or an operator inside it, can use tensor cores"),
        ("tensor_core_self_pct", "float", "%", "share of device_self_us in kernels that use tensor cores"),
        ("tensor_core_total_pct", "float", "%", "share of device_total_us in kernels that use tensor cores"),
        ("call_stack", "text", "", "Python frames from the innermost outwards; only with stacks"),
    ),
    compat=(Compat.PLUGIN,),
)
def operators(context: Context, *, compat: Compat = Compat.NONE, group_by: str = NAME, stacks: bool = False) -> Answer:
    """Operators by name: how often each ran, and its time on the host and on the GPU.

    A kernel, copy or fill belongs to the operator that is the innermost one around the call that caused it, found by
    the correlation id. Times are sums over all calls; what ran at the same time counts each time. An operator's
    total has all operators inside it, so that totals of different rows must not be added.

    group_by: "name", or "name+shape" for one row per distinct input shapes. stacks: one row per distinct call stack
    too, from the recorded call stacks or else from the Python functions of the trace; operators without a stack have
    a row of their own. The rows with the most device_self_us come first, without GPU work those with the most
    host_self_us.

    compat=plugin: the operator view of the TensorBoard profiler plug-in. Its calls belong to operators by external
    ids, operators that overlap by rounding are dropped, an operator inside its only namesake is not counted, names
    tell tensor cores by the plug-in's list, and only recorded call stacks count (operators without are left out
    then). Data loading, optimizer steps and DDP's forward are no operators.
    """
    if group_by not in (NAME, NAME_AND_SHAPE):
        raise ViewError(f"view operators: group_by={group_by!r} is not known; use {NAME} or {NAME_AND_SHAPE}")
    by_shape = group_by == NAME_AND_SHAPE
    if compat is Compat.PLUGIN:
        return _plugin(context, by_shape=by_shape, stacks=stacks)
    table, times, tensor = context.trace.table("cpu_op"), context.get(op_times), context.get(tensor_times)
    shapes = context.get(input_shapes) if by_shape else None
    keys: list[npt.NDArray[Any]] = [table["name"]]
    if shapes is not None:
        keys.append(shapes.number)
    if stacks:
        keys.append(context.get(call_stacks).of_op)
    groups = group(keys)
    sums = {
        "device_self_us": groups.sums(times.device_self) / NS_PER_US,
        "device_total_us": groups.sums(times.device_total) / NS_PER_US,
        "host_self_us": groups.sums(times.host_self) / NS_PER_US,
        "host_exclusive_us": groups.sums(times.host_exclusive) / NS_PER_US,
        "host_total_us": groups.sums(times.host_total) / NS_PER_US,
        "tensor_self": groups.sums(tensor.own) / NS_PER_US,
        "tensor_total": groups.sums(tensor.total) / NS_PER_US,
    }
    eligible = groups.sums(tensor.eligible) > 0
    on_gpu = len(context.get(gpu)) > 0
    order = np.lexsort((-sums["host_self_us"], -sums["device_self_us"] if on_gpu else -sums["host_self_us"]))
    notes = []
    if shapes is not None and len(table) and shapes.texts == (None,):
        notes.append("the trace has no input shapes: record with record_shapes=True")
    if stacks and len(table) and (context.get(call_stacks).of_op == NO_STACK).all():
        notes.append("the trace has neither call stacks nor Python functions: record with with_stack=True")
    return _answer(context, groups, groups.sizes(), sums, eligible, order, shapes, _stacks(context, stacks), notes)


def _stacks(context: Context, stacks: bool) -> Any:
    return context.get(call_stacks) if stacks else None


def _answer(
    context: Context,
    groups: Groups,
    calls: Ints,
    sums: dict[str, Floats],
    eligible: npt.NDArray[np.bool_],
    order: Ints,
    shapes: Any,
    stacks: Any,
    notes: list[str],
    op_rows: Ints | None = None,
) -> Answer:
    """op_rows: the row of cpu_op of each grouped row; None: they are the rows of cpu_op."""
    first = groups.first[order] if op_rows is None else op_rows[groups.first[order]]
    table, strings = context.trace.table("cpu_op"), context.trace.strings
    values = {name: column[order] for name, column in sums.items() if name.endswith("_us")}
    return Answer(
        {
            **values,
            "name": [strings[number] for number in table["name"][first].tolist()],
            "input_shape": _texts(shapes, first),
            "calls": calls[order],
            "tensor_core_eligible": eligible[order],
            "tensor_core_self_pct": _share(sums["tensor_self"], sums["device_self_us"])[order],
            "tensor_core_total_pct": _share(sums["tensor_total"], sums["device_total_us"])[order],
            "call_stack": [None] * len(first)
            if stacks is None
            else [stacks.text(context.trace, number) for number in stacks.of_op[first].tolist()],
        },
        notes,
    )


def _texts(shapes: Any, rows: Ints) -> list[str | None]:
    if shapes is None:
        return [None] * len(rows)
    return [shapes.texts[number] for number in shapes.number[rows].tolist()]


def _share(part: Floats, whole: Floats) -> Floats:
    """Percent; 0 where there is nothing."""
    return np.divide(100 * part, whole, out=np.zeros(len(whole)), where=whole > 0)


def _plugin(context: Context, *, by_shape: bool, stacks: bool) -> Answer:
    tree, visits = context.get(plugin_tree), context.get(plugin_backward).visits
    nodes = np.flatnonzero(tree.operator & (visits > 0))
    nodes = nodes[np.argsort(context.get(visiting_order)[nodes], kind="stable")]
    rows, weights = tree.row[nodes], visits[nodes]
    told = context.get(told_stacks)
    if stacks:
        known = told.of_op[rows] != NO_STACK
        nodes, rows, weights = nodes[known], rows[known], weights[known]
    keys: list[npt.NDArray[Any]] = [tree.name[nodes]]
    shapes = _with_default(context) if by_shape else None
    if shapes is not None:
        keys.append(shapes[0][rows])
    if stacks:
        keys.append(told.of_op[rows])
    groups = group(keys)

    def total(values: Floats) -> Floats:
        return np.bincount(groups.number, weights=values[nodes] * weights, minlength=len(groups)).astype(np.float64)

    host_total = tree.end - tree.start
    calls = groups.sums(weights)
    inner = np.flatnonzero(tree.parent >= 0)
    in_children = np.bincount(tree.parent[inner], weights=host_total[inner], minlength=len(tree))
    sums = {
        "device_self_us": total(tree.device_self),
        "device_total_us": total(tree.device_total),
        "host_self_us": total(tree.host_self),
        "host_exclusive_us": total(host_total - in_children),
        "host_total_us": total(host_total),
        "tensor_self": total(tree.tensor_self),
        "tensor_total": total(tree.tensor_total),
    }
    on_gpu = any(len(role.start) for role in context.get(plugin_roles)[:_ON_GPU])
    order = np.argsort(-sums["device_self_us" if on_gpu else "host_self_us"], kind="stable")
    answer = _answer(
        context,
        groups,
        calls,
        sums,
        tree.eligible[nodes][groups.first],
        order,
        None,
        told if stacks else None,
        [],
        rows,
    )
    if shapes is None:
        return answer
    texts = [shapes[1][number] for number in shapes[0][rows[groups.first[order]]].tolist()]
    return Answer({**answer.values, "input_shape": texts}, answer.notes)


def _with_default(context: Context) -> tuple[Ints, list[str]]:
    """The plug-in's shapes: "[]" where they were not recorded."""
    shapes = context.get(input_shapes)
    texts = [NO_SHAPE if text is None else text for text in shapes.texts]
    first = {text: texts.index(text) for text in texts}
    number = np.array([first[text] for text in texts], np.int64)
    return number[shapes.number], texts
