"""Operators by name: their times, inputs and tensor core use.

Time of each operator on the host and on the device, with and without nested operators.

Theory of operation
    The operators of a thread, sorted by start with the enclosing one first, are their tree in preorder, so that the
    sum over an operator and all below it is a difference of running sums. Everything is integer ns.

    The time of a GPU activity belongs to the innermost operator around its call (parts.gpu). Simultaneous activities
    each count in full, as in PyTorch's own tables.

    A call inside another call (a driver call inside a runtime call) took no host time of its own.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.arrays.codec import Events
from kineto_trace.arrays.row_groups import Groups, group, subtree_sums, sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints
from kineto_trace.kernel_traits.kernel_types import OPERATOR_TYPES, operator_types
from kineto_trace.kernel_traits.precisions import eligible_op_names, names_tell, uses_tensor_cores
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, calls, captured_ops, gpu, gpu_vendor, inside_equals, ops
from kineto_trace.structure.call_forests import NO_STACK, call_stacks
from kineto_trace.structure.event_arguments import argument_objects
from kineto_trace.structure.module_calls import (
    LIGHTNING_MODULE,
    NO_MODULES,
    ModuleCalls,
    backward_roots,
    module_calls,
    module_name,
    name_chains,
)
from kineto_trace.structure.nesting import KINDS, build, stack_numbers
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

GroupBy = Literal["name", "name+shape", "type"]
NS_PER_US = 1000
NO_OPERATORS = "the trace has no operators: record the activity type cpu_op (torch.profiler: ProfilerActivity.CPU)"
_IN_GRAPHS = (
    "{:,.1f} ms of GPU time belongs to operators that were captured into CUDA graphs and did not run again: this view "
    "counts it for the operators that launched the graphs, and the view graph_operators for the captured ones"
)
GPU_FIGURES = ("device_", "tensor_core_self", "tensor_core_total", "backward_device")
SHAPES = ("Input Dims", "Input dims")  # newer and older traces
SEPARATOR = "/"
STEPS = "ProfilerStep"


@dataclass(frozen=True, slots=True)
class OpTimes:
    """One value per row of cpu_op, times in ns.

    host_total: from start to end.
    host_exclusive: without nested operators.
    host_self: host_exclusive without the operator's own calls to the runtime and driver.
    device_self: of the GPU activities that its own calls caused.
    device_total: device_self including nested operators.
    """

    host_total: Ints
    host_exclusive: Ints
    host_self: Ints
    device_self: Ints
    device_total: Ints


@dataclass(frozen=True, slots=True)
class TensorTimes:
    """One value per row of cpu_op.

    own, total: like the device times of OpTimes (ns), for kernels with tensor cores only.
    eligible: whether it or a nested operator could use tensor cores, by its name, or did.
    """

    own: Ints
    total: Ints
    eligible: Flags


@dataclass(frozen=True, slots=True)
class OpTexts:
    """number: per row of cpu_op, a place in `texts`.

    texts: distinct; None if the operator has no such argument.
    """

    number: Ints
    texts: tuple[str | None, ...]


@view(
    "operators",
    columns(
        ("name", "text", "", "operator; with group_by=type, the kind of work that the row's operators do"),
        ("input_shape", "text", "", "shapes of its inputs, if recorded; only with group_by=name+shape"),
        ("calls", "int", "", "number of runs"),
        ("device_self_us", "float", "us", "GPU time launched by its own calls, summed"),
        (
            "device_total_us",
            "float",
            "us",
            "GPU time launched by it and operators inside it; an operator nested in another of the same row adds "
            "nothing",
        ),
        ("host_self_us", "float", "us", "host time minus that of the operators inside it and of its own runtime calls"),
        (
            "host_exclusive_us",
            "float",
            "us",
            "host time minus that of the operators inside it (PyTorch's self CPU time)",
        ),
        (
            "host_total_us",
            "float",
            "us",
            "host time from start to end; an operator nested in another of the same row adds nothing",
        ),
        ("device_self_pct", "float", "%", "share of the device_self_us of all rows"),
        ("host_self_pct", "float", "%", "share of the host_self_us of all rows"),
        (
            "cumulative_pct",
            "float",
            "%",
            "running sum of device_self_pct; without GPU activity, of host_self_pct",
        ),
        ("tensor_core_eligible", "bool", "", "whether it or an operator inside it can use tensor cores"),
        ("tensor_core_self_pct", "float", "%", "share of device_self_us in kernels that use tensor cores"),
        ("tensor_core_total_pct", "float", "%", "share of device_total_us in kernels that use tensor cores"),
        (
            "call_stack",
            "text",
            "",
            "Python frames, innermost first; for backward operators, those of the forward operator",
        ),
    ),
)
def operators(context: Context, *, group_by: GroupBy = "name", stacks: bool = False) -> Answer:
    """Operators by name: how often each ran, and its time on the host and on the GPU.

    A kernel, copy or fill belongs to the innermost operator around the call that launched it, which is found by the
    correlation id. Times are sums over all calls; overlapping work counts each time. The total of an operator includes
    nested operators, so totals of different rows must not be added; an operator nested in another of the same row
    adds nothing. Rows are ordered by device_self_us, largest first; without GPU work, by host_self_us, and the GPU
    columns are missing.

    Options:
    - group_by: "name"; "name+shape" for one row per distinct input shapes; "type" for one row per kind of work, such as
      matrix products, by the names of PyTorch's operators (nodes of the backward pass have the kind of their forward
      operator).
    - stacks: one row per distinct call stack. Stacks are the recorded ones or, if there are none, those of the trace's
      Python functions; operators without a stack have a row of their own.
    """
    table, times, tensor = context.trace.table("cpu_op"), context.get(op_times), context.get(tensor_times)
    shapes = context.get(input_shapes) if group_by == "name+shape" else None
    kinds = context.get(operator_types)[table["name"]] if group_by == "type" else None
    keys: list[AnyArray] = [table["name"] if kinds is None else kinds]
    if shapes is not None:
        keys.append(shapes.number)
    if stacks:
        keys.append(context.get(call_stacks).of_op)
    groups = group(keys)
    outer = ~inside_equals(context, groups.number)
    sums = {
        "device_self_us": groups.sums(times.device_self) / NS_PER_US,
        "device_total_us": groups.sums(times.device_total * outer) / NS_PER_US,
        "host_self_us": groups.sums(times.host_self) / NS_PER_US,
        "host_exclusive_us": groups.sums(times.host_exclusive) / NS_PER_US,
        "host_total_us": groups.sums(times.host_total * outer) / NS_PER_US,
        "tensor_self": groups.sums(tensor.own) / NS_PER_US,
        "tensor_total": groups.sums(tensor.total * outer) / NS_PER_US,
    }
    eligible = groups.sums(tensor.eligible) > 0
    on_gpu = len(context.get(gpu)) > 0
    order = np.lexsort((-sums["host_self_us"], -sums["device_self_us"] if on_gpu else -sums["host_self_us"]))
    notes = [] if len(table) else [NO_OPERATORS]
    if shapes is not None and len(table) and shapes.texts == (None,):
        notes.append("the trace has no input shapes: record with --record-shapes (torch.profiler: record_shapes=True)")
    if stacks and len(table) and (context.get(call_stacks).of_op == NO_STACK).all():
        notes.append(
            "the trace has neither call stacks nor Python functions: record with --with-stack (torch.profiler: "
            "with_stack=True)"
        )
    notes += _of_graphs(context)
    answer = operator_columns(
        context, groups, groups.sizes(), sums, eligible, order, shapes, _stacks(context, stacks), notes
    )
    shares = answer.values["device_self_pct" if on_gpu else "host_self_pct"]
    values = {**answer.values, "cumulative_pct": np.minimum(np.cumsum(shares), 100)}
    if kinds is not None:
        values["name"] = [OPERATOR_TYPES[number] for number in kinds[groups.first[order]].tolist()]
    if not names_tell(context.get(gpu_vendor)):
        values |= {name: [None] * len(order) for name in ("tensor_core_self_pct", "tensor_core_total_pct")}
    told = Answer(values, answer.notes)
    return told if on_gpu else without_gpu(told)


def _of_graphs(context: Context) -> list[str]:
    """Returns a note on the GPU time of operators that captured CUDA graphs and did not run themselves."""
    activity, captured = context.get(gpu), context.get(captured_ops) >= 0
    took = int((activity.end - activity.start)[captured].sum())
    return [_IN_GRAPHS.format(took / NS_PER_US / 1000)] if took else []


def without_gpu(answer: Answer) -> Answer:
    """Returns the answer without GPU columns, which are unknown, not zero, where no GPU activity was recorded."""
    values = {
        name: [None] * len(column) if name.startswith(GPU_FIGURES) else column for name, column in answer.values.items()
    }
    return Answer(values, [*answer.notes, NO_GPU])


def _stacks(context: Context, stacks: bool) -> Any:
    return context.get(call_stacks) if stacks else None


def operator_columns(
    context: Context,
    groups: Groups,
    calls: Ints,
    sums: dict[str, Floats],
    eligible: Flags,
    order: Ints,
    shapes: Any,
    stacks: Any,
    notes: list[str],
    op_rows: Ints | None = None,
) -> Answer:
    """Returns the columns of the view. op_rows: the row of cpu_op of each grouped row; None if they are rows
    of cpu_op.
    """
    first = groups.first[order] if op_rows is None else op_rows[groups.first[order]]
    table, strings = context.trace.table("cpu_op"), context.trace.strings
    values = {name: column[order] for name, column in sums.items() if name.endswith("_us")}
    return Answer(
        {
            **values,
            "name": [strings[number] for number in table["name"][first].tolist()],
            "input_shape": _texts(shapes, first),
            "calls": calls[order],
            "device_self_pct": _of_all(sums["device_self_us"])[order],
            "host_self_pct": _of_all(sums["host_self_us"])[order],
            "cumulative_pct": [None] * len(first),
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


def _of_all(parts: Floats) -> Floats:
    """Returns each value in per cent of their sum."""
    return _share(parts, np.full(len(parts), parts.sum()))


def _share(part: Floats, whole: Floats) -> Floats:
    """Returns the share in per cent; 0 where the whole is 0."""
    return np.divide(100 * part, whole, out=np.zeros(len(whole)), where=whole > 0)


def op_times(context: Context) -> OpTimes:
    """Returns the times of all operators."""
    tree = context.get(ops)
    events, nest, count = tree.nested.events, tree.nested.tree, len(tree.row)
    exclusive = nest.self_time[tree.place]
    activity = context.get(gpu)
    owned = activity.op >= 0
    op, took = activity.op[owned], (activity.end - activity.start)[owned]
    device = sums(op, took, count)
    return OpTimes(
        host_total=(nest.end - events.start)[tree.place],
        host_exclusive=exclusive,
        host_self=np.maximum(exclusive - _own_calls(context, count), 0),  # calls may outlive operators
        device_self=device,
        device_total=subtree_sums(device[tree.row], nest.stop)[tree.place],
    )


def _own_calls(context: Context, count: int) -> Ints:
    """Returns the time (ns) of each operator's own calls."""
    called = context.get(calls)
    if not len(called):
        return np.zeros(count, np.int64)
    order = Events(called.thread, called.start, called.end).order()
    start, end, thread = called.start[order], called.end[order], called.thread[order]
    # Concatenates the tracks on one axis, so that a running maximum does not reach from one to the next.
    low, length = int(start.min()), int(end.max()) - int(start.min()) + 1
    turn = np.zeros(len(order), np.int64)
    np.cumsum(thread[1:] != thread[:-1], out=turn[1:])
    if (int(turn[-1]) + 1) * length < 2**62:
        reach = np.maximum.accumulate(end - low + turn * length)
        begin = start - low + turn * length
    else:  # absurd times
        reach, begin = np.maximum.accumulate(end), start
    outer = np.ones(len(order), np.bool_)
    outer[1:] = begin[1:] >= reach[:-1]
    mine = order[outer & (called.op[order] != NOTHING)]
    return sums(called.op[mine], called.end[mine] - called.start[mine], count)


