from typing import Any

import numpy as np
from kineto_trace.analysis.tensor_views import tensors
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table, Trace, make_table
from support.trace_files.traces import trace

Row = dict[str, Any]
X, Y, VIEW = 0x10, 0x20, 0x30  # TensorImpls
S, T = 0x7F00, 0x7F80  # storages
MM = '"Input type": ["float", "Scalar", "TensorList", "double"], "Input Dims": [[2, 3], [], [[1], [2]], [4]]'


def op(start: int, duration: int, name: str, number: int, **more: Any) -> Row:
    row = {"start": start, "duration": duration, "name": name, "thread": 1, "id": number, "finished": 1, "inputs": -1}
    return {**row, **more}


def record(start: int, size: int, address: int) -> Row:
    row = {"start": start, "name": "[memory]", "thread": 1, "bytes": size, "address": address, "device_type": 1}
    return {**row, "total_allocated": -1, "total_reserved": -1}


def made(ops: list[Row], inputs: list[tuple[int, int, int, int]], records: list[Row]) -> Trace:
    """inputs: operator, position, TensorImpl, storage."""
    found = trace({"cpu_op": ops, "cpu_instant_event": records})
    columns = {
        name: np.array([row[n] for row in inputs]) for n, name in enumerate(("op", "position", "impl", "storage"))
    }
    tables: dict[str, Table] = {**found.tables, "op_tensor": make_table("op_tensor", len(inputs), columns)}
    return Trace(
        target=found.target,
        strings=(*found.strings, MM),
        tables=tables,
        window_start_ns=found.window_start_ns,
        window_end_ns=found.window_end_ns,
    )


OPS = [op(10, 10, "aten::empty", 1), op(30, 10, "aten::mm", 2), op(50, 20, "aten::relu", 3), op(90, 5, "aten::add", 4)]


def test_a_tensor_has_its_maker_its_users_and_its_times() -> None:
    inputs = [(2, 0, X, S), (3, 0, VIEW, S)]
    found = tensors(Context(made(OPS, inputs, [record(15, 64, S), record(80, -64, S)]))).rows()
    assert len(found) == 1
    row = found[0]
    assert (row["made_by"], row["first_used_by"], row["last_used_by"]) == ("aten::empty", "aten::mm", "aten::relu")
    assert (row["size_bytes"], row["size_is_exact"], row["uses"], row["device"]) == (64, True, 2, "GPU0")
    assert (row["allocation_us"], row["first_use_us"], row["last_use_us"]) == (0.015, 0.03, 0.07)
    assert (row["release_us"], row["unused_us"], row["address"]) == (0.08, 0.01, S)


def test_storage_that_is_used_again_is_another_tensor() -> None:
    inputs = [(2, 0, X, S), (4, 0, Y, S)]
    found = tensors(Context(made(OPS, inputs, [record(80, -64, S), record(85, 32, S)]))).rows()
    assert [(row["tensor"], row["size_bytes"], row["last_used_by"]) for row in found] == [
        (0, 64, "aten::mm"),
        (1, 32, "aten::add"),
    ]
    assert (found[0]["allocation_us"], found[0]["release_us"]) == (None, 0.08)
    assert (found[1]["made_by"], found[1]["release_us"]) == (None, None)


def test_without_allocations_the_size_is_that_of_the_shape() -> None:
    ops = [OPS[0], {**OPS[1], "inputs": 4}, *OPS[2:]]
    inputs = [(2, 0, X, S), (2, 1, Y, T), (2, 2, 0x40, 0x50), (2, 3, 0x60, 0x70), (3, 0, 0x80, 0x90)]
    context = Context(made(ops, inputs, []))
    assert context.trace.strings[4] == MM
    found = tensors(context).rows()
    # 2 by 3 floats; two of a list, whose types are not told; 4 doubles; inputs were not recorded.
    assert [row["size_bytes"] for row in found] == [24, None, None, 32, None]
    assert not any(row["size_is_exact"] for row in found)


def test_blocks_of_memory_stand_in_where_inputs_are_unknown() -> None:
    rows = {"cpu_op": OPS, "cpu_instant_event": [record(15, 64, S), record(17, -8, T), record(80, -64, S)]}
    answer = tensors(Context(trace(rows)))
    assert "blocks of memory" in answer.notes[0]
    assert [(row["made_by"], row["size_bytes"], row["uses"], row["release_us"]) for row in answer.rows()] == [
        ("aten::empty", 64, None, 0.08)
    ]


def test_a_trace_without_tensors_says_how_to_get_them() -> None:
    answer = tensors(Context(trace({})))
    assert (len(answer), "record_shapes" in answer.notes[0]) == (0, True)
