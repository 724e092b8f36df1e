"""The module and operator views of the TensorBoard plug-in: hierarchies of modules, and figures of both.

Theory of operation
    The hierarchy comes from the Python calls: a module is below the nearest module among its callers. Trees of equal
    shape, names and numbers are merged; each other tree is shown in full. The figures of a module are those of all its
    calls (same name and number) in the operator tree, wherever it is in a hierarchy: host self is the time less that of
    children and own runtime calls, device self is the own GPU time and that of the direct child operators. Modules
    inside moved backward operators are not counted.

    With PyTorch Lightning the names define the hierarchy: "encoder.layer" is below "encoder" if there is such a module.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kineto_trace.analysis.host_time.operator_views import SEPARATOR, input_shapes, modules, operator_columns, operators
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, AnyArray, Floats, Ints, UInts64
from kineto_trace.compat.plugin_backward import depths, plugin_backward, visiting_order
from kineto_trace.compat.plugin_kernels import plugin_roles
from kineto_trace.compat.plugin_tree import Node, plugin_tree
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_MODULE
from kineto_trace.structure.call_forests import NO_STACK, recorded_stacks
from kineto_trace.structure.module_calls import NO_MODULES, TORCH_PREFIX, is_lightning, shown_names
from kineto_trace.view_api.view import Answer, Compat

Hashes = UInts64
NO_SHAPE = "[]"  # the shape of an operator whose inputs were not recorded
_ON_GPU = 3  # of the roles: kernels that do not communicate, copies, fills


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one module. Times are in µs."""

    occurrences: int
    operators: int
    host_total: float
    host_self: float
    device_total: float
    device_self: float


