"""The operator table: host and device time of every operator, by name, by input shapes, by call stack."""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.analysis.host_time.op_inputs import input_shapes
from kineto_trace.analysis.host_time.op_times import op_times, tensor_times
from kineto_trace.arrays.row_groups import Groups, group
from kineto_trace.kernel_traits.operator_types import OPERATOR_TYPES, operator_types
from kineto_trace.kernel_traits.tensor_cores import names_tell
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import captured_ops, gpu, inside_equals
from kineto_trace.structure.call_stacks import NO_STACK, call_stacks
from kineto_trace.structure.gpu_devices import gpu_vendor
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

GroupBy = Literal["name", "name+shape", "type"]
NS_PER_US = 1000
NO_OPERATORS = "the trace has no operators: record the activity type cpu_op (torch.profiler: ProfilerActivity.CPU)"
_IN_GRAPHS = (
    "{:,.1f} ms of GPU time are of operators that were captured into CUDA graphs and did not run again: here it counts "
    "for the operators that launched the graphs, in the view graph_operators for those that were captured"
)
GPU_FIGURES = ("device_", "tensor_core_self", "tensor_core_total", "backward_device")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@view(
    "operators",
    columns(
        ("name", "text", "", "operator; with group_by=type what kind of work the operators of the row do"),
        ("input_shape", "text", "", "shapes of its inputs, if recorded; only with group_by=name+shape"),
        ("calls", "int", "", "number of runs"),
        ("device_self_us", "float", "us", "GPU time launched by its own calls, summed"),
        (
            "device_total_us",
            "float",
            "us",
            "the same including the operators inside it; inside one of the same row an operator adds nothing",
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
            "host time from start to end; inside one of the same row an operator adds nothing",
        ),
        ("device_self_pct", "float", "%", "share of device_self_us in that of all rows"),
        ("host_self_pct", "float", "%", "share of host_self_us in that of all rows"),
        (
            "cumulative_pct",
            "float",
            "%",
            "device_self_pct of this row and those before it, summed; without GPU activity that of host_self_pct",
        ),
        ("tensor_core_eligible", "bool", "", "whether it or an operator inside it can use tensor cores"),
        ("tensor_core_self_pct", "float", "%", "share of device_self_us in kernels that use tensor cores"),
        ("tensor_core_total_pct", "float", "%", "share of device_total_us in kernels that use tensor cores"),
        ("call_stack", "text", "", "Python frames, innermost first; of backward operators: of the forward operator"),
    ),
)
def operators(context: Context, *, group_by: GroupBy = "name", stacks: bool = False) -> Answer:
    """Operators by name: how often each ran, and its time on the host and on the GPU.

    A kernel, copy or fill belongs to the innermost operator around the call that caused it, which the correlation id
    identifies. Times are sums over all calls; overlapping work counts each time. The total of an operator includes all
    operators inside it, so totals of different rows must not be added; where one runs inside another one of its row,
    the outer one's total has its time, which counts once. The rows with the most device_self_us come first; without GPU
    work, those with the most host_self_us, and the figures of the GPU are missing.

    Options:
    - group_by: "name"; "name+shape" for one row per distinct input shapes; "type" for one row per kind of work, such as
      matrix products, told by the names of PyTorch's operators (nodes of the backward pass are of the kind that they
      are for).
    - stacks: one row per distinct call stack. Stacks are the recorded ones, otherwise those of the trace's Python
      functions; operators without a stack have a row of their own.
    """
    table, times, tensor = context.trace.table("cpu_op"), context.get(op_times), context.get(tensor_times)
    shapes = context.get(input_shapes) if group_by == "name+shape" else None
    kinds = context.get(operator_types)[table["name"]] if group_by == "type" else None
    keys: list[npt.NDArray[Any]] = [table["name"] if kinds is None else kinds]
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
        notes.append("the trace has no input shapes: record with record_shapes=True")
    if stacks and len(table) and (context.get(call_stacks).of_op == NO_STACK).all():
        notes.append("the trace has neither call stacks nor Python functions: record with with_stack=True")
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
    """Tells how much GPU time other operators have, which captured CUDA graphs and did not run."""
    activity, captured = context.get(gpu), context.get(captured_ops) >= 0
    took = int((activity.end - activity.start)[captured].sum())
    return [_IN_GRAPHS.format(took / NS_PER_US / 1000)] if took else []


def without_gpu(answer: Answer) -> Answer:
    """The same without figures of GPUs, which are not zero but unknown where no GPU activity was recorded."""
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
    eligible: npt.NDArray[np.bool_],
    order: Ints,
    shapes: Any,
    stacks: Any,
    notes: list[str],
    op_rows: Ints | None = None,
) -> Answer:
    """The columns of the view. op_rows: the row of cpu_op of each grouped row; None: they are the rows of cpu_op."""
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
    """Percent of their sum."""
    return _share(parts, np.full(len(parts), parts.sum()))


def _share(part: Floats, whole: Floats) -> Floats:
    """Percent; 0 where there is nothing."""
    return np.divide(100 * part, whole, out=np.zeros(len(whole)), where=whole > 0)
