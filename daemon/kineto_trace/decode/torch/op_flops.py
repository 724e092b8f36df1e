"""Computes the floating-point operations of ops from their recorded inputs.

Torch's profiler computes them with "with_flops", but does not write them into its trace. They are computed here in the
same way, for the same ops, from the sizes in the trace: a multiplication and an addition are two operations; what an op
does beside its products (the addition of addmm's bias) does not count.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kineto_trace.model.trace import NO_STRING, StringTable, Table, make_table

ARGUMENT = "flops"
_MAX_DIMENSIONS = 64  # torch's limit
_Sizes = Sequence[Any]


def _product(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the FLOPs of a product of matrices, or of stacks with equally many matrices."""
    if len(first) != len(second) or len(first) not in (2, 3) or first[-1] != second[-2]:
        return 0
    return 2 * math.prod(first) * second[-1]


def _convolution(dims: _Sizes, concrete: Sequence[str]) -> int:
    batch, channels, *image = dims[0]
    out_channels, _, *kernel = dims[1]
    stride, padding, dilation = (_pair(text) for text in concrete[3:6])
    groups = int(concrete[6])
    if len(image) != 2 or len(kernel) != 2 or groups < 1 or min(stride) < 1:
        return 0
    outside = [
        (image[axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in (0, 1)
    ]
    return int(2 * batch * math.prod(outside) * math.prod(kernel) * channels * out_channels // groups)


def _pair(text: str) -> list[int]:
    """Parses "[1, 1]", or one number that stands for both."""
    values = json.loads(text)
    both = [values] if isinstance(values, int) else [int(value) for value in values]
    return both * 2 if len(both) == 1 else both


_FLOPS: dict[str, Callable[[_Sizes, Sequence[str]], int]] = {
    "aten::mm": lambda dims, _: _product(dims[0], dims[1]),
    "aten::bmm": lambda dims, _: _product(dims[0], dims[1]),
    "aten::addmm": lambda dims, _: _product(dims[1], dims[2]),
    "aten::baddbmm": lambda dims, _: _product(dims[1], dims[2]),
    "aten::conv2d": _convolution,
    "aten::add": lambda dims, _: math.prod(dims[0]),
    "aten::mul": lambda dims, _: math.prod(dims[0]),
}


def flops(name: str, inputs: str) -> int:
    """Returns the FLOPs of one op with these inputs; 0 if unknown.

    inputs: Kineto's JSON arguments without braces.
    """
    compute = _FLOPS.get(name)
    if compute is None:
        return 0
    try:
        arguments = json.loads("{" + inputs + "}")
        return compute([_sizes(each) for each in arguments["Input Dims"]], arguments["Concrete Inputs"])
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        return 0


def _sizes(value: Any) -> list[int]:
    """Returns the sizes of one tensor; [] for other values, such as a list of tensors. The text is not trusted."""
    known = isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 40 for size in value)
    return value if known and len(value) <= _MAX_DIMENSIONS else []


def add_flops(ops: Table, strings: StringTable) -> Table:
    """Returns cpu_op with one more argument for ops whose number is known."""
    keys = (ops["name"].astype(np.int64) << 32) | (ops["inputs"].astype(np.int64) & 0xFFFFFFFF)
    pairs, places = np.unique(keys, return_inverse=True)
    numbers = np.array([_with_flops(pair >> 32, pair & 0xFFFFFFFF, strings) for pair in pairs.tolist()], np.int32)
    columns = {**ops.columns, "inputs": numbers[places] if len(ops) else ops["inputs"]}
    return make_table(ops.kind, len(ops), columns)


def _with_flops(name: int, inputs: int, strings: StringTable) -> int:
    if inputs == NO_STRING & 0xFFFFFFFF:
        return NO_STRING
    text = strings.strings[inputs]
    count = flops(strings.strings[name], text)
    return strings.add(f'{text}, "{ARGUMENT}": {count}') if count else inputs