def tensor_times(context: Context) -> TensorTimes:
    """Returns the time that each operator used tensor cores."""
    tree, activity = context.get(ops), context.get(gpu)
    stop = tree.nested.tree.stop
    chosen = (activity.op >= 0) & (activity.kind == KERNEL) & context.get(uses_tensor_cores)[activity.name]
    own = sums(activity.op[chosen], (activity.end - activity.start)[chosen], len(tree.row))
    eligible = context.get(eligible_op_names)[context.trace.table("cpu_op")["name"]] | (own > 0)
    return TensorTimes(
        own=own,
        total=subtree_sums(own[tree.row], stop)[tree.place],
        eligible=subtree_sums(eligible[tree.row], stop)[tree.place] > 0,
    )


def input_shapes(context: Context) -> OpTexts:
    """Returns the input shapes of all operators as Python prints the lists: "[[64, 512], []]"."""
    number = np.zeros(len(context.trace.table("cpu_op")), np.int64)
    texts: dict[str | None, int] = {None: 0}
    for name in reversed(SHAPES):
        places, values = argument_objects(context, "cpu_op", name)
        shown = [0 if value is None else texts.setdefault(str(value), len(texts)) for value in values]
        number = np.where(places != NOTHING, np.array([*shown, 0], np.int64)[places], number)
    return OpTexts(number, tuple(texts))


