"""The modules of two traces matched as in the diff view of the TensorBoard plug-in."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.diff.name_totals import (
    OPERATOR_TOTALS,
    OPERATORS,
    Side,
    by_name,
    delta_columns,
    measured,
    two,
)
from kineto_trace.arrays.row_groups import group
from kineto_trace.compat.tensorboard.plugin_diff_tree import TreeSide, diff_node, launched_device_times
from kineto_trace.compat.tensorboard.plugin_tree import plugin_tree
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

ROOT = "0"

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TREE = columns(
    ("path", "text", "", "path of the node: 0 is the root, 0-2 its child 2; the option path takes it"),
    ("depth", "int", "", "number of nodes around the node"),
    ("name", "text", "", "name of the node in the trace that has it"),
    ("name_baseline", "text", "", "name of the node in the baseline; CompositeNodes: several nodes; Blank: none"),
    ("name_other", "text", "", "name of the node in the other trace"),
    ("children", "int", "", "number of child nodes"),
    *measured("total", "us", "GPU time, or host time where there is no GPU time"),
    *measured("host", "us", "host time"),
    *measured("device", "us", "GPU time"),
    ("accumulated_baseline_us", "float", "us", "running sum of total_baseline over the children"),
    ("accumulated_other_us", "float", "us", "running sum of total_other over the children"),
    ("accumulated_delta_us", "float", "us", "running sum of their difference"),
)


def _tree(partials: Sequence[tuple[int, TreeSide]], *, path: str = ROOT) -> Answer:
    left, right = two(partials)
    node = diff_node(left, right, path)
    nodes = [node, *node.children]
    times = [_times(left, each.left) + _times(right, each.right) for each in nodes]
    table = np.array(times, np.float64).reshape(len(nodes), 6)
    values: dict[str, Any] = {}
    for number, name in enumerate(("total", "host", "device")):
        values |= delta_columns(name, "us", table[:, number], table[:, number + 3])
    running = np.cumsum(table[1:], axis=0)
    values["accumulated_baseline_us"] = np.concatenate([[np.nan], running[:, 0]])
    values["accumulated_other_us"] = np.concatenate([[np.nan], running[:, 3]])
    values["accumulated_delta_us"] = values["accumulated_other_us"] - values["accumulated_baseline_us"]
    values["path"] = [path, *(f"{path}-{number}" for number in range(len(node.children)))]
    values["depth"] = [each.count("-") for each in values["path"]]
    values["name"] = [each.name(*((right, each.right) if len(each.right) else (left, each.left))) for each in nodes]
    values["name_baseline"] = [each.name(left, each.left) for each in nodes]
    values["name_other"] = [each.name(right, each.right) for each in nodes]
    values["children"] = [len(each.children) for each in nodes]
    return Answer(values)


@view("diff_tree", TREE, reduce=_tree)
def diff_tree(context: Context) -> TreeSide:
    """The modules of two traces matched: the node at `path` in the first row, then its children in their order.

    Steps, modules, their backward passes, optimizer steps and data loading are matched by kind and name in order, as in
    the diff view of the TensorBoard profiler plug-in; everything between them is put together. Times are sums over all
    steps. Only the first thread counts. GPU time belongs to the node in which its call was made.

    Options:
    - path: the node, as in the column `path`: 0 is the root, 0-2 its child 2.
    """
    return TreeSide(context, context.get(launched_device_times))


def _tree_operators(partials: Sequence[tuple[int, TreeSide]], *, path: str = ROOT) -> Answer:
    left, right = two(partials)
    node = diff_node(left, right, path)
    sides = [(0, _inside(left, node.left)), (1, _inside(right, node.right))]
    return Answer(by_name(sides, OPERATORS, ("device_total", "host_total")))


@view("diff_tree_operators", OPERATOR_TOTALS, reduce=_tree_operators)
def diff_tree_operators(context: Context) -> TreeSide:
    """The operators inside one node of the view diff_tree in two traces, by name: sums over all steps.

    Those with the largest difference of GPU time, or else of host time, come first.

    Options:
    - path: the node, as in the column `path` of diff_tree: 0 is the root, 0-2 its child 2.
    """
    return diff_tree.function(context)  # type: ignore[no-any-return]


@diff_tree.variant(Compat.PLUGIN)
@diff_tree_operators.variant(Compat.PLUGIN)
def plugin_tree_side(context: Context) -> TreeSide:
    """compat=plugin: the diff view of the TensorBoard profiler plug-in: GPU time counts where external ids lead to."""
    return TreeSide(context, context.get(plugin_tree).device_self)


def _times(side: TreeSide, items: Ints) -> list[float]:
    """Returns total, host and device time, in µs."""
    host, device = side.times(items)
    return [float(np.where(device != 0, device, host).sum()), float(host.sum()), float(device.sum())]


def _inside(side: TreeSide, items: Ints) -> Side:
    tree, weight = side.tree, side.operators(items)
    nodes = np.flatnonzero(weight > 0)
    groups, times = group([tree.name[nodes]]), weight[nodes]
    columns_us = {
        "device_total": side.device_total,
        "device_self": side.device_self,
        "host_total": tree.end - tree.start,
        "host_self": tree.host_self,
    }

    def total(values: Floats) -> Floats:
        return np.bincount(groups.number, weights=values, minlength=len(groups)).astype(np.float64)

    measures = {name: total(column[nodes] * times) for name, column in columns_us.items()}
    names = [side.strings[number] for number in tree.name[nodes][groups.first].tolist()]
    return Side(names, {"calls": total(times.astype(np.float64)), **measures})
