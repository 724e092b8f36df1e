"""How many floating-point operations ran, how fast, and how fast the GPU could have been."""

from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.analysis.host_time.op_inputs import input_shapes
from kineto_trace.analysis.host_time.op_times import op_times, tensor_times
from kineto_trace.analysis.kernels.operator_work import operator_work
from kineto_trace.analysis.kernels.tensor_core_use import share_of
from kineto_trace.analysis.overview.gpu_figures import global_memory
from kineto_trace.analysis.overview.step_breakdown import host_ranges
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group, subtree_sums, sums
from kineto_trace.errors import ViewError
from kineto_trace.kernel_traits.gpu_peaks import GpuPeaks, gpu_peaks
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.kernel_traits.precisions import PRECISIONS, precision_name
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, gpu, ops
from kineto_trace.structure.gpu_devices import device_properties, gpu_vendor
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NAN = float("nan")
ARITHMETIC, MEMORY = "arithmetic", "memory"
_NO_PRODUCTS = "the trace has no operators whose floating-point operations are known: products, convolutions, attention"
_NO_SHAPES = (
    "the inputs of operators were not recorded: record with --record-shapes (torch.profiler: record_shapes=True)"
)
_NO_PEAKS = "how fast {name} can be is not in the table of this version: set the option peak from its data sheet"
_FP32, _TF32 = PRECISIONS.index("fp32"), PRECISIONS.index("tf32")


@dataclass(frozen=True, slots=True)
class Products:
    """The innermost operators whose operations are known, one value each. row: of cpu_op.

    flop, bytes: of the call. precision: number into PRECISIONS, or UNKNOWN; tf32 is fp32 on NVIDIA's tensor cores
    (AMD's matrix cores multiply fp32 as it is). device_ns: of all GPU activities that it launched.
    """

    row: Ints
    flop: Ints
    bytes: Ints
    precision: Ints
    device_ns: Ints


def products(context: Context) -> Products:
    """An operator in another one with the same product counts alone: aten::convolution, aten::cudnn_convolution."""
    work, tree = context.get(operator_work), context.get(ops)
    known = (work.flop > 0)[tree.row]
    nvidia = context.get(gpu_vendor) in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)
    innermost = np.sort(tree.row[known & (subtree_sums(known, tree.nested.tree.stop) == 1)])
    precision, on_tensor_cores = work.precision[innermost], context.get(tensor_times).total[innermost] > 0
    return Products(
        row=innermost,
        flop=work.flop[innermost],
        bytes=work.bytes[innermost],
        precision=np.where((precision == _FP32) & on_tensor_cores & nvidia, _TF32, precision),
        device_ns=context.get(op_times).device_total[innermost],
    )


