"""The floating-point operations of operators, and the bytes of what they read and write, from their recorded inputs.

Theory of operation
    Only products count: of matrices, convolutions, attention, which are nearly all work of a model. A multiplication
    and an addition are two operations. Of an attention with a causal mask, half of the scores count: kernels skip the
    others. Attention's backward computes the scores once more, which counts.

    Bytes are those of the operands and the result, each once: less cannot be moved, more is where caches do not keep
    what is needed again. Both are of one call. Inputs that do not fit an operator give nothing.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.row_groups import group
from kineto_trace.kernel_traits.precisions import BITS, UNKNOWN, precision_number, precision_of_types
from kineto_trace.model.context import Context
from kineto_trace.structure.event_arguments import NOTHING, arguments

Ints = npt.NDArray[np.int64]
Sizes = Sequence[int]

MAX_SIZE = 1 << 40  # of one dimension; the text is not trusted
MAX_DIMENSIONS = 64  # torch's limit
MAX_FLOP = 1 << 50  # of one call: ten minutes of the fastest GPU


class CallWork(NamedTuple):
    """Of one call. elements: of the operands and the result."""

    flop: int
    elements: int


class _CallInputs:
    """What was recorded of a call's inputs: sizes of tensors, and texts of other values."""

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        self._sizes: Any = recorded.get("Input Dims", recorded.get("Input dims"))
        self._texts: Any = recorded.get("Concrete Inputs")

    def sizes(self, at: int) -> Sizes:
        """Raises ValueError if the input is no tensor."""
        value = self._sizes[at]
        if not isinstance(value, list) or not 0 < len(value) <= MAX_DIMENSIONS:
            raise ValueError
        if not all(type(size) is int and 0 <= size < MAX_SIZE for size in value):
            raise ValueError
        return value

    def value(self, at: int) -> Any:
        """A number, a list or a truth value. Raises ValueError."""
        return json.loads(self._texts[at].lower())

    def flag(self, at: int) -> bool:
        """Raises ValueError."""
        value = self.value(at)
        if not isinstance(value, bool):
            raise ValueError
        return value

    def numbers(self, at: int, count: int) -> list[int]:
        """One for each dimension of an image: torch allows one for all. Raises ValueError."""
        value = self.value(at)
        found = [value] if isinstance(value, int) else value
        if not all(type(each) is int for each in found) or len(found) not in (1, count):
            raise ValueError
        return list(found) * (count if len(found) == 1 else 1)


def _product(first: int, second: int) -> Callable[[_CallInputs], CallWork]:
    """A product of the matrices, or of stacks of them, at these places."""

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
    """A convolution of the first input with the second one, its other inputs at these places."""

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
    """placed: each of its elements meets the weights of one channel: the result, or the input of a transposed one."""
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
    """Attention of the input at `query` with the next two, its flag for a causal mask at `causal`."""

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


_SDPA = "aten::_scaled_dot_product_"
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


def work_of(name: str, recorded: Mapping[str, Any]) -> CallWork | None:
    """The work of one call with these arguments (Kineto's); None: it is unknown."""
    compute = _WORK.get(name)
    if compute is None:
        return None
    try:
        return compute(_CallInputs(recorded))
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """One value per row of cpu_op. flop, bytes: 0: unknown. precision: number into PRECISIONS, or UNKNOWN.

    products: rows whose operator has a formula, whether or not its inputs were recorded.
    """

    flop: Ints
    bytes: Ints
    precision: Ints
    products: npt.NDArray[np.bool_]


def operator_work(context: Context) -> OperatorWork:
    """The work of all operators. Each distinct pair of name and inputs is read once."""
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
