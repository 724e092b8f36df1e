import numpy as np
from kineto_trace.analysis.tensor_views import NO_TENSOR, allocated_bytes, tensor_ids
from kineto_trace.model.trace import Table, make_table
from support.trace_files.op_tables import spans, table

X, Y, VIEW = 0x1000, 0x2000, 0x3000  # TensorImpls
S, T = 0x7F00, 0x7F80  # storages


def inputs(*rows: tuple[int, int, int]) -> Table:
    """Op, TensorImpl, storage."""
    op, impl, storage = zip(*rows, strict=True)
    columns = {"op": np.array(op), "impl": np.array(impl), "storage": np.array(storage)}
    return make_table("op_tensor", len(rows), columns)


def events(*rows: tuple[int, int, int]) -> Table:
    """Start, address, bytes."""
    return table("cpu_instant_event", *({"start": at, "address": address, "bytes": size} for at, address, size in rows))


OPS = spans("cpu_op", *((10 * number, 10 * number + 5) for number in range(1, 9)))  # ids 1 … 8 at 10, 20, …


def test_tensors_that_share_storage_are_one() -> None:
    tables = {
        "cpu_op": OPS,
        "op_tensor": inputs((1, X, S), (2, VIEW, S), (2, Y, T)),
        "cpu_instant_event": events((0, S, 64)),
    }
    found = tensor_ids(tables)
    assert (found.inputs.tolist(), found.allocations.tolist(), found.count) == ([0, 0, 1], [0], 2)


def test_storage_that_was_freed_and_used_again_is_another_tensor() -> None:
    tables = {
        "cpu_op": OPS,
        "op_tensor": inputs((1, X, S), (3, Y, S), (5, Y, S)),
        "cpu_instant_event": events((5, S, 64), (25, S, -64), (26, S, 64), (27, T, 64)),
    }
    found = tensor_ids(tables)
    assert found.inputs.tolist() == [0, 1, 1]
    assert found.allocations.tolist() == [0, 0, 1, NO_TENSOR]


def test_an_allocation_whose_free_was_not_seen_is_another_tensor() -> None:
    tables = {"cpu_op": OPS, "op_tensor": inputs((1, X, S), (3, X, S)), "cpu_instant_event": events((25, S, 64))}
    assert tensor_ids(tables).inputs.tolist() == [0, 1]


def test_storages_of_one_tensorimpl_are_joined_only_if_it_was_kept_alive() -> None:
    tables = {
        "cpu_op": OPS,
        "op_tensor": inputs((1, X, S), (2, X, T), (3, VIEW, T), (4, Y, 0x9000)),
        "cpu_instant_event": events((0, S, 64)),
    }
    assert tensor_ids(tables).inputs.tolist() == [0, 1, 1, 2]
    assert tensor_ids(tables, impls_are_kept=True).inputs.tolist() == [0, 0, 0, 1]


def test_without_allocation_events_overlapping_uses_of_one_storage_are_one_tensor() -> None:
    tables = {"cpu_op": OPS, "op_tensor": inputs((1, X, S), (2, VIEW, S), (4, X, S), (6, Y, S), (6, Y, T))}
    assert tensor_ids(tables).inputs.tolist() == [0, 0, 0, 1, 2]


def test_tensors_without_storage_are_known_by_their_tensorimpl() -> None:
    tables = {"cpu_op": OPS, "op_tensor": inputs((1, X, 0), (2, Y, 0), (3, X, 0))}
    assert tensor_ids(tables).inputs.tolist() == [0, 1, 0]


def test_inputs_of_ops_that_are_not_there_are_no_tensors() -> None:
    tables = {"cpu_op": OPS, "op_tensor": inputs((99, X, S), (1, Y, T))}
    assert tensor_ids(tables).inputs.tolist() == [NO_TENSOR, 0]
    assert tensor_ids({"op_tensor": inputs((1, X, S))}).inputs.tolist() == [NO_TENSOR]
    assert tensor_ids({"cpu_op": OPS, "cpu_instant_event": events((0, S, 64))}).allocations.tolist() == [NO_TENSOR]
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
    assert allocated_bytes(OPS, found).tolist() == [0, 48, 0, 0, 0, 0, 0, 0]