NO_FIGURES = Figures(0, 0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One line of the view. names: from the outermost module to this one."""

    names: tuple[str, ...]
    module: int
    figures: Figures


def plugin_modules(context: Context) -> list[ModuleRow]:
    """Returns all lines: outer modules before inner ones, and hierarchies sorted by name."""
    kind = Node.LIGHTNING_MODULE if is_lightning(context.trace) else Node.MODULE
    figures = _figures(context, kind)
    if not figures:
        return []
    if kind == Node.LIGHTNING_MODULE:
        return _lightning_rows(context, figures)
    return _torch_rows(context, figures)


def _figures(context: Context, kind: Node) -> dict[tuple[int, int], Figures]:
    """Returns the figures by name (number into Trace.strings) and module number."""
    tree, moved = context.get(plugin_tree), context.get(plugin_backward)
    wanted = tree.kind == kind
    if len(moved.removed):
        gone = np.bincount(moved.removed, minlength=len(tree) + 1).cumsum()
        gone -= np.bincount(tree.stop[moved.removed], minlength=len(tree) + 1).cumsum()
        wanted &= gone[:-1] == 0
    nodes = np.flatnonzero(wanted)
    if not len(nodes):
        return {}
    number = np.zeros(len(nodes), np.int64)
    if kind == Node.MODULE:
        number = context.trace.table("python_function")["module"][tree.row[nodes]].astype(np.int64)
    inner = np.flatnonzero((tree.parent >= 0) & tree.operator)
    operators = np.bincount(tree.parent[inner], minlength=len(tree))
    in_operators = np.bincount(tree.parent[inner], weights=tree.device_total[inner], minlength=len(tree))
    keys, of_node = np.unique(np.stack([tree.name[nodes].astype(np.int64), number]), axis=1, return_inverse=True)
    of_node = of_node.reshape(-1)

    def total(values: AnyArray) -> list[float]:
        found: list[float] = np.bincount(of_node, weights=values[nodes], minlength=keys.shape[1]).tolist()
        return found

    columns = zip(
        np.bincount(of_node, minlength=keys.shape[1]).tolist(),
        (int(count) for count in total(operators)),
        total(tree.end - tree.start),
        total(tree.host_self),
        total(tree.device_total),
        total(tree.device_self + in_operators),
        strict=True,
    )
    return {(name, module): Figures(*row) for (name, module), row in zip(keys.T.tolist(), columns, strict=True)}


def _torch_rows(context: Context, figures: dict[tuple[int, int], Figures]) -> list[ModuleRow]:
    table, strings = context.trace.table("python_function"), context.trace.strings
    rows = np.flatnonzero(table["module"] != NO_MODULE)
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    place = np.full(len(table) + 1, NOTHING, np.int64)
    place[rows] = np.arange(len(rows))
    above = table["parent"][rows].astype(np.int64)
    while True:  # up to the next module among the callers
        further = np.flatnonzero((above >= 0) & (place[above] == NOTHING))
        if not len(further):
            break
        above[further] = table["parent"][above[further]]
    parent = place[above]
    name, module = table["name"][rows].astype(np.int64), table["module"][rows].astype(np.int64)
    roots = np.flatnonzero(parent == NOTHING)
    shapes = _shapes(parent, _mixed(name.astype(np.uint64) << np.uint64(32) ^ module.astype(np.uint64)))
    first = np.sort(np.unique(shapes[roots], return_index=True)[1])
    children: dict[int, list[int]] = {}
    shown = np.zeros(len(rows) + 1, np.bool_)
    shown[roots[first]] = True
    below = np.flatnonzero(parent != NOTHING)
    while True:  # everything below the shown trees
        fresh = below[shown[parent[below]] & ~shown[below]]
        if not len(fresh):
            break
        shown[fresh] = True
    for each in below[shown[below]].tolist():
        children.setdefault(int(parent[each]), []).append(each)
    found: list[ModuleRow] = []
    waiting = [(root, ()) for root in roots[first].tolist()]
    waiting.sort(key=lambda entry: strings[int(name[entry[0]])].replace(TORCH_PREFIX, ""), reverse=True)
    stack: list[tuple[int, tuple[str, ...]]] = list(waiting)
    while stack:
        each, outer = stack.pop()
        names = (*outer, strings[int(name[each])].replace(TORCH_PREFIX, ""))
        number = int(module[each])
        found.append(ModuleRow(names, number, figures.get((int(name[each]), number), NO_FIGURES)))
        stack += [(child, names) for child in reversed(children.get(each, []))]
    return found


def _shapes(parent: Ints, own: Hashes) -> Hashes:
    """Returns for each module call a hash of its tree: of itself and of its children in their order."""
    depth = depths(parent)
    order = np.lexsort((np.arange(len(parent)), parent))
    begins = np.concatenate([[True], parent[order][1:] != parent[order][:-1]]) if len(order) else np.empty(0, np.bool_)
    first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0)) if len(order) else order
    turn = np.empty(len(parent), np.uint64)  # among the children of its parent
    turn[order] = (np.arange(len(order)) - first).astype(np.uint64)
    shape = own.copy()
    for level in range(int(depth.max(initial=0)), 0, -1):
        nodes = np.flatnonzero(depth == level)
        shape[nodes] = _mixed(shape[nodes])
        np.add.at(shape, parent[nodes], _mixed(shape[nodes] + turn[nodes] * np.uint64(0x9E3779B97F4A7C15)))
    return shape


def _mixed(values: Hashes) -> Hashes:
    """Applies the finalizer of splitmix64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    found: Hashes = values ^ values >> np.uint64(31)
    return found


def _lightning_rows(context: Context, figures: dict[tuple[int, int], Figures]) -> list[ModuleRow]:
    names = context.get(shown_names)
    merged: dict[str, Figures] = {}
    for (number, _), each in figures.items():
        name = names[number]
        old = merged.get(name, NO_FIGURES)
        merged[name] = Figures(
            old.occurrences + each.occurrences,
            old.operators + each.operators,
            old.host_total + each.host_total,
            old.host_self + each.host_self,
            old.device_total + each.device_total,
            old.device_self + each.device_self,
        )
    children: dict[str, list[str]] = {}
    for name in merged:
        above = name.rpartition(".")[0]
        children.setdefault(above if above in merged else "", []).append(name)
    found: list[ModuleRow] = []
    stack: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in sorted(children.get("", []), reverse=True)]
    while stack:
        name, outer = stack.pop()
        found.append(ModuleRow((*outer, name), 0, merged[name]))
        stack += [(child, (*outer, name)) for child in reversed(children.get(name, []))]
    return found


@modules.variant(Compat.PLUGIN)
def plugin_module_rows(context: Context) -> Answer:
    """compat=plugin: the module view of the TensorBoard profiler plug-in, for PyTorch Lightning its Lightning view.

    Every row has the figures of all calls of the module, wherever it was called from. Device time counts only if an
    operator has the external id. There are no backward figures.
    """
    rows = context.get(plugin_modules)
    missing = [None] * len(rows)
    return Answer(
        {
            "path": [SEPARATOR.join(row.names) for row in rows],
            "name": [row.names[-1] for row in rows],
            "module_id": [row.module for row in rows],
            "depth": [len(row.names) - 1 for row in rows],
            "occurrences": [row.figures.occurrences for row in rows],
            "operators": [row.figures.operators for row in rows],
            "host_total_us": [row.figures.host_total for row in rows],
            "host_self_us": [row.figures.host_self for row in rows],
            "host_overhead_us": [row.figures.host_self for row in rows],
            "device_total_us": [row.figures.device_total for row in rows],
            "device_self_us": [row.figures.device_self for row in rows],
            "backward_host_us": missing,
            "backward_device_us": missing,
        },
        [] if rows or not len(context.trace.table("cpu_op")) else [NO_MODULES],
    )


# The plug-in's operator view in the view operators.


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