@view(
    "operator_flops",
    columns(
        ("name", "text", "", "operator"),
        ("input_shape", "text", "", "shapes of its inputs"),
        (
            "precision",
            "text",
            "",
            "fp64, fp32, tf32 (fp32 on NVIDIA's tensor cores), bf16, fp16, fp8 or int8, by its inputs",
        ),
        ("calls", "int", "", "number of runs"),
        ("call_gflop", "float", "GFLOP", "floating-point operations of one call"),
        ("device_us", "float", "us", "GPU time of all that it launched, summed"),
        ("host_us", "float", "us", "its time on the host, summed"),
        ("speed_tflop_s", "float", "TFLOP/s", "operations by GPU time; in traces without GPU activities, by host time"),
        ("peak_tflop_s", "float", "TFLOP/s", "the most that this GPU can do in this precision, by its data sheet"),
        ("peak_pct", "float", "%", "share of that which was reached"),
        ("intensity_flop_byte", "float", "FLOP/byte", "operations per byte of operands and result, each moved once"),
        ("bound", "text", "", "what limits it at best: arithmetic, or memory, whose bandwidth allows less"),
        ("roof_tflop_s", "float", "TFLOP/s", "the lower one of both limits"),
        ("roof_pct", "float", "%", "share of that which was reached"),
    ),
)
def operator_flops(context: Context, *, peak: float = 0.0, bandwidth: float = 0.0) -> Answer:
    """The products of the model by operator and shape (roofline): operations, speed, and what limits the speed at best.

    Counted are products of matrices, convolutions and attention, by the recorded sizes of their inputs, two operations
    for a multiplication and an addition; of attention with a causal mask, half. Bytes are those that must move at
    least, so that "memory" is certain, and "arithmetic" what could be with perfect caches. The rows with the most GPU
    time come first.

    Options:
    - peak: the most that the GPU can do, in TFLOP/s, for all precisions; 0: by the GPU's data sheet.
    - bandwidth: of the GPU's memory, in GB/s; 0: by the GPU's data sheet.
    """
    _check("operator_flops", peak, bandwidth)
    found, table, shapes = context.get(products), context.trace.table("cpu_op"), context.get(input_shapes)
    groups = group([table["name"][found.row], shapes.number[found.row], found.precision])
    device_us = groups.sums(found.device_ns) / 1000
    host_us = groups.sums(context.get(op_times).host_total[found.row]) / 1000
    on_gpu = len(context.get(gpu)) > 0
    time_us = device_us if on_gpu else host_us
    order = np.argsort(-time_us, kind="stable")
    first = groups.first[order]
    precision = [precision_name(at) for at in found.precision[first].tolist()]
    name, memory_bytes = _gpu(context)
    limits = gpu_peaks(name, memory_bytes)
    peaks = np.array([_peak(limits, each, peak) for each in precision]) if on_gpu else np.full(len(first), NAN)
    rate = _ratio(groups.sums(found.flop)[order] / 1e6, time_us[order])
    intensity = _ratio(found.flop[first].astype(np.float64), found.bytes[first].astype(np.float64))
    memory = (bandwidth or (limits.memory if limits else NAN)) / 1000 * intensity
    roof = np.where(np.isnan(memory), NAN, np.fmin(memory, peaks)) if on_gpu else np.full(len(first), NAN)
    bounded = ~np.isnan(roof) & ~np.isnan(peaks)
    notes = _notes(context)
    if not notes and on_gpu and np.isnan(peaks).all():
        notes.append(_NO_PEAKS.format(name=name or "a GPU without a name"))
    return Answer(
        {
            "name": [context.trace.strings[at] for at in table["name"][found.row[first]].tolist()],
            "input_shape": [shapes.texts[at] for at in shapes.number[found.row[first]].tolist()],
            "precision": precision,
            "calls": groups.sizes()[order],
            "call_gflop": found.flop[first] / 1e9,
            "device_us": device_us[order] if on_gpu else np.full(len(first), NAN),
            "host_us": host_us[order],
            "speed_tflop_s": rate,
            "peak_tflop_s": peaks,
            "peak_pct": 100 * _ratio(rate, peaks),
            "intensity_flop_byte": intensity,
            "bound": [
                (MEMORY if below else ARITHMETIC) if known else None
                for known, below in zip(bounded.tolist(), (memory < peaks).tolist(), strict=True)
            ],
            "roof_tflop_s": roof,
            "roof_pct": 100 * _ratio(rate, roof),
        },
        notes if notes or on_gpu else [NO_GPU],
    )


