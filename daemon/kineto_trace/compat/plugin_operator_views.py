"""The plug-in's operator view in the view operators."""

from typing import Literal

import numpy as np

from kineto_trace.analysis.host_time.operator_views import input_shapes, operator_columns, operators
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import AnyArray, Floats, Ints
from kineto_trace.compat.plugin_backward import plugin_backward, visiting_order
from kineto_trace.compat.plugin_steps import plugin_roles
from kineto_trace.compat.plugin_tree import plugin_tree
from kineto_trace.model.context import Context
from kineto_trace.structure.call_stacks import NO_STACK, recorded_stacks
from kineto_trace.view_api.view import Answer, Compat

NO_SHAPE = "[]"  # the shape of an operator whose inputs were not recorded
_ON_GPU = 3  # of the roles: kernels that do not communicate, copies, fills


@operators.variant(Compat.PLUGIN)
def plugin_operators(
    context: Context, *, group_by: Literal["name", "name+shape"] = "name", stacks: bool = False
) -> Answer:
    """compat=plugin: the operator view of the TensorBoard profiler plug-in.

    Calls belong to operators by external ids, operators that overlap because of rounding are dropped, and an operator
    whose parent has the same name, and no other child, is not counted. The plug-in's list of names decides which
    kernels use tensor cores. Only recorded call stacks count; with `stacks`, operators without one are left out. Data
    loading, optimizer steps and DDP's forward are not operators. There is no cumulative share.
    """
    tree, visits = context.get(plugin_tree), context.get(plugin_backward).visits
    nodes = np.flatnonzero(tree.operator & (visits > 0))
    nodes = nodes[np.argsort(context.get(visiting_order)[nodes], kind="stable")]
    rows, weights = tree.row[nodes], visits[nodes]
    told = context.get(recorded_stacks)
    if stacks:
        known = told.of_op[rows] != NO_STACK
        nodes, rows, weights = nodes[known], rows[known], weights[known]
    keys: list[AnyArray] = [tree.name[nodes]]
    shapes = _with_default(context) if group_by == "name+shape" else None
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
    answer = operator_columns(
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
    """Returns the plug-in's shapes: "[]" where they were not recorded."""
    shapes = context.get(input_shapes)
    texts = [NO_SHAPE if text is None else text for text in shapes.texts]
    first = {text: texts.index(text) for text in texts}
    number = np.array([first[text] for text in texts], np.int64)
    return number[shapes.number], texts
