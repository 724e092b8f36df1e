"""Modules and call trees: where the time of the host and of the GPU goes, from the outside to the inside."""

from typing import Any

import numpy as np

from kineto_trace.analysis.host_time.operator_views import op_times, without_gpu
from kineto_trace.arrays.row_groups import subtree_sums, sums
from kineto_trace.base.array_types import NOTHING, Flags, Ints
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, ops
from kineto_trace.structure.event_tree import KINDS, build
from kineto_trace.structure.module_calls import (
    LIGHTNING_MODULE,
    NO_MODULES,
    ModuleCalls,
    backward_roots,
    module_calls,
    module_name,
    name_chains,
    paths,
)
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NS_PER_US = 1000
SEPARATOR = "/"
STEPS = "ProfilerStep"


@view(
    "modules",
    columns(
        ("path", "text", "", "names of the modules from the outermost to this one, separated by /"),
        ("name", "text", "", "the module's class, and its number among the modules of this class"),
        ("module_id", "int", "", "number that the profiler gave to the module"),
        ("depth", "int", "", "nesting depth; 0 is outermost"),
        ("occurrences", "int", "", "number of calls"),
        ("operators", "int", "", "number of operators that it called directly"),
        ("host_total_us", "float", "us", "host time of its calls"),
        (
            "host_self_us",
            "float",
            "us",
            "host time minus that of the modules inside (with compat=plugin, also minus that of its operators)",
        ),
        ("host_overhead_us", "float", "us", "host time spent in neither modules nor operators: Python"),
        ("device_total_us", "float", "us", "GPU time launched in its calls"),
        ("device_self_us", "float", "us", "GPU time launched in its calls but not in the modules inside"),
        (
            "backward_host_us",
            "float",
            "us",
            "host time of the backward operators of its operators, including those of the modules inside",
        ),
        ("backward_device_us", "float", "us", "GPU time of these backward operators"),
    ),
)
def modules(context: Context) -> Answer:
    """The modules of the model as they call each other, with the host and GPU time of each.

    There is one row per call path: a module that is called from two places has two rows. Outer modules come before
    inner ones, in the order of their first calls. An operator belongs to the innermost module that runs when it starts,
    a kernel to the one that runs when it is launched. The backward figures of a module are those of its forward
    operators, linked by autograd's sequence numbers; the other figures do not include them. With PyTorch Lightning,
    modules are its "[pl][module]" operators.
    """
    found = context.get(module_calls)
    count, path_count = len(found), int(found.path.max(initial=-1)) + 1
    activity, times, table = context.get(gpu), context.get(op_times), context.trace.table("cpu_op")
    launched = found.activity >= 0
    took = (activity.end - activity.start)[launched]
    device = sums(found.activity[launched], took, count)
    direct = _direct_operators(context, found)
    inside = np.flatnonzero(found.parent >= 0)
    length = found.end - found.start
    in_modules = sums(found.parent[inside], length[inside], count)
    # of the module, from the beginning of an operator on
    lasting = found.end[found.op[direct]] - table["start"][direct]
    in_operators = sums(found.op[direct], np.minimum(times.host_total[direct], lasting), count)
    root, forward = backward_roots(context)
    of_module = found.op[forward] if len(forward) else np.empty(0, np.int64)
    root, of_module = root[of_module >= 0], of_module[of_module >= 0]
    backward_host = subtree_sums(sums(of_module, times.host_total[root], count), found.stop)
    backward_device = subtree_sums(sums(of_module, times.device_total[root], count), found.stop)
    figures = {
        "host_total_us": length,
        "host_self_us": length - in_modules,
        "host_overhead_us": np.maximum(length - in_modules - in_operators, 0),  # operators may cross modules
        "device_total_us": subtree_sums(device, found.stop),
        "device_self_us": device,
        "backward_host_us": backward_host,
        "backward_device_us": backward_device,
    }
    first = np.full(path_count, count, np.int64)
    np.minimum.at(first, found.path, np.arange(count))
    above = np.where(found.parent[first] < 0, NOTHING, found.path[found.parent[first]]) if count else first
    order = _preorder(above, found.parent[first] < 0, found.start[first])
    names = [module_name(context.trace.strings[number]) for number in found.name[first].tolist()]
    chains = name_chains(above, names)
    values: dict[str, Any] = {
        key: (sums(found.path, column, path_count) / NS_PER_US)[order] for key, column in figures.items()
    }
    values["occurrences"] = np.bincount(found.path, minlength=path_count)[order]
    values["operators"] = sums(found.path[found.op[direct]], np.ones(len(direct)), path_count)[order]
    values["module_id"] = found.module[first][order]
    values["path"] = [SEPARATOR.join(chains[number]) for number in order.tolist()]
    values["name"] = [names[number] for number in order.tolist()]
    values["depth"] = found.depth[first][order]
    answer = Answer(values, [] if count else [NO_MODULES])
    return answer if len(activity) or not count else without_gpu(answer)