@view(
    "flops_utilization",
    columns(
        ("gpu", "text", "", "model of the GPU"),
        ("time_us", "float", "us", "time of the steps; without steps, of all that was recorded"),
        ("work_tflop", "float", "TFLOP", "floating-point operations in that time"),
        ("speed_tflop_s", "float", "TFLOP/s", "operations by time"),
        ("precision", "text", "", "precision of most of them"),
        ("peak_tflop_s", "float", "TFLOP/s", "the most that this GPU can do in this precision, by its data sheet"),
        ("utilization_pct", "float", "%", "what the operations would take at the peak of their precision, of the time"),
        ("known_pct", "float", "%", "share of the GPU time of kernels that is of operators whose operations are known"),
    ),
)
def flops_utilization(context: Context, *, peak: float = 0.0) -> Answer:
    """How much of what the GPU can compute the model used (model FLOPs utilization, MFU).

    Operations are those of `operator_flops`: products of matrices, convolutions and attention that ran; those computed
    again by activation checkpointing count, too.

    Options:
    - peak: the most that the GPU can do, in TFLOP/s, for all precisions; 0: by the GPU's data sheet.
    """
    _check("flops_utilization", peak)
    found, table = context.get(products), context.trace.table("cpu_op")
    notes = _notes(context)
    if notes:
        return Answer({column.name: [] for column in flops_utilization.columns}, notes)
    ranges = context.get(host_ranges)
    span = ranges.measured().span() or ranges.span() or (0, 0)
    start = table["start"][found.row]
    inside = (start >= span[0]) & (start < span[1])
    by_precision: dict[str | None, int] = {}
    for number in unique_values(found.precision).tolist():
        by_precision[precision_name(number)] = int(found.flop[inside & (found.precision == number)].sum())
    most = max(by_precision, key=lambda name: by_precision[name])
    (name, memory_bytes), activity = _gpu(context), context.get(gpu)
    limits = gpu_peaks(name, memory_bytes) if len(activity) else None
    total, time_us = sum(by_precision.values()), (span[1] - span[0]) / 1000
    at_peak = sum(flop / 1e6 / _peak(limits, precision, peak) for precision, flop in by_precision.items() if flop)
    kernels = activity.end[activity.kind == KERNEL] - activity.start[activity.kind == KERNEL]
    if len(activity) and np.isnan(at_peak):
        notes.append(_NO_PEAKS.format(name=name or "a GPU without a name"))
    return Answer(
        {
            "gpu": [name if len(activity) else None],
            "time_us": [time_us],
            "work_tflop": [total / 1e12],
            "speed_tflop_s": [share_of(total / 1e6, time_us)],
            "precision": [most],
            "peak_tflop_s": [_peak(limits, most, peak)],
            "utilization_pct": [100 * share_of(at_peak, time_us)],
            "known_pct": [100 * share_of(float(found.device_ns.sum()), float(kernels.sum()))],
        },
        notes if len(activity) else [NO_GPU],
    )


def _check(name: str, *given: float) -> None:
    """Raises ViewError for what is no speed."""
    if not all(isfinite(value) and value >= 0 for value in given):
        raise ViewError(f"view {name}: peak and bandwidth are numbers above 0, or 0 for those of the data sheet")


def _notes(context: Context) -> list[str]:
    """Why there are no rows; empty: there are."""
    if len(context.get(products).row):
        return []
    return [_NO_SHAPES if context.get(operator_work).products.any() else _NO_PRODUCTS]


def _gpu(context: Context) -> tuple[str | None, int | None]:
    """The model of the GPU whose kernels took the most time, and the bytes of its memory."""
    activity = context.get(gpu)
    kernel = activity.kind == KERNEL
    if not kernel.any():
        return None, None
    took = sums(activity.device[kernel], (activity.end - activity.start)[kernel], int(activity.device.max()) + 1)
    found = context.get(device_properties).get(int(np.argmax(took)), {})
    return None if found.get("name") is None else str(found["name"]), global_memory(found)


def _peak(limits: GpuPeaks | None, precision: str | None, given: float) -> float:
    """TFLOP/s; NaN: unknown."""
    if given:
        return given
    return NAN if limits is None or precision is None else limits.tflops.get(precision, NAN)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """NaN where there is nothing to divide by."""
    found: Floats = np.divide(part, whole, out=np.full(len(whole), NAN), where=whole > 0)
    return found
