import json
import struct

import pytest
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
from kineto_trace.decode.torch.torch_ops import UnreadableInputs, inputs_text

FLOAT, BFLOAT16 = 0, 1
DTYPES = ("float", "c10::BFloat16")


def tensor(dtype: int, sizes: list[int], strides: list[int], flags: int = 0) -> bytes:
    return struct.pack(f"<BBB{len(sizes)}q{len(strides)}q", dtype, len(sizes), flags, *sizes, *strides)


def entry(*inputs: bytes, count: int | None = None, flags: int = 0) -> bytes:
    return bytes([len(inputs) if count is None else count, flags]) + b"".join(inputs)


def shown(*inputs: bytes) -> list[list[object]]:
    arguments = json.loads("{" + inputs_text(entry(*inputs), DTYPES) + "}")
    assert list(arguments) == ["Concrete Inputs", "Input type", "Input Strides", "Input Dims"]
    return [list(column) for column in zip(*arguments.values(), strict=True)]


def test_a_tensor_shows_type_sizes_and_strides() -> None:
    assert shown(bytes([INPUT_TENSOR]) + tensor(BFLOAT16, [3, 4], [4, 1])) == [["", "c10::BFloat16", [4, 1], [3, 4]]]
    assert shown(bytes([INPUT_TENSOR]) + tensor(FLOAT, [], [])) == [["", "float", [], []]]


def test_a_tensor_whose_sizes_cannot_be_read_shows_its_type() -> None:
    assert shown(bytes([INPUT_TENSOR]) + tensor(FLOAT, [], [], TENSOR_NO_SIZES | TENSOR_NO_STRIDES)) == [
        ["", "float", [], []]
    ]
    assert shown(bytes([INPUT_TENSOR]) + tensor(FLOAT, [2], [], TENSOR_NO_STRIDES)) == [["", "float", [], [2]]]


def test_an_undefined_tensor_shows_nothing() -> None:
    assert shown(bytes([INPUT_TENSOR]) + tensor(255, [], [], TENSOR_NO_SIZES | TENSOR_NO_STRIDES)) == [["", "", [], []]]


def test_a_list_of_tensors_nests() -> None:
    two = bytes([INPUT_TENSOR_LIST, 2, 0]) + tensor(FLOAT, [2], [1]) + tensor(FLOAT, [3], [1])
    assert shown(two) == [["", "TensorList", [[1], [1]], [[2], [3]]]]


def test_long_lists_are_shown_as_the_profiler_does() -> None:
    assert shown(bytes([INPUT_TENSOR_LIST, 31, 0]) + tensor(FLOAT, [2], [1]) * 31) == [["", "TensorList", [], []]]
    assert shown(bytes([INPUT_TENSOR_LIST, 1, INPUTS_CUT]) + tensor(FLOAT, [2], [1])) == [["", "TensorList", [], []]]
    assert shown(bytes([INPUT_SCALAR_LIST, 1, INPUTS_CUT, INPUT_INT]) + struct.pack("<q", 1)) == [["", "", [], []]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (bytes([INPUT_INT]) + struct.pack("<q", -3), "-3"),
        (bytes([INPUT_BOOL, 1]), "True"),
        (bytes([INPUT_DOUBLE]) + struct.pack("<d", 2.0), "2."),
        (bytes([INPUT_DOUBLE]) + struct.pack("<d", -0.0), "0."),
        (bytes([INPUT_DOUBLE]) + struct.pack("<d", 0.1), "0.10000000000000001"),
        (bytes([INPUT_DOUBLE]) + struct.pack("<d", 1e12), "1000000000000."),
        (bytes([INPUT_DOUBLE]) + struct.pack("<d", 1e19), "1e+19"),
        (bytes([INPUT_DOUBLE]) + struct.pack("<d", float("-inf")), "-inf"),
    ],
)
def test_scalars_are_printed_as_torch_does(value: bytes, text: str) -> None:
    assert shown(value) == [[text, "Scalar", [], []]]
    assert shown(bytes([INPUT_SCALAR_LIST, 2, 0]) + value * 2) == [[f"[{text}, {text}]", "ScalarList", [], []]]


def test_what_the_profiler_does_not_show_is_empty() -> None:
    assert shown(bytes([INPUT_NONE]), bytes([INPUT_OTHER])) == [["", "", [], []]] * 2
    assert shown(bytes([INPUT_SCALAR_LIST, 0, 0])) == [["[]", "ScalarList", [], []]]


def test_an_op_without_inputs_has_no_arguments() -> None:
    assert inputs_text(entry(), DTYPES) == ""


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        entry(bytes([INPUT_INT, 0])),
        entry(bytes([99])),
        entry(bytes([INPUT_NONE]), count=2),
        entry(bytes([INPUT_NONE]), count=0),
        entry(bytes([INPUT_SCALAR_LIST, 1, 0, INPUT_TENSOR])),
        entry(bytes([INPUT_TENSOR, FLOAT, 200, 0])),
    ],
)
def test_a_damaged_entry_is_refused(damaged: bytes) -> None:
    with pytest.raises(UnreadableInputs):
        inputs_text(damaged, DTYPES)