# Modules and call trees: where the time of the host and of the GPU goes, from the outside to the inside.


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
        ("host_overhead_us", "float", "us", "host time in neither inner modules nor operators, that is, in Python"),
        ("device_total_us", "float", "us", "GPU time launched in its calls"),
        ("device_self_us", "float", "us", "GPU time launched in its calls but not in the modules inside"),
        (
            "backward_host_us",
            "float",
            "us",
            "host time of the backward pass of its operators, including those of the modules inside",
        ),
        ("backward_device_us", "float", "us", "GPU time of the same backward pass"),
    ),
)
def modules(context: Context) -> Answer:
    """The modules of the model as they call each other, with the host and GPU time of each.

    There is one row per call path: a module that is called from two places has two rows. Outer modules come before
    inner ones, in the order of their first calls. An operator belongs to the innermost module running when it starts,
    a kernel to the one running when it is launched. The backward figures of a module are those of its forward
    operators, linked by autograd's sequence numbers; the other figures do not include them. With PyTorch Lightning,
    modules are its "[pl][module]" operators.
    """
    found = context.get(module_calls)
    first, count, path_count = found.first, len(found), len(found.first)
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
    order = _preorder(found.around, found.start[first])
    names = [module_name(context.trace.strings[number]) for number in found.name[first].tolist()]
    chains = name_chains(found.around, names)
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


