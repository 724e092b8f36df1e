from typing import Any

import pytest
from kineto_trace.analysis.memory_views import NO_ADDRESSES, memory_holders, memory_peak, memory_peak_blocks
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import View
from support.trace_files.chrome_files import event, load_events
from support.trace_files.traces import START_NS, trace

Row = dict[str, Any]
A, B = 0x1000, 0x2000
OLD = ((10, 512), (30, -512))  # time and size


def op(start: int, duration: int, name: str, number: int) -> Row:
    row = {"start": start, "duration": duration, "name": name, "thread": 1, "id": number, "finished": 1}
    return {**row, "inputs": -1}


def record(start: int, size: int, address: int, allocated: int) -> Row:
    row = {"start": start, "name": "[memory]", "thread": 1, "bytes": size, "address": address}
    return {**row, "total_allocated": allocated, "total_reserved": 1000, "device_type": 1, "device": 0}


OPS = [op(0, 100, "aten::linear", 1), op(200, 100, "aten::relu", 2)]
RECORDS = [
    record(10, 100, A, 150),  # 50 are from before the recording
    record(210, 30, B, 180),
    record(410, -100, A, 80),
]
FRAMES = [
    {"start": 0, "duration": 500, "name": "train.py(8): main", "thread": 1},
    {"start": 150, "duration": 200, "name": "train.py(30): step", "thread": 1},
]


def context(records: list[Row] = RECORDS) -> Context:
    return Context(trace({"cpu_op": OPS, "cpu_instant_event": records, "python_function": FRAMES}))


def test_each_operator_holds_its_blocks_from_their_allocation_to_their_release() -> None:
    rows = memory_holders(context(), points=3).rows()
    assert [(row["operator"], row["time_ns"] - START_NS, row["held_bytes"]) for row in rows] == [
        ("aten::linear", 10, 100),
        ("aten::linear", 210, 100),
        ("aten::linear", 410, 0),
        ("aten::relu", 10, 0),
        ("aten::relu", 210, 30),
        ("aten::relu", 410, 30),
    ]


def test_operators_beyond_the_limit_share_a_row() -> None:
    rows = memory_holders(context(), points=2, operators=1).rows()
    assert [(row["operator"], row["held_bytes"]) for row in rows] == [
        ("aten::linear", 100), ("aten::linear", 0), ("other operators", 0), ("other operators", 30),
    ]  # fmt: skip


def test_blocks_at_the_peak_have_the_stack_of_their_operator() -> None:
    rows = memory_peak_blocks(context()).rows()
    assert [(row["operator"], row["held_bytes"], row["blocks"], row["call_stack"]) for row in rows] == [
        ("aten::linear", 100, 1, "train.py(8): main"),
        ("aten::relu", 30, 1, "train.py(30): step;train.py(8): main"),
    ]
    assert rows[0]["time_ns"] == START_NS + 210


def test_a_trace_without_allocations_says_so() -> None:
    for view in (memory_holders, memory_peak_blocks):
        found = view(context([]))
        assert (len(found), found.notes) == (0, ("the trace has no allocations: record with profile_memory=True",))


def test_a_curve_needs_two_moments() -> None:
    with pytest.raises(ViewError, match="points=1"):
        memory_holders(context(), points=1)


@pytest.mark.parametrize("view", [memory_holders, memory_peak, memory_peak_blocks])
def test_allocations_without_addresses_are_told(view: View) -> None:
    old = {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 1, "tid": 1, "ts": 10, "s": "t"}
    events = [
        event("cpu_op", "aten::empty", 5, 20),
        *({**old, "ts": ts, "args": {"Device Type": 0, "Device Id": -1, "Bytes": size}} for ts, size in OLD),
    ]
    assert NO_ADDRESSES in view(Context(load_events(*events))).notes
