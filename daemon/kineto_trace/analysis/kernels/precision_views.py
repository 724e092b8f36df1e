"""How well kernels use the GPU: precision, tensor cores, occupancy, and the hardware counters of profiled ranges.

How much of the kernels' time uses tensor cores, and how much of it could.

Kernels could use them if they were launched in one of the deepest eligible operators (kernel_traits/precisions.py),
those with no eligible operator inside.

How well the launch of each kernel fills its GPU: blocks and warps per multiprocessor, estimated occupancy.

Traces of other tools contain these figures as arguments of their kernels. Where one has none, and in our own captures,
they are computed from the launch shape and the properties of the device, once per distinct shape: by CUDA's rules for
NVIDIA's GPUs, by AMD's for Instinct. For other vendors' GPUs nothing is computed: Intel's kernels state neither their
shape in threads nor their registers.

Kineto takes the grid of AMD's kernels from the call that launched them, and hipExtModuleLaunchKernel, by which rocBLAS
and MIOpen launch, counts threads where others count blocks. Where the call is not known (graphs), nothing is computed.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.analysis.host_time.operator_views import tensor_times
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group, subtree_sums
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, UInts8, UInts32
from kineto_trace.base.quantities import times
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.occupancy import Shapes, amd_figures, is_supported, is_supported_amd, occupancy
from kineto_trace.kernel_traits.precisions import (
    BITS,
    UNKNOWN,
    names_tell,
    precision_name,
    precision_number,
    precision_of_name,
    precision_of_types,
    uses_tensor_cores,
)
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table, Trace
from kineto_trace.structure.activity_links import KERNEL, calls, device_properties, gpu, gpu_vendor, ops
from kineto_trace.structure.event_arguments import argument, argument_objects, arguments
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, view

NAN = float("nan")
BLOCKS, WARPS, OCCUPANCY = "blocks per SM", "warps per SM", "est. achieved occupancy %"  # Kineto's arguments
_SHAPE = (
    "device",
    "grid_x",
    "grid_y",
    "grid_z",
    "block_x",
    "block_y",
    "block_z",
    "registers",
    "static_shared_memory",
    "dynamic_shared_memory",
)
_NO_UNIT, _BLOCKS, _THREADS = range(3)
_LAUNCHES_BLOCKS = re.compile(r"^hip(?:Ext)?(?:Module)?Launch(?:Cooperative)?Kernel")
_LAUNCHES_THREADS = re.compile(r"^hip(?:Ext|Hcc)ModuleLaunchKernel")
_INT_MAX = 2**31 - 1
CATEGORY = "cuda_profiler_range"
_LAUNCH = "cudaLaunchKernel"
_FLOP = re.compile(r"smsp__sass_thread_inst_executed_op_[fhd](fma|mul|add)_pred_on\.sum$")


@dataclass(frozen=True, slots=True)
class TensorUse:
    """Shares 0 to 1 of kernel time; NaN if there is none, or if names of kernels on these GPUs do not show it.

    kernel_share: of all kernels' time, in kernels that use tensor cores.
    by_device: the same for each GPU.
    eligible_share: of the kernel time of all operators, that of eligible ones.
    """

    kernel_share: float
    by_device: dict[int, float]
    eligible_share: float


@dataclass(frozen=True, slots=True)
class LaunchFigures:
    """One value per row of the table `kernel`; NaN if unknown. occupancy: estimated achieved occupancy, 0 to 100 %."""

    blocks_per_sm: Floats
    warps_per_sm: Floats
    occupancy: Floats


def activity_precisions(context: Context) -> Ints:
    """Returns for each GPU activity the number of the precision in which it computes, or UNKNOWN.

    UNKNOWN for copies, fills and collectives, which do not compute.
    """
    activity = context.get(gpu)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication)
    told = np.full(len(context.trace.strings), UNKNOWN)
    for text in np.flatnonzero(np.bincount(activity.name[rows], minlength=len(told))).tolist():
        told[text] = precision_number(precision_of_name(context.trace.strings[text]))
    places, types = argument_objects(context, "cpu_op", "Input type")
    typed = np.array([*(precision_number(precision_of_types(each)) for each in types), UNKNOWN], np.int64)
    of_op = np.append(np.where(places == NOTHING, UNKNOWN, typed[places]), UNKNOWN)
    found = np.full(len(activity), UNKNOWN, np.int64)
    found[rows] = np.where(told[activity.name[rows]] == UNKNOWN, of_op[activity.op[rows]], told[activity.name[rows]])
    return found


@view(
    "kernel_precision",
    columns(
        ("precision", "text", "", "fp64, fp32, tf32, bf16, fp16, fp8, fp4 or int8; missing: unknown"),
        ("bits", "int", "", "size of a stored value"),
        ("calls", "int", "", "number of kernels"),
        ("total_us", "float", "us", "sum of their durations"),
        ("share_pct", "float", "%", "share of the time of all kernels that compute"),
        ("tensor_core_us", "float", "us", "part of total_us in kernels that use tensor cores, judged by their names"),
    ),
)
def kernel_precision(context: Context) -> Answer:
    """The precision in which kernels compute, longest total time first. Collectives are left out.

    The narrowest type in a kernel's name counts, since wider ones next to it belong to sums and results. If a name
    contains no type (compiled and fused kernels), the narrowest input type of the operator counts, if it was recorded.
    """
    activity = context.get(gpu)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication)
    number = context.get(activity_precisions)[rows]
    took = (activity.end - activity.start)[rows]
    groups = group([number])
    total = groups.sums(took)
    order = np.argsort(-total, kind="stable")
    told_by_names = names_tell(context.get(gpu_vendor))
    on_tensor_cores = groups.sums(took * context.get(uses_tensor_cores)[activity.name[rows]])
    names = [precision_name(at) for at in number[groups.first[order]].tolist()]
    return Answer(
        {
            "precision": names,
            "bits": [None if name is None else BITS[name] for name in names],
            "calls": groups.sizes()[order],
            "total_us": total[order] / 1000,
            "share_pct": 100 * total[order] / max(int(total.sum()), 1),
            "tensor_core_us": on_tensor_cores[order] / 1000 if told_by_names else [None] * len(order),
        },
        [] if len(rows) else [NO_GPU if not len(activity) else "the trace has no kernels"],
    )


def tensor_use(context: Context) -> TensorUse:
    """Returns the figures of all kernels, attributed by call and thread."""
    activity = context.get(gpu)
    kernel = activity.kind == KERNEL
    took = np.where(kernel, activity.end - activity.start, 0)
    uses = kernel & context.get(uses_tensor_cores)[activity.name]
    owned = np.flatnonzero(kernel & (activity.op >= 0))
    of_ops, told = took[owned], names_tell(context.get(gpu_vendor))
    eligible = _below_deepest(context)[activity.op[owned]] if len(owned) else np.zeros(0, np.bool_)
    return TensorUse(
        kernel_share=share_of(took[uses].sum(), took.sum()) if told else NAN,
        by_device={
            device: share_of(took[uses & (activity.device == device)].sum(), took[activity.device == device].sum())
            if told
            else NAN
            for device in unique_values(activity.device[kernel]).tolist()
        },
        eligible_share=share_of(of_ops[eligible].sum(), of_ops.sum()),
    )


def _below_deepest(context: Context) -> Flags:
    """Returns for each row of cpu_op whether it is one of the deepest eligible operators or inside one."""
    tree = context.get(ops)
    stop = tree.nested.tree.stop
    eligible = context.get(tensor_times).eligible[tree.row]
    deepest = np.flatnonzero(eligible & (subtree_sums(eligible, stop) == 1))
    change = np.zeros(len(eligible) + 1, np.int64)
    change[deepest] += 1
    np.subtract.at(change, stop[deepest], 1)
    inside: Flags = (np.cumsum(change)[:-1] > 0)[tree.place]
    return inside


def share_of(part: float, whole: float, of_nothing: float = NAN) -> float:
    """Returns the part of a whole, or `of_nothing` if the whole is 0."""
    return float(part) / float(whole) if whole else of_nothing


def launch_figures(context: Context) -> LaunchFigures:
    """Returns the figures of all kernels: from the file, else computed; also where it states 0 % of whole warps."""
    table, found = context.trace.table("kernel"), stated_figures(context)
    found.occupancy[(found.occupancy == 0) & (found.warps_per_sm >= 1)] = NAN
    missing = np.flatnonzero(np.isnan(found.blocks_per_sm) | np.isnan(found.occupancy))
    if len(missing):
        stated = (found.blocks_per_sm, found.warps_per_sm, found.occupancy)
        for known, computed in zip(stated, _computed(context, table, missing), strict=True):
            known[missing] = np.where(np.isnan(known[missing]), computed, known[missing])
    return found


def stated_figures(context: Context) -> LaunchFigures:
    """Returns the figures of all kernels in the file."""
    table = context.trace.table("kernel")
    return LaunchFigures(*(_argument(context, table, name) for name in (BLOCKS, WARPS, OCCUPANCY)))


def _argument(context: Context, table: Table, name: str) -> Floats:
    if not table.origin:
        return np.full(len(table), np.nan)
    return argument(context, "kernel", name).copy()


def _computed(context: Context, table: Table, rows: Ints) -> list[Floats]:
    """Returns the three figures of these rows; NaN if the device's properties are unknown or no shape was recorded."""
    devices, unit = context.get(device_properties), _grid_unit(context, table)[rows]
    shapes = group([unit, *(table[name][rows] for name in _SHAPE)])
    values = np.stack([table[name][rows[shapes.first]].astype(np.int64) for name in _SHAPE]).clip(0, _INT_MAX)
    found = np.full((3, len(shapes.first)), np.nan)
    for device, properties in devices.items():
        units = unit[shapes.first]
        own = np.flatnonzero((values[0] == device) & (values[1:7].min(axis=0) > 0) & (units != _NO_UNIT))
        if not len(own):
            continue
        shape = values[:, own]
        threads, grid = shape[4] * shape[5] * shape[6], shape[1] * shape[2] * shape[3]
        launched = Shapes(
            blocks=np.where(units[own] == _THREADS, -(-grid // threads), grid),
            threads=threads,
            registers=shape[7],
            static_shared_memory=shape[8],
            dynamic_shared_memory=shape[9],
        )
        if is_supported(properties):
            figures = occupancy(properties, launched)
            found[:, own] = figures.blocks_per_sm, figures.warps_per_sm, figures.percent
        elif is_supported_amd(properties):
            found[:, own] = amd_figures(properties, launched)
    return [row[shapes.number] for row in found]


def _grid_unit(context: Context, table: Table) -> UInts8:
    """What the grid of each row of the table `kernel` counts: _BLOCKS, _THREADS, or _NO_UNIT."""
    if not table.origin or context.get(gpu_vendor) is not GpuVendor.AMD:
        return np.full(len(table), _BLOCKS, np.uint8)
    strings, found = context.trace.strings, np.full(len(table), _NO_UNIT, np.uint8)
    units = np.where(matches(strings, _LAUNCHES_BLOCKS), _BLOCKS, _NO_UNIT).astype(np.uint8)
    units[matches(strings, _LAUNCHES_THREADS)] = _THREADS
    activity, called = context.get(gpu), context.get(calls)
    known = np.flatnonzero((activity.kind == KERNEL) & (activity.call >= 0))
    found[activity.row[known]] = units[called.name[activity.call[known]]]
    return found


# Hardware counters of kernels, with the operators that launched them.


class _Pairs(NamedTuple):
    """Rows of `other` (ranges) and of cuda_runtime (launches), both by time, and what is wrong with them."""

    ranges: Ints
    launches: Ints
    note: str


@view(
    "counters_with_operators",
    columns(
        ("kernel", "text", "", "name of the profiled range"),
        ("start_ns", "int", "ns", "Unix time of the range"),
        ("duration_us", "float", "us", "duration of the range"),
        ("op_stack", "texts", "", "operators around the launch, from the outermost to the innermost"),
        ("top_op", "text", "", "outermost operator; missing if there is none"),
        ("bottom_op", "text", "", "innermost operator; missing if there is none"),
        ("counter", "text", "", "name of the counter"),
        ("value", "float", "", "its value"),
        (
            "flop",
            "float",
            "",
            "floating-point operations, for counters of such instructions (a fused multiply-add counts as two)",
        ),
    ),
)
def counters_with_operators(context: Context) -> Answer:
    """The counters measured by CUPTI's range profiler: one row per range and counter, with the launching operators.

    While ranges are profiled, kernels run one after another and are not recorded themselves. The n-th range by time
    (category cuda_profiler_range) therefore belongs to the n-th call of cudaLaunchKernel….
    """
    trace = context.trace
    rows = np.arange(len(trace.table("other"))), np.arange(len(trace.table("cuda_runtime")))
    return counter_columns(context, *rows)


def counter_columns(context: Context, ranges: Ints, launches: Ints) -> Answer:
    """The columns of the view. ranges, launches: the rows of `other` and `cuda_runtime` that count."""
    pairs = _paired(context.trace, ranges, launches)
    if pairs.note:
        return counters_with_operators.answer([], (pairs.note,))
    trace = context.trace
    table, called = trace.table("other").take(pairs.ranges), trace.table("cuda_runtime").take(pairs.launches)
    counters = sorted({key for found in arguments(context, "other").objects for key in found})
    values = np.stack([argument(context, "other", key)[pairs.ranges] for key in counters] or [np.empty((0, 0))], axis=1)
    measured = ~np.isnan(values)
    row, counter = np.nonzero(measured)
    value = values[measured]
    factors = np.array([_flops(name) for name in counters])
    stack, top, bottom = _stacks(context, called["thread"], called["start"])
    return Answer(
        {
            "kernel": texts(trace.strings, table["name"][row]),
            "start_ns": table["start"][row],
            "duration_us": table["duration"][row] / 1000,
            "op_stack": stack.take(pa.array(row)),
            "top_op": texts(trace.strings, top[row]),
            "bottom_op": texts(trace.strings, bottom[row]),
            "counter": texts(counters, counter),
            "value": value,
            "flop": value * factors[counter] if len(counters) else value,
        }
    )


def _flops(counter: str) -> float:
    """Returns operations per count; NaN if it counts none."""
    found = _FLOP.match(counter)
    return float("nan") if found is None else 2.0 if found[1] == "fma" else 1.0


def _paired(trace: Trace, ranges: Ints, launches: Ints) -> _Pairs:
    empty, other, calls = np.empty(0, np.int64), trace.table("other"), trace.table("cuda_runtime")
    is_range = np.array([*(text == CATEGORY for text in trace.strings), False], np.bool_)
    is_launch = np.array([*(text.startswith(_LAUNCH) for text in trace.strings), False], np.bool_)
    ranges = ranges[is_range[other["category"][ranges]]]
    launches = launches[is_launch[calls["name"][launches]]]
    if not len(ranges):
        return _Pairs(empty, empty, f"the trace has no events of the category {CATEGORY}")
    if len(ranges) != len(launches):
        profiled, called = times(len(ranges), "profiled range"), times(len(launches), "call")
        note = f"{profiled} cannot be matched with {called} of {_LAUNCH}…"
        return _Pairs(empty, empty, note)
    ranges = ranges[np.argsort(other["start"][ranges], kind="stable")]
    return _Pairs(ranges, launches[np.argsort(calls["start"][launches], kind="stable")], "")


def _stacks(context: Context, thread: UInts32, start: Ints) -> tuple[pa.Array, Ints, Ints]:
    """For each launch the operators around it, and the names of the outermost and the innermost one; -1: none."""
    tree, name = context.get(ops), context.trace.table("cpu_op")["name"]
    place = tree.nested.innermost(thread, start).astype(np.int64)
    launch, found = [], []
    rows = np.arange(len(place))
    while len(rows):
        rows = rows[place[rows] >= 0]
        launch.append(rows)
        found.append(place[rows])
        place[rows] = tree.nested.tree.parent[place[rows]]
    of_launch = np.concatenate([rows, *launch])
    names = name[tree.row[np.concatenate([rows, *found])]].astype(np.int64)
    order = np.lexsort((-np.arange(len(names)), of_launch))
    names = names[order]
    count = np.bincount(of_launch, minlength=len(start))
    offsets = np.concatenate([[0], np.cumsum(count)])
    stack = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts(context.trace.strings, names))
    padded = np.append(names, -1)
    top = np.where(count > 0, padded[offsets[:-1]], -1)
    bottom = np.where(count > 0, padded[offsets[1:] - 1], -1)
    return stack, top, bottom