def _direct_operators(context: Context, found: ModuleCalls) -> Ints:
    """Returns the operators that modules called themselves: not inside another operator of the same call."""
    tree = context.get(ops)
    above = tree.nested.tree.parent[tree.place]
    outer = np.append(found.op, NOTHING)[np.where(above >= 0, tree.row[above], -1)] if len(above) else above
    names = context.trace.strings
    lightning = np.array([text.startswith(LIGHTNING_MODULE) for text in names] + [False])
    wrapper = lightning[context.trace.table("cpu_op")["name"]]
    wrapped_above = np.append(wrapper, False)[np.where(above >= 0, tree.row[above], -1)] if len(above) else wrapper
    return np.flatnonzero((found.op >= 0) & ~wrapper & ((found.op != outer) | wrapped_above))


def _preorder(above: Ints, outermost: Flags, start: Ints) -> Ints:
    """Orders paths (outer ones have lower numbers) from the outside to the inside, siblings by start. One loop per
    path.
    """
    children: dict[int, list[int]] = {}
    for number in np.argsort(start, kind="stable").tolist():
        children.setdefault(NOTHING if outermost[number] else int(above[number]), []).append(number)
    order: list[int] = []
    stack = list(reversed(children.get(NOTHING, [])))
    while stack:
        number = stack.pop()
        order.append(number)
        stack += reversed(children.get(number, []))
    return np.array(order, np.int64)


@view(
    "call_tree",
    columns(
        ("path", "texts", "", "names from the outermost node to this one"),
        ("name", "text", "", "operator, annotation or Python function"),
        ("kind", "text", "", "cpu_op, user_annotation or python_function"),
        ("depth", "int", "", "nesting depth; 0 is outermost"),
        ("calls", "int", "", "number of times that this path was taken"),
        ("host_total_us", "float", "us", "host time from start to end"),
        ("host_self_us", "float", "us", "host time minus that of the nodes inside"),
        ("device_total_us", "float", "us", "GPU time launched in it"),
        ("device_self_us", "float", "us", "GPU time launched in it but not in the nodes inside"),
    ),
)
def call_tree(context: Context, *, python: bool = False, max_depth: int = 0) -> Answer:
    """Operators and annotations of all threads merged by call path: equal chains of names form one row.

    All training steps count as one, "ProfilerStep". Rows are ordered from the outside in; siblings are ordered by
    device time, then host time, largest first.

    Options:
    - python: include Python functions (recorded calls, not samples).
    - max_depth: show only so many levels; 0 shows all.
    """
    trace, activity, launched = context.trace, context.get(gpu), context.get(calls)
    tables = {kind: trace.tables[kind] for kind in KINDS if kind in trace.tables and (python or kind != KINDS[0])}
    tree = build(tables, trace.window_end_ns)
    name = np.zeros(len(tree), np.int32)
    for number, kind in enumerate(KINDS):
        own = tree.kind == number
        name[own] = trace.table(kind)["name"][tree.row[own]]
    is_step = np.array([text.startswith(STEP_PREFIX) for text in trace.strings], np.bool_)
    same = np.where(is_step, np.argmax(is_step) if len(is_step) else 0, np.arange(len(is_step)))
    path = paths(tree.parent, tree.depth, same[name] * len(KINDS) + tree.kind)
    count = int(path.max(initial=-1)) + 1
    node = tree.innermost(launched.thread, launched.start).astype(np.int64)
    node = np.append(node, NOTHING)[activity.call]
    device = sums(node[node >= 0], (activity.end - activity.start)[node >= 0], len(tree))
    total = sums(path, subtree_sums(device, tree.stop), count)
    host = sums(path, tree.end - tree.start, count)
    first = np.full(count, len(tree), np.int64)
    np.minimum.at(first, path, np.arange(len(tree)))
    above, outermost = path[tree.parent[first]] if count else first, tree.parent[first] < 0
    # Siblings in the order of their weight: a lower number means more time.
    rank = np.empty(count, np.int64)
    rank[np.lexsort((-host, -total))] = np.arange(count)
    order = _preorder(above, outermost, rank)
    names = [STEPS if is_step[number] else trace.strings[number] for number in name[first].tolist()]
    depth = tree.depth[first][order]
    chains = name_chains(np.where(outermost, NOTHING, above), names)
    shown = order if not max_depth else order[depth < max_depth]
    values = {
        "path": [chains[number] for number in shown.tolist()],
        "name": [names[number] for number in shown.tolist()],
        "kind": [KINDS[number] for number in tree.kind[first][shown].tolist()],
        "depth": tree.depth[first][shown],
        "calls": np.bincount(path, minlength=count)[shown],
        "host_total_us": host[shown] / NS_PER_US,
        "host_self_us": sums(path, tree.self_ns, count)[shown] / NS_PER_US,
        "device_total_us": total[shown] / NS_PER_US,
        "device_self_us": sums(path, device, count)[shown] / NS_PER_US,
    }
    answer = Answer(values, [] if len(tree) else _why_empty(context, python=python))
    return answer if len(activity) else without_gpu(answer)


def _why_empty(context: Context, *, python: bool) -> list[str]:
    """Returns why a trace has no call tree."""
    notes = ["the trace has no operators and no annotations: record the activity types cpu_op and user_annotation"]
    functions = context.trace.table("python_function")
    if len(functions):
        calls_only = "its Python functions are samples, which have no calls: view python_samples shows them"
        recorded = bool((functions["samples"] == 0).any())
        notes.append("its Python functions are shown with python=True" if recorded and not python else calls_only)
    return notes
