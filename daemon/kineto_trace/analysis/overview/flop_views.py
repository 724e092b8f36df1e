"""The cost of the model's products by operator, and how much of the peak the model reaches.

Computes the floating-point operations of operators, and the bytes that they read and write, from recorded inputs.

Theory of operation
    Only products count: of matrices, convolutions, attention, which are nearly all work of a model. A multiplication
    and an addition are two operations. Of an attention with a causal mask, half of the scores count: kernels skip the
    others. Attention's backward computes the scores once more, which counts.

    Bytes are those of the operands and the result, each once: the minimum that must be moved, if caches keep all data
    that is reused. Both are per call. Inputs that do not fit an operator are ignored.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.analysis.host_time.operator_views import input_shapes, op_times, tensor_times
from kineto_trace.analysis.kernels.precision_views import share_of
from kineto_trace.analysis.overview.gpu_figures import global_memory
from kineto_trace.analysis.overview.step_breakdown import host_ranges
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group, subtree_sums, sums
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.errors import ViewError
from kineto_trace.kernel_traits.gpu_vendors import GpuPeaks, GpuVendor, gpu_peaks
from kineto_trace.kernel_traits.precisions import (
    BITS,
    PRECISIONS,
    UNKNOWN,
    precision_name,
    precision_number,
    precision_of_types,
)
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, device_properties, gpu, gpu_vendor, ops
from kineto_trace.structure.event_arguments import arguments
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NAN = float("nan")
ARITHMETIC, MEMORY = "arithmetic", "memory"
_NO_PRODUCTS = (
    "the trace has no operators whose floating-point operations are known (matrix products, convolutions, attention)"
)
_NO_SHAPES = (
    "the inputs of operators were not recorded: record with --record-shapes (torch.profiler: record_shapes=True)"
)
_NO_PEAKS = (
    "the peak speeds of {name} are not known to this version; set the option peak to the value in its data sheet"
)
_FP32, _TF32 = PRECISIONS.index("fp32"), PRECISIONS.index("tf32")
Sizes = Sequence[int]
MAX_SIZE = 1 << 40  # of one dimension; the text is not trusted
MAX_DIMENSIONS = 64  # torch's limit
MAX_FLOP = 1 << 50  # of one call: ten minutes of the fastest GPU
_SDPA = "aten::_scaled_dot_product_"


@dataclass(frozen=True, slots=True)
class Products:
    """The innermost operators whose operations are known, one value each.

    row: of cpu_op.
    flop, bytes: of the call.
    precision: number into PRECISIONS, or UNKNOWN; tf32 is fp32 on NVIDIA's tensor cores (AMD's matrix cores multiply
        fp32 as it is).
    device_ns: of all GPU activities that it launched.
    """

    row: Ints
    flop: Ints
    bytes: Ints
    precision: Ints
    device_ns: Ints


class CallWork(NamedTuple):
    """The work of one call. elements: of the operands and the result."""

    flop: int
    elements: int


class _CallInputs:
    """The recorded inputs of a call: sizes of tensors, and texts of other values."""

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        self._sizes: Any = recorded.get("Input Dims", recorded.get("Input dims"))
        self._texts: Any = recorded.get("Concrete Inputs")

    def sizes(self, at: int) -> Sizes:
        """Returns the sizes of a tensor. Raises ValueError if the input is not one."""
        value = self._sizes[at]
        if not isinstance(value, list) or not 0 < len(value) <= MAX_DIMENSIONS:
            raise ValueError
        if not all(type(size) is int and 0 <= size < MAX_SIZE for size in value):
            raise ValueError
        return value

    def value(self, at: int) -> Any:
        """Returns a number, a list or a truth value. Raises ValueError."""
        return json.loads(self._texts[at].lower())

    def flag(self, at: int) -> bool:
        """Returns a truth value. Raises ValueError."""
        value = self.value(at)
        if not isinstance(value, bool):
            raise ValueError
        return value

    def numbers(self, at: int, count: int) -> list[int]:
        """Returns one number for each dimension of an image: torch allows one for all. Raises ValueError."""
        value = self.value(at)
        found = [value] if isinstance(value, int) else value
        if not all(type(each) is int for each in found) or len(found) not in (1, count):
            raise ValueError
        return list(found) * (count if len(found) == 1 else 1)


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """One value per row of cpu_op.

    flop, bytes: 0 if unknown.
    precision: number into PRECISIONS, or UNKNOWN.
    products: rows whose operator has a formula, whether or not its inputs were recorded.
    """

    flop: Ints
    bytes: Ints
    precision: Ints
    products: Flags


def products(context: Context) -> Products:
    """Returns the products; of nested operators with the same product (aten::convolution), only the innermost one."""
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
            "precision of its inputs: fp64, fp32, tf32 (fp32 on NVIDIA's tensor cores), bf16, fp16, fp8 or int8",
        ),
        ("calls", "int", "", "number of runs"),
        ("call_gflop", "float", "GFLOP", "floating-point operations of one call"),
        ("device_us", "float", "us", "total GPU time of everything that it launched"),
        ("host_us", "float", "us", "its total time on the host"),
        (
            "speed_tflop_s",
            "float",
            "TFLOP/s",
            "operations per second of GPU time; in traces without GPU activities, of host time",
        ),
        ("peak_tflop_s", "float", "TFLOP/s", "peak of this GPU in this precision, from its data sheet"),
        ("peak_pct", "float", "%", "share of peak_tflop_s that was reached"),
        ("intensity_flop_byte", "float", "FLOP/byte", "operations per byte of operands and result, each moved once"),
        (
            "bound",
            "text",
            "",
            "what limits its highest possible speed: arithmetic, or memory if its bandwidth allows less",
        ),
        ("roof_tflop_s", "float", "TFLOP/s", "the lower of the two limits"),
        ("roof_pct", "float", "%", "share of roof_tflop_s that was reached"),
    ),
)
def operator_flops(context: Context, *, peak: float = 0.0, bandwidth: float = 0.0) -> Answer:
    """Matrix products, convolutions and attention by operator and shape (roofline): operations, speed, and its limit.

    Operations are computed from the recorded sizes of the inputs: a multiply-add counts as two, and attention with a
    causal mask counts half. Bytes are the minimum that must be moved, so "memory" is certain, while "arithmetic" is the
    limit with perfect caches. The rows with the most GPU time come first.

    Options:
    - peak: the peak of the GPU in TFLOP/s, for all precisions; 0: from the GPU's data sheet.
    - bandwidth: the memory bandwidth of the GPU in GB/s; 0: from the GPU's data sheet.
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
        ("time_us", "float", "us", "time of the steps; without steps, of the whole recording"),
        ("work_tflop", "float", "TFLOP", "floating-point operations in that time"),
        ("speed_tflop_s", "float", "TFLOP/s", "operations per second"),
        ("precision", "text", "", "precision of most of the operations"),
        ("peak_tflop_s", "float", "TFLOP/s", "peak of this GPU in this precision, from its data sheet"),
        (
            "utilization_pct",
            "float",
            "%",
            "time that the operations would take at the peak of their precision, as a share of time_us",
        ),
        ("known_pct", "float", "%", "share of the kernels' GPU time in operators with known floating-point operations"),
    ),
)
def flops_utilization(context: Context, *, peak: float = 0.0) -> Answer:
    """How much of the GPU's peak the model used (model FLOPs utilization, MFU).

    Operations are those of `operator_flops`: matrix products, convolutions and attention that ran, including those
    recomputed by activation checkpointing.

    Options:
    - peak: the peak of the GPU in TFLOP/s, for all precisions; 0: from the GPU's data sheet.
    """
    _check("flops_utilization", peak)
    found, table = context.get(products), context.trace.table("cpu_op")
    notes = _notes(context)
    if notes:
        return flops_utilization.answer([], notes)
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
    """Raises ViewError for an invalid speed."""
    if not all(isfinite(value) and value >= 0 for value in given):
        raise ViewError(
            f"view {name}: peak and bandwidth must be positive numbers, or 0 for the values in the data sheet"
        )


