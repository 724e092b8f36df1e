from typing import Any

import pytest
from kineto_trace.analysis.memory_views import NO_RESERVED, memory_fragmentation, memory_snapshot
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from support.trace_files.traces import START_NS, trace

Row = dict[str, Any]
A, B = 0x1000, 0x2000
OPS = [
    {"start": at, "duration": 100_000, "name": name, "thread": 1, "id": at + 1, "finished": 1, "inputs": -1}
    for at, name in ((0, "aten::linear"), (200_000, "aten::relu"))
]
FRAMES = [{"start": 0, "duration": 500_000, "name": "train.py(8): main", "thread": 1}]


def record(start: int, size: int, address: int, allocated: int, reserved: int = 1000, device: int = 0) -> Row:
    row = {"start": start, "name": "[memory]", "thread": 1, "bytes": size, "address": address, "device_type": 1}
    return {**row, "total_allocated": allocated, "total_reserved": reserved, "device": device}


RECORDS = [  # 50 bytes are from before the recording
    record(10_000, 100, A, 150, 200),
    record(210_000, 30, B, 180, 300),
    record(410_000, -100, A, 80, 300),
]


def context(records: list[Row] = RECORDS) -> Context:
    return Context(trace({"cpu_op": OPS, "cpu_instant_event": records, "python_function": FRAMES}))


def shown(found: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in found.rows()]


def test_without_a_moment_the_blocks_of_the_peak_are_shown_with_age_and_stack() -> None:
    found = memory_snapshot(context())
    assert shown(found, "operator", "size_bytes", "blocks", "address", "age_us", "call_stack") == [
        ("aten::linear", 100, 1, A, 200, "train.py(8): main"),
        ("aten::relu", 30, 1, B, 0, "train.py(8): main"),
        (None, 50, None, None, None, None),
    ]
    assert {(row["time_ns"] - START_NS, row["allocated_bytes"]) for row in found.rows()} == {(210_000, 180)}


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (5_000, [(None, 50)]),
        (10_000, [("aten::linear", 100), (None, 50)]),
        (410_000, [("aten::relu", 30), (None, 50)]),
        (900_000, [("aten::relu", 30), (None, 50)]),
    ],
)
def test_a_moment_has_the_blocks_that_were_held_then(at: int, expected: list[tuple[Any, ...]]) -> None:
    found = memory_snapshot(context(), at_ns=START_NS + at)
    assert shown(found, "operator", "size_bytes") == expected
    assert {row["time_ns"] for row in found.rows()} == {START_NS + at}
    assert sum(row["size_bytes"] for row in found.rows()) == found.rows()[0]["allocated_bytes"]


def test_smaller_blocks_share_a_row() -> None:
    found = memory_snapshot(context(), top=1)
    assert shown(found, "size_bytes", "blocks") == [(100, 1), (30, 1), (50, None)]
    with pytest.raises(ViewError, match="top=0 shows no block"):
        memory_snapshot(context(), top=0)


def test_fragmentation_is_what_is_reserved_and_not_allocated() -> None:
    (row,) = memory_fragmentation(context()).rows()
    assert (row["peak_bytes"], row["peak_ns"] - START_NS) == (180, 210_000)
    assert (row["reserved_bytes"], row["unused_bytes"], row["unused_pct"]) == (300, 120, 40)
    assert row["mean_unused_pct"] == pytest.approx((25 + 40) / 2)
    assert (row["most_unused_bytes"], row["most_unused_ns"] - START_NS) == (220, 410_000)


def test_a_device_whose_reserved_bytes_are_unknown_has_its_peak_alone() -> None:
    unknown = [record(10_000, 100, A, 150, -1, device=1)]
    found = memory_fragmentation(context([*RECORDS, *unknown]))
    assert shown(found, "device", "peak_bytes", "unused_bytes") == [("GPU0", 180, 120), ("GPU1", 150, None)]
    assert found.notes == (f"GPU1: {NO_RESERVED}",)


@pytest.mark.parametrize("view", [memory_snapshot, memory_fragmentation])
def test_a_trace_without_allocations_says_so(view: Any) -> None:
    found = view(context([]))
    assert (len(found), found.notes) == (0, ("the trace has no allocations: record with profile_memory=True",))
