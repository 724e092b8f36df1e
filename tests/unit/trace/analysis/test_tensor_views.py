from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.tensor_views import NO_TENSOR, allocated_bytes, tensor_ids, tensors
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table, Trace, make_table
from support.trace_files.op_tables import spans, table
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


# ------------------------------------------------------------ which uses are of one tensor


def inputs(*rows: tuple[int, int, int]) -> Table:
    """Op, TensorImpl, storage."""
    op, impl, storage = zip(*rows, strict=True)
    columns = {"op": np.array(op), "impl": np.array(impl), "storage": np.array(storage)}
    return make_table("op_tensor", len(rows), columns)


def events(*rows: tuple[int, int, int]) -> Table:
    """Start, address, bytes."""
    return table("cpu_instant_event", *({"start": at, "address": address, "bytes": size} for at, address, size in rows))


SPANS = spans("cpu_op", *((10 * number, 10 * number + 5) for number in range(1, 9)))  # ids 1 … 8 at 10, 20, …


@pytest.mark.parametrize(
    ("used", "happened", "numbers", "of_events"),
    [
        ([(1, X, S), (2, VIEW, S), (2, Y, T)], [(0, S, 64)], [0, 0, 1], [0]),
        (
            [(1, X, S), (3, Y, S), (5, Y, S)],
            [(5, S, 64), (25, S, -64), (26, S, 64), (27, T, 64)],
            [0, 1, 1],
            [0, 0, 1, NO_TENSOR],
        ),
        ([(1, X, S), (3, X, S)], [(25, S, 64)], [0, 1], [1]),
        ([(1, X, S), (2, VIEW, S), (4, X, S), (6, Y, S), (6, Y, T)], [], [0, 0, 0, 1, 2], []),
        ([(1, X, 0), (2, Y, 0), (3, X, 0)], [], [0, 1, 0], []),
    ],
    ids=["shared storage", "freed and used again", "free not seen", "no events: uses overlap", "no storage"],
)
def test_tensors_are_told_by_their_storage_and_when_it_was_allocated_and_freed(
    used: list[tuple[int, int, int]], happened: list[tuple[int, int, int]], numbers: list[int], of_events: list[int]
) -> None:
    tables = {"cpu_op": SPANS, "op_tensor": inputs(*used)}
    found = tensor_ids({**tables, "cpu_instant_event": events(*happened)} if happened else tables)
    assert (found.inputs.tolist(), found.allocations.tolist(), found.count) == (numbers, of_events, max(numbers) + 1)


def test_storages_of_one_tensorimpl_are_joined_only_if_it_was_kept_alive() -> None:
    tables = {
        "cpu_op": SPANS,
        "op_tensor": inputs((1, X, S), (2, X, T), (3, VIEW, T), (4, Y, 0x9000)),
        "cpu_instant_event": events((0, S, 64)),
    }
    assert tensor_ids(tables).inputs.tolist() == [0, 1, 1, 2]
    assert tensor_ids(tables, impls_are_kept=True).inputs.tolist() == [0, 0, 0, 1]


def test_inputs_of_ops_that_are_not_there_are_no_tensors() -> None:
    tables = {"cpu_op": SPANS, "op_tensor": inputs((99, X, S), (1, Y, T))}
    assert tensor_ids(tables).inputs.tolist() == [NO_TENSOR, 0]
    assert tensor_ids({"op_tensor": inputs((1, X, S))}).inputs.tolist() == [NO_TENSOR]
    assert tensor_ids({"cpu_op": SPANS, "cpu_instant_event": events((0, S, 64))}).allocations.tolist() == [NO_TENSOR]
    assert tensor_ids({}).count == 0


def test_random_tensors_have_the_numbers_that_a_plain_walk_gives() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        ops = spans("cpu_op", *((10 * number, 10 * number + 5) for number in range(1, 41)))
        used = [
            (int(random.integers(1, 41)), int(random.integers(1, 9)), int(random.integers(100, 106))) for _ in range(60)
        ]
        freed = [(10 * int(random.integers(1, 41)) + 6, int(random.integers(100, 108)), -64) for _ in range(30)]
        tables = {"cpu_op": ops, "op_tensor": inputs(*used), "cpu_instant_event": events(*freed)}
        for kept in (False, True):
            found = tensor_ids(tables, impls_are_kept=kept)
            assert groups(found.inputs.tolist()) == groups(plain(used, freed, kept)), seed


def groups(numbers: list[int]) -> list[list[int]]:
    """Rows with equal numbers."""
    return sorted([row for row, other in enumerate(numbers) if other == number] for number in set(numbers))


def plain(used: list[tuple[int, int, int]], freed: list[tuple[int, int, int]], kept: bool) -> list[int]:
    """Versions of addresses event by event, then the versions of each TensorImpl joined."""
    happened = [(10 * op, 0, row) for row, (op, _, _) in enumerate(used)] + [
        (at, 1, row) for row, (at, _, _) in enumerate(freed)
    ]
    versions: dict[int, int] = {}
    numbers = [0] * len(used)
    count = 0
    for _, frees, row in sorted(happened):
        address = freed[row][1] if frees else used[row][2]
        if address not in versions:
            versions[address], count = count, count + 1
        if frees:
            del versions[address]
        else:
            numbers[row] = versions[address]
    changed = kept
    while changed:
        changed = False
        for row, (_, impl, _) in enumerate(used):
            for other, (_, other_impl, _) in enumerate(used):
                if impl == other_impl and numbers[row] != numbers[other]:
                    low, high = sorted((numbers[row], numbers[other]))
                    numbers = [low if number == high else number for number in numbers]
                    changed = True
    return numbers


def test_an_op_has_the_bytes_that_it_allocated_itself() -> None:
    found = table(
        "cpu_instant_event",
        {"start": 1, "bytes": 64, "external_id": 2},
        {"start": 2, "bytes": -16, "external_id": 2},
        {"start": 3, "bytes": 5, "external_id": 0},
        {"start": 4, "bytes": 7, "external_id": 99},
    )
    assert allocated_bytes(SPANS, found).tolist() == [0, 48, 0, 0, 0, 0, 0, 0]