def _notes(context: Context) -> list[str]:
    """Returns the reason why there are no rows; empty if there are."""
    if len(context.get(products).row):
        return []
    return [_NO_SHAPES if context.get(operator_work).products.any() else _NO_PRODUCTS]


def _gpu(context: Context) -> tuple[str | None, int | None]:
    """Returns the model of the GPU whose kernels took the most time, and the bytes of its memory."""
    activity = context.get(gpu)
    kernel = activity.kind == KERNEL
    if not kernel.any():
        return None, None
    took = sums(activity.device[kernel], (activity.end - activity.start)[kernel], int(activity.device.max()) + 1)
    found = context.get(device_properties).get(int(np.argmax(took)), {})
    return None if found.get("name") is None else str(found["name"]), global_memory(found)


def _peak(limits: GpuPeaks | None, precision: str | None, given: float) -> float:
    """Returns the peak in TFLOP/s; NaN if unknown."""
    if given:
        return given
    return NAN if limits is None or precision is None else limits.tflops.get(precision, NAN)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """Returns the ratio; NaN where the divisor is 0."""
    found: Floats = np.divide(part, whole, out=np.full(len(whole), NAN), where=whole > 0)
    return found


def _product(first: int, second: int) -> Callable[[_CallInputs], CallWork]:
    """Returns the work of a product of the matrices, or of stacks of them, at these places."""

    def work(call: _CallInputs) -> CallWork:
        left, right = call.sizes(first), call.sizes(second)
        if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2] or left[:-2] != right[:-2]:
            raise ValueError
        result = math.prod(left[:-1]) * right[-1]
        return CallWork(2 * result * left[-1], math.prod(left) + math.prod(right) + result)

    return work