def _preorder(above: Ints, start: Ints) -> Ints:
    """Orders paths (outer ones have lower numbers) from the outside to the inside, siblings by start. One loop per
    path.
    """
    children: dict[int, list[int]] = {}
    for number in np.argsort(start, kind="stable").tolist():
        children.setdefault(int(above[number]), []).append(number)
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
        ("device_self_us", "float", "us", "GPU time launched by this node itself, excluding its children"),
    ),
)
def call_tree(context: Context, *, python: bool = False, max_depth: int = 0) -> Answer:
    """Operators and annotations of all threads merged by call path: equal chains of names form one row.

    All training steps count as one, "ProfilerStep". Rows are ordered from the outside in; siblings are ordered by
    device time, then host time, largest first.

    Options:
    - python: include Python functions (recorded calls, not samples).
    - max_depth: the number of levels to show; 0 shows all.
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
    path, above, _ = stack_numbers(tree.parent, same[name] * len(KINDS) + tree.kind, tree.depth)
    count = len(above)
    node = tree.innermost(launched.thread, launched.start).astype(np.int64)
    node = np.append(node, NOTHING)[activity.call]
    device = sums(node[node >= 0], (activity.end - activity.start)[node >= 0], len(tree))
    total = sums(path, subtree_sums(device, tree.stop), count)
    host = sums(path, tree.end - tree.start, count)
    first = np.unique(path, return_index=True)[1]
    # Siblings in the order of their weight: a lower number means more time.
    rank = np.empty(count, np.int64)
    rank[np.lexsort((-host, -total))] = np.arange(count)
    order = _preorder(above, rank)
    names = [STEPS if is_step[number] else trace.strings[number] for number in name[first].tolist()]
    depth = tree.depth[first][order]
    chains = name_chains(above, names)
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
        calls_only = "the trace's Python functions are samples, not calls: see the view python_samples"
        recorded = bool((functions["samples"] == 0).any())
        notes.append(
            "the trace's Python functions are shown with python=True" if recorded and not python else calls_only
        )
    return notes
