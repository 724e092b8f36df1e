"""Converts an operator's inputs from the agent's binary form to Kineto's JSON arguments.

Theory of operation
    An entry describes the inputs of one call: their types, sizes, strides and values, in the form that
    kineto_agent/protocol/records.py defines. Equal calls share one entry, so a training run has a few thousand of them,
    whatever the number of its ops: they are read one by one.

    The text is what PyTorch's profiler would have written for the same call: C++ names of types, numbers as torch
    prints them, and nothing where the profiler shows nothing (None, strings, devices, long lists). Entries come from
    the target: whatever does not have the form is refused, never guessed.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from kineto_agent.protocol.records import (
    INPUT_BOOL,
    INPUT_DOUBLE,
    INPUT_INT,
    INPUT_NONE,
    INPUT_OTHER,
    INPUT_SCALAR_LIST,
    INPUT_TENSOR,
    INPUT_TENSOR_LIST,
    INPUTS_CUT,
    TENSOR_NO_SIZES,
    TENSOR_NO_STRIDES,
)

LIST_SHOWN = 30  # longer lists are shown as empty, as in PyTorch's profiler


class UnreadableInputs(ValueError):
    """The entry does not have the form that the agent writes."""


class Input(NamedTuple):
    """One input as the profiler shows it."""

    dims: list[Any]
    strides: list[Any]
    type: str
    concrete: str


NOTHING = Input([], [], "", "")


def inputs_text(entry: bytes, dtypes: Sequence[str]) -> str:
    """Returns the arguments "Input Dims", "Input Strides", "Input type" and "Concrete Inputs". Raises UnreadableInputs.

    dtypes: names of the tensors' types by torch's numbers. An op without inputs has no arguments: "".
    """
    inputs = _Reader(entry, dtypes).inputs()
    if not inputs:
        return ""
    arguments = {
        "Concrete Inputs": [each.concrete for each in inputs],
        "Input type": [each.type for each in inputs],
        "Input Strides": [each.strides for each in inputs],
        "Input Dims": [each.dims for each in inputs],
    }
    return json.dumps(arguments)[1:-1]


class _Reader:
    """Reads one entry from its beginning."""

    def __init__(self, entry: bytes, dtypes: Sequence[str]) -> None:
        self._entry = entry
        self._dtypes = dtypes
        self._at = 0

    def inputs(self) -> list[Input]:
        """Returns all inputs; the entry must end with the last one."""
        count, _ = self._take("<BB")
        found = [self._input() for _ in range(count)]
        if self._at != len(self._entry):
            raise UnreadableInputs(f"{len(self._entry) - self._at} bytes too many")
        return found

    def _take(self, layout: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(layout, self._entry, self._at)
        except struct.error as exc:
            raise UnreadableInputs(f"cut at byte {self._at}") from exc
        self._at += struct.calcsize(layout)
        return values

    def _input(self) -> Input:
        (kind,) = self._take("<B")
        if kind in (INPUT_OTHER, INPUT_NONE):
            return NOTHING
        if kind == INPUT_TENSOR:
            return self._tensor()
        if kind == INPUT_TENSOR_LIST:
            return self._tensor_list()
        if kind == INPUT_SCALAR_LIST:
            return self._scalar_list()
        return Input([], [], "Scalar", self._scalar(kind))

    def _tensor(self) -> Input:
        dtype, dims, flags = self._take("<BBB")
        sizes = list(self._take(f"<{dims}q"))
        strides = [] if flags & (TENSOR_NO_STRIDES | TENSOR_NO_SIZES) else list(self._take(f"<{dims}q"))
        return Input(sizes, strides, self._dtypes[dtype] if dtype < len(self._dtypes) else "", "")

    def _tensor_list(self) -> Input:
        count, flags = self._take("<BB")
        tensors = [self._tensor() for _ in range(count)]
        if flags & INPUTS_CUT or count > LIST_SHOWN:
            return Input([], [], "TensorList", "")
        return Input([each.dims for each in tensors], [each.strides for each in tensors], "TensorList", "")

    def _scalar_list(self) -> Input:
        count, flags = self._take("<BB")
        values = [self._scalar(self._take("<B")[0]) for _ in range(count)]
        return NOTHING if flags & INPUTS_CUT else Input([], [], "ScalarList", f"[{', '.join(values)}]")

    def _scalar(self, kind: int) -> str:
        if kind == INPUT_INT:
            return str(self._take("<q")[0])
        if kind == INPUT_DOUBLE:
            return _printed(self._take("<d")[0])
        if kind == INPUT_BOOL:
            return "True" if self._take("<B")[0] else "False"
        raise UnreadableInputs(f"an input of kind {kind}")


def _printed(value: float) -> str:
    """Returns a double as torch prints it: whole numbers with a point and no digits after it."""
    if abs(value) < 2**63 and value.is_integer():
        return f"{int(value)}."
    return f"{value:.17g}"