def _convolution(
    stride: int, padding: int, dilation: int, transposed: int | None = None
) -> Callable[[_CallInputs], CallWork]:
    """Returns the work of a convolution of the first input with the second; its other inputs are at these places."""

    def work(call: _CallInputs) -> CallWork:
        image, weight = call.sizes(0), call.sizes(1)
        kernel = weight[2:]
        if len(image) != len(weight) or not kernel:
            raise ValueError
        if transposed is not None and call.flag(transposed):
            return _convolved(image, image, weight)
        steps, edges, gaps = (call.numbers(at, len(kernel)) for at in (stride, padding, dilation))
        if min(steps) < 1:
            raise ValueError
        outside = [
            max((size + 2 * edge - gap * (width - 1) - 1) // step + 1, 0)
            for size, width, step, edge, gap in zip(image[2:], kernel, steps, edges, gaps, strict=True)
        ]
        return _convolved(image, [image[0], weight[0], *outside], weight)

    return work


def _convolved(image: Sizes, placed: Sizes, weight: Sizes) -> CallWork:
    """Returns the work of a convolution.

    placed: each of its elements meets the weights of one channel: the result, or the input of a transposed one.
    """
    return CallWork(2 * math.prod(placed) * math.prod(weight[1:]), sum(map(math.prod, (image, placed, weight))))


def _convolution_backward(call: _CallInputs) -> CallWork:
    gradient, image, weight = (call.sizes(at) for at in range(3))
    wanted = call.value(10)
    if not isinstance(wanted, list) or len(wanted) != 3 or len(image) != len(weight):
        raise ValueError
    one = _convolved(image, image if call.flag(7) else gradient, weight)
    times = int(bool(wanted[0])) + int(bool(wanted[1]))
    moved = sum(math.prod(sizes) for sizes in (gradient, image, weight))
    return CallWork(one.flop * times, moved + math.prod(image) * bool(wanted[0]) + math.prod(weight) * bool(wanted[1]))


def _attention(query: int, causal: int, *, backward: bool = False) -> Callable[[_CallInputs], CallWork]:
    """Returns the work of attention of the input at `query` with the next two; the causal flag is at `causal`."""

    def work(call: _CallInputs) -> CallWork:
        asked, keys, values = (call.sizes(query + at) for at in range(3))
        if not len(asked) == len(keys) == len(values) == 4 or asked[3] != keys[3] or keys[2] != values[2]:
            raise ValueError
        scores = math.prod(asked[:3]) * keys[2]
        if call.flag(causal):
            scores //= 2
        result = math.prod(asked[:3]) * values[3]
        own = math.prod(asked) + math.prod(keys) + math.prod(values)
        if backward:  # scores again, gradients of scores and values, of queries and keys
            return CallWork(2 * scores * (3 * asked[3] + 2 * values[3]), 2 * own + 2 * result)
        return CallWork(2 * scores * (asked[3] + values[3]), own + result)

    return work


def work_of(name: str, recorded: Mapping[str, Any]) -> CallWork | None:
    """Returns the work of one call with these arguments (Kineto's); None if unknown."""
    compute = _WORK.get(name)
    if compute is None:
        return None
    try:
        return compute(_CallInputs(recorded))
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def operator_work(context: Context) -> OperatorWork:
    """Returns the work of all operators. Each distinct pair of name and inputs is read once."""
    table, recorded = context.trace.table("cpu_op"), arguments(context, "cpu_op")
    strings = context.trace.strings
    named = np.array([text in _WORK for text in strings], np.bool_)
    products = named[table["name"]] if len(table) else np.zeros(0, np.bool_)
    rows = np.flatnonzero(products & (recorded.text != NOTHING))
    groups = group([table["name"][rows], recorded.text[rows]])
    found = np.tile(np.array([0, 0, UNKNOWN]), (len(groups), 1))
    for at, row in enumerate(rows[groups.first].tolist()):
        call = recorded.objects[recorded.text[row]]
        work, precision = work_of(strings[table["name"][row]], call), precision_of_types(call.get("Input type"))
        if work is not None and work.flop < MAX_FLOP:
            size = work.elements * BITS[precision] // 8 if precision else 0
            found[at] = work.flop, size, precision_number(precision)
    work_of_row = np.tile(np.array([0, 0, UNKNOWN]), (len(table), 1))
    work_of_row[rows] = found[groups.number]
    flop, size, precision_of_row = work_of_row.T
    return OperatorWork(flop, size, precision_of_row, products)


_WORK: Mapping[str, Callable[[_CallInputs], CallWork]] = {
    "aten::mm": _product(0, 1),
    "aten::bmm": _product(0, 1),
    "aten::addmm": _product(1, 2),
    "aten::_addmm_activation": _product(1, 2),
    "aten::baddbmm": _product(1, 2),
    "aten::_scaled_mm": _product(0, 1),
    "aten::_int_mm": _product(0, 1),
    "aten::convolution": _convolution(3, 4, 5, 6),
    "aten::_convolution": _convolution(3, 4, 5, 6),
    "aten::cudnn_convolution": _convolution(3, 2, 4),
    "aten::mkldnn_convolution": _convolution(4, 3, 5),
    "aten::miopen_convolution": _convolution(4, 3, 5),
    "aten::convolution_backward": _convolution_backward,
    f"{_SDPA}flash_attention": _attention(0, 4),
    f"{_SDPA}efficient_attention": _attention(0, 6),
    f"{_SDPA}cudnn_attention": _attention(0, 6),
    f"{_SDPA}flash_attention_for_cpu": _attention(0, 4),
    f"{_SDPA}flash_attention_backward": _attention(1, 11, backward=True),
    f"{_SDPA}efficient_attention_backward": _attention(1, 11, backward=True),
    f"{_SDPA}cudnn_attention_backward": _attention(1, 14, backward=True),
    f"{_SDPA}flash_attention_for_cpu_backward": _attention(1, 7, backward=True),
}
