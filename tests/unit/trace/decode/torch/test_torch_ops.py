"""Synthetic records of the operator observer."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    KIND_OP,
    KIND_OP_TENSORS,
    OP,
    OP_TENSORS,
    OP_UNFINISHED,
    SCOPE_BACKWARD_FUNCTION,
    SCOPE_FUNCTION,
    SCOPE_USER,
    SPACE_OP_INPUTS,
    SPACE_OP_NAME,
    SPACE_TORCH_THREAD,
    TENSOR_NO_SIZES,
    TENSOR_NO_STRIDES,
)
from kineto_trace.decode.decoded import Decoded, DecodeWindow
from kineto_trace.decode.torch import torch_ops
from kineto_trace.decode.torch.torch_ops import UnreadableInputs, comms_text, inputs_text
from kineto_trace.model.trace import NO_STRING, StringTable
from kineto_trace.spool.raw_records import RawWriter, read_source
from support.trace_files.h200 import string_entry

NAMES = {0xA1: "aten::mm", 0xA2: "MmBackward0", 0xA3: "my step"}
WINDOW_END = 10_000


def op(start: int, end: int, name: int = 0xA1, thread: int = 7, number: int = 0, **fields: int) -> bytes:
    return OP.pack(
        start,
        end,
        name,
        fields.get("sequence", -1),
        fields.get("forward_thread", 0),
        fields.get("inputs", 0),
        thread,
        number,
        fields.get("kind", KIND_OP),
        fields.get("scope", SCOPE_FUNCTION),
        fields.get("flags", 0),
        0,
        0,
    )


def tensors(thread: int, number: int, position: int, *pairs: tuple[int, int]) -> bytes:
    flat = [value for pair in (*pairs, *[(0, 0)] * (3 - len(pairs))) for value in pair]
    return OP_TENSORS.pack(*flat, thread, number, KIND_OP_TENSORS, len(pairs), position, 0, 0)


def decoded(
    folder: Path,
    *buffers: bytes,
    strings: StringTable | None = None,
    strings_data: bytes = b"",
    metadata: dict[str, Any] | None = None,
    dropped: int = 0,
) -> Decoded:
    table = b"".join(string_entry(key, SPACE_OP_NAME, text.encode()) for key, text in NAMES.items())
    with RawWriter(folder / "ops", source="torch_ops", format=torch_ops.FORMAT, metadata=metadata or {}) as writer:
        for sequence, data in enumerate(buffers):
            writer.append_buffer(data, sequence=sequence, records=len(data) // OP.size)
        writer.append_strings(table + strings_data)
        writer.finish(metadata={}, record_bytes={}, records=0, dropped=dropped)
    return torch_ops.decode(
        read_source(folder / "ops"), StringTable() if strings is None else strings, DecodeWindow(0, WINDOW_END)
    )


def column(ops: Decoded, kind: str, name: str) -> Sequence[Any]:
    values: list[Any] = ops.tables[kind][name].tolist()
    return values


def test_records_become_rows_in_the_order_of_their_starts(tmp_path: Path) -> None:
    strings = StringTable()
    ops = decoded(
        tmp_path,
        op(200, 300, number=2) + op(100, 500, number=1, sequence=5),
        op(150, 160, 0xA2, thread=8, number=1, scope=SCOPE_BACKWARD_FUNCTION, sequence=5, forward_thread=1),
        strings=strings,
        strings_data=string_entry(7, SPACE_TORCH_THREAD, struct.pack("<Q", 1))
        + string_entry(8, SPACE_TORCH_THREAD, struct.pack("<Q", 2)),
    )
    assert [strings.strings[number] for number in column(ops, "cpu_op", "name")] == [
        "aten::mm",
        "MmBackward0",
        "aten::mm",
    ]
    assert {name: values.tolist() for name, values in ops.tables["cpu_op"].columns.items() if name != "name"} == {
        "start": [100, 150, 200],
        "duration": [400, 10, 100],
        "thread": [7, 8, 7],
        "id": [1, 2, 3],
        "sequence": [5, 5, -1],
        "torch_thread": [1, 2, 1],
        "forward_thread": [0, 1, 0],
        "scope": [0, 1, 0],
        "finished": [1, 1, 1],
        "inputs": [NO_STRING] * 3,
    }
    assert (ops.records, ops.undecoded, ops.warnings) == (3, 0, ())


def test_user_scopes_are_annotations_with_ids_among_the_ops(tmp_path: Path) -> None:
    ops = decoded(tmp_path, op(2, 3) + op(1, 4, 0xA3, scope=SCOPE_USER) + op(5, 6))
    assert column(ops, "user_annotation", "id") == [1]
    assert column(ops, "cpu_op", "id") == [2, 3]


def test_only_the_wanted_types_are_kept(tmp_path: Path) -> None:
    ops = decoded(tmp_path, op(2, 3) + op(1, 4, 0xA3, scope=SCOPE_USER), metadata={"activity_types": ["cpu_op"]})
    assert {kind: len(table) for kind, table in ops.tables.items()} == {"cpu_op": 1}


def test_inputs_are_arguments_with_the_types_that_the_source_names(tmp_path: Path) -> None:
    strings = StringTable()
    entry = bytes([1, 0, 1, 0, 0, 0])  # one input, a tensor of type 0 without dimensions
    ops = decoded(
        tmp_path,
        op(1, 2, inputs=5) + op(3, 4, inputs=6) + op(5, 6, inputs=7) + op(7, 8),
        strings=strings,
        strings_data=string_entry(5, SPACE_OP_INPUTS, entry) + string_entry(6, SPACE_OP_INPUTS, b"?"),
        metadata={"dtypes": ["double"]},
    )
    numbers = column(ops, "cpu_op", "inputs")
    assert '"Input type": ["double"]' in strings.strings[numbers[0]]
    assert numbers[1:] == [NO_STRING] * 3
    assert ops.warnings == (
        "1 op has no inputs, because they could not be stored",
        "1 description of inputs could not be read",
    )


def test_where_starts_are_equal_the_parent_comes_first(tmp_path: Path) -> None:
    ops = decoded(tmp_path, op(1, 2) + op(1, 4))
    assert column(ops, "cpu_op", "duration") == [3, 1]


def test_ops_that_still_ran_enclose_what_their_thread_did(tmp_path: Path) -> None:
    running = {"flags": OP_UNFINISHED}
    late = WINDOW_END + 50
    ops = decoded(tmp_path, op(20, late), op(10, 0, **running), op(30, 0, thread=8, **running))
    assert column(ops, "cpu_op", "start") == [10, 20, 30]
    assert column(ops, "cpu_op", "finished") == [0, 1, 0]
    assert ops.tables["cpu_op"].end().tolist() == [late, late, WINDOW_END]


def test_a_name_that_never_arrived_is_seen_and_counted(tmp_path: Path) -> None:
    strings = StringTable()
    ops = decoded(tmp_path, op(1, 2, 0xBEEF) + op(3, 4, 0xBEEF) + op(5, 6), strings=strings)
    assert strings.strings[column(ops, "cpu_op", "name")[0]] == "op with unknown name 0x000000000000beef"
    assert ops.warnings == ("2 ops have no name, because it could not be stored",)


def test_tensors_find_their_op_by_thread_and_number(tmp_path: Path) -> None:
    ops = decoded(
        tmp_path,
        op(5, 9, number=1) + tensors(7, 1, 0, (10, 11), (20, 21), (30, 31)) + tensors(7, 1, 3, (40, 0)),
        op(1, 2, thread=8, number=1) + tensors(8, 1, 0, (50, 51)),
    )
    assert {name: values.tolist() for name, values in ops.tables["op_tensor"].columns.items()} == {
        "op": [2, 2, 2, 2, 1],
        "position": [0, 1, 2, 3, 0],
        "impl": [10, 20, 30, 40, 50],
        "storage": [11, 21, 31, 0, 51],
    }
    assert ops.undecoded == 0


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    ops = decoded(tmp_path, op(1, 2) + op(1, 2, kind=9) + tensors(99, 1, 0, (1, 1)) + b"cut", b"")
    assert len(ops.tables["cpu_op"]) == 1
    assert ops.undecoded == 3


def test_tensors_of_an_op_that_was_dropped_are_lost_with_it_and_readable(tmp_path: Path) -> None:
    described = tensors(7, 1, 0, (1, 2))
    assert decoded(tmp_path / "whole", op(1, 2), described).undecoded == 1
    assert decoded(tmp_path / "dropped", op(1, 2), described, dropped=1).undecoded == 0


def test_no_records_give_empty_tables(tmp_path: Path) -> None:
    ops = decoded(tmp_path)
    assert {kind: len(table) for kind, table in ops.tables.items()} == {"cpu_op": 0, "user_annotation": 0}


DTYPES = ("float", "c10::BFloat16", "c10::Float8_e5m2")
NONE = struct.pack("<I", 0)


def text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def numbers(*values: int, count: int | None = None) -> bytes:
    return struct.pack(f"<I{len(values)}q", len(values) if count is None else count, *values)


def entry(*, dtype: int = 1, stride: int = 1, ranks: bytes = NONE, group: str = "0") -> bytes:
    return (
        struct.pack("<iiiiqqb", 3, 8, 0, stride, 100, 800, dtype)
        + text("_allgather_base") + text(group) + text("default_pg") + NONE + numbers(2, 3) + ranks
    )  # fmt: skip


def read(data: bytes, sequence: int = 7) -> dict[str, Any]:
    found = json.loads("{" + comms_text(data, sequence, DTYPES) + "}")
    assert isinstance(found, dict)
    return found


def test_a_collective_has_kinetos_arguments() -> None:
    assert read(entry(ranks=numbers(0, 1))) == {
        "Collective name": "_allgather_base",
        "In msg nelems": 100,
        "Out msg nelems": 800,
        "Group size": 8,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[2, 3]",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
        "Rank": 3,
        "Global rank start": 0,
        "Global rank stride": 1,
        "Seq": 7,
    }


def test_what_is_not_known_is_left_out() -> None:
    missing = {"Seq", "Global rank stride", "dtype", "Process Group Name"}
    assert not missing & set(read(entry(stride=0, dtype=9, group=""), sequence=-1))


def test_long_lists_are_shown_as_their_beginning_and_their_end() -> None:
    shown = read(entry(ranks=numbers(*range(29), 63, count=64)))["Process Group Ranks"]
    assert shown.startswith("[0, 1, 2, ") and shown.endswith(", 28, ..., 63]")


@pytest.mark.parametrize("data", [b"", entry()[:-1], entry() + b"\0", entry(ranks=struct.pack("<I", 1 << 31))])
def test_an_entry_that_is_not_in_the_form_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableInputs):
        comms_text(data, 1, DTYPES)


FLOAT, BFLOAT16 = 0, 1  # of DTYPES


def tensor(dtype: int, sizes: list[int], strides: list[int], flags: int = 0) -> bytes:
    return struct.pack(f"<BBB{len(sizes)}q{len(strides)}q", dtype, len(sizes), flags, *sizes, *strides)


def op_inputs(*inputs: bytes, count: int | None = None, flags: int = 0) -> bytes:
    return bytes([len(inputs) if count is None else count, flags]) + b"".join(inputs)


def shown(*inputs: bytes) -> list[list[object]]:
    arguments = json.loads("{" + inputs_text(op_inputs(*inputs), DTYPES) + "}")
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
    assert inputs_text(op_inputs(), DTYPES) == ""


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        op_inputs(bytes([INPUT_INT, 0])),
        op_inputs(bytes([99])),
        op_inputs(bytes([INPUT_NONE]), count=2),
        op_inputs(bytes([INPUT_NONE]), count=0),
        op_inputs(bytes([INPUT_SCALAR_LIST, 1, 0, INPUT_TENSOR])),
        op_inputs(bytes([INPUT_TENSOR, FLOAT, 200, 0])),
    ],
)
def test_a_damaged_entry_is_refused(damaged: bytes) -> None:
    with pytest.raises(UnreadableInputs):
        inputs_text(damaged, DTYPES)
