from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.memory_views import (
    NO_ADDRESSES,
    NO_RESERVED,
    memory_curve,
    memory_events,
    memory_fragmentation,
    memory_holders,
    memory_peak,
    memory_peak_blocks,
    memory_snapshot,
    memory_statistics,
)
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.structure.allocations import largest_triangles
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import Compat, View
from support.trace_files.chrome_files import event, load_events
from support.trace_files.traces import START_NS, trace

Row = dict[str, Any]
GPU, CPU = 1, 0
A, B, C = 0x1000, 0x2000, 0x3000


def op(start: int, duration: int, name: str, number: int, **more: Any) -> Row:
    row = {"start": start, "duration": duration, "name": name, "thread": 1, "id": number, "finished": 1}
    return {**row, "inputs": -1, **more}


def record(start: int, size: int, address: int, allocated: int = -1, kind: int = GPU, **more: Any) -> Row:
    row = {"start": start, "name": "[memory]", "thread": 1, "bytes": size, "address": address}
    totals = {"total_allocated": allocated, "total_reserved": 1000 if allocated >= 0 else -1}
    return {**row, **totals, "device_type": kind, "device": 0 if kind == GPU else -1, **more}


# linear 0…100 > empty 10…30; relu 200…300
OPS = [op(0, 100, "aten::linear", 1), op(10, 20, "aten::empty", 2), op(200, 100, "aten::relu", 3)]
RECORDS = [
    record(5, -40, C, 60),  # from before
    record(15, 100, A, 160),
    record(50, 8, B, 168),
    record(210, -100, A, 68),
    record(220, 30, A, 98),  # used again, still held at the end
    record(230, 5, B, 5, CPU),
]


def made(records: list[Row] = RECORDS, ops: list[Row] = OPS) -> Trace:
    return trace({"cpu_op": ops, "cpu_instant_event": records})


def test_an_operator_has_what_was_allocated_in_it_and_in_total_what_operators_inside_did() -> None:
    rows = {(row["device"], row["operator"]): row for row in memory_statistics(Context(made())).rows()}
    assert set(rows) == {
        ("GPU0", "aten::linear"),
        ("GPU0", "aten::empty"),
        ("GPU0", "aten::relu"),
        ("CPU", "aten::relu"),
    }
    linear, relu = rows["GPU0", "aten::linear"], rows["GPU0", "aten::relu"]
    assert (linear["size_increase_bytes"], linear["self_size_increase_bytes"]) == (68, -32)
    assert (linear["allocation_bytes"], linear["self_allocation_bytes"]) == (108, 8)
    assert (linear["allocation_count"], linear["self_allocation_count"], linear["calls"]) == (2, 1, 1)
    assert (relu["size_increase_bytes"], relu["allocation_bytes"]) == (-70, 30)


def test_statistics_can_be_asked_for_a_stretch_of_time() -> None:
    rows = memory_statistics(Context(made()), start_ns=START_NS + 50, end_ns=START_NS + 215).rows()
    assert [(row["operator"], row["size_increase_bytes"]) for row in rows] == [
        ("aten::linear", 8),
        ("aten::relu", -100),
    ]


def test_records_outside_of_operators_are_told() -> None:
    answer = memory_statistics(Context(made([*RECORDS, record(500, 1, C)])))
    assert answer.notes == ("1 of 7 allocations and releases happened outside any operator",)


def test_a_record_of_an_unknown_thread_belongs_to_the_operator_with_its_external_id() -> None:
    rows = memory_statistics(Context(made([record(900, 7, A, thread=0, external_id=3)]))).rows()
    assert [(row["operator"], row["allocation_bytes"]) for row in rows] == [("aten::relu", 7)]


def test_a_release_makes_a_pair_with_the_last_allocation_at_its_address() -> None:
    rows = memory_events(Context(made())).rows()
    shown = [(row["operator"], row["size_bytes"], row["allocation_us"], row["release_us"]) for row in rows]
    assert shown == [
        (None, 40, None, 0.005),
        ("aten::linear (aten::empty)", 100, 0.015, 0.21),
        ("aten::linear", 8, 0.05, None),
        ("aten::relu", 30, 0.22, None),
        ("aten::relu", 5, 0.23, None),
    ]
    assert rows[1]["duration_us"] == pytest.approx(0.195)


def test_blocks_can_be_asked_for_by_time_and_by_size() -> None:
    context = Context(made())

    def sizes(**options: Any) -> list[int]:
        return [row["size_bytes"] for row in memory_events(context, **options).rows()]

    assert sizes(start_ns=START_NS + 50, end_ns=START_NS + 210) == [100, 8]  # one is released then, one allocated
    assert sizes(end_ns=START_NS + 5) == [40]
    assert sizes(min_bytes=8, max_bytes=40) == [40, 8, 30]
    assert sizes(start_ns=START_NS + 1_000) == []


def test_the_plugins_blocks_can_be_asked_for_likewise() -> None:
    context = Context(made())
    every = memory_events(context, compat=Compat.PLUGIN).rows()
    found = memory_events(context, compat=Compat.PLUGIN, min_bytes=8, max_bytes=40).rows()
    assert found == [row for row in every if 8 <= row["size_bytes"] <= 40]
    assert 0 < len(found) < len(every)


def test_equal_addresses_of_two_devices_make_no_pair() -> None:
    rows = memory_events(Context(made([record(1, 8, A), record(2, -8, A, kind=CPU)]))).rows()
    assert [(row["device"], row["duration_us"]) for row in rows] == [("CPU", None), ("GPU0", None)]


def test_the_curve_has_the_level_after_every_record() -> None:
    rows = [row for row in memory_curve(Context(made())).rows() if row["device"] == "GPU0"]
    assert [(row["time_us"], row["allocated_bytes"]) for row in rows] == [
        (0.005, 60),
        (0.015, 160),
        (0.05, 168),
        (0.21, 68),
        (0.22, 98),
    ]
    assert (rows[0]["time_ns"], rows[0]["reserved_bytes"]) == (START_NS + 5, 1000)


def test_without_totals_the_curve_is_relative_and_says_so() -> None:
    answer = memory_curve(Context(made([record(1, 8, A), record(2, 4, B), record(3, -8, A)])))
    assert answer.values("allocated_bytes") == [8, 12, 4]
    assert answer.values("reserved_bytes") == [None] * 3
    assert "no totals" in answer.notes[0]


def test_the_peak_tells_which_operators_held_the_memory() -> None:
    rows = [row for row in memory_peak(Context(made())).rows() if row["device"] == "GPU0"]
    assert [(row["operator"], row["held_bytes"], row["blocks"]) for row in rows] == [
        ("aten::linear (aten::empty)", 100, 1),
        (None, 60, None),  # from before: 168 less what was seen
        ("aten::linear", 8, 1),
    ]
    assert (rows[0]["peak_bytes"], rows[0]["time_ns"], rows[0]["reserved_bytes"]) == (168, START_NS + 50, 1000)
    assert rows[0]["held_pct"] == pytest.approx(100 * 100 / 168)


def test_the_plug_ins_curve_has_every_step_as_two_points() -> None:
    answer = memory_curve(Context(made()), compat=Compat.PLUGIN).rows()
    rows = [(row["time_us"], row["allocated_bytes"]) for row in answer if row["device"] == "GPU0"]
    expected = [(0.005, 60), (0.015, 60), (0.015, 160), (0.05, 160), (0.05, 168), (0.21, 168), (0.21, 68), (0.22, 68)]
    assert rows == [(pytest.approx(time, abs=1e-3), level) for time, level in [*expected, (0.22, 98)]]


def test_the_plug_in_lists_pairs_by_release_and_then_what_is_alone() -> None:
    records = [record(5, -1, C), record(15, 2, A), record(16, 3, B), record(17, 4, C), record(18, 5, C)]
    records += [record(20, -3, B), record(210, -2, A)]
    rows = memory_events(Context(made(records)), compat=Compat.PLUGIN).rows()
    assert [(row["operator"], row["size_bytes"]) for row in rows] == [
        ("aten::linear (aten::empty)", 3),
        ("aten::linear (aten::empty)", 2),
        ("aten::linear (aten::empty)", 5),  # of two allocations at one address the later one
        ("<unknown>", 1),
    ]


def test_the_plug_in_counts_calls_only_inside_of_nodes_with_records() -> None:
    ops = [op(0, 100, "outer", 1), op(10, 20, "inner", 2), op(200, 100, "outer", 3), op(210, 20, "inner", 4)]
    rows = memory_statistics(Context(made([record(15, 8, A)], ops)), compat=Compat.PLUGIN).rows()
    assert [(row["operator"], row["calls"], row["allocation_bytes"]) for row in rows] == [
        ("inner", 1, 8),
        ("outer", 2, 8),
    ]
    plain = {row["operator"]: row["calls"] for row in memory_statistics(Context(made([record(15, 8, A)], ops))).rows()}
    assert plain == {"inner": 2, "outer": 2}


def test_a_record_directly_in_a_step_is_no_operators_for_the_plug_in() -> None:
    ops = [op(0, 100, "ProfilerStep#1", 1), op(10, 20, "aten::mm", 2)]
    rows = memory_statistics(Context(made([record(50, 8, A), record(15, 4, B)], ops)), compat=Compat.PLUGIN).rows()
    assert [(row["operator"], row["allocation_bytes"]) for row in rows] == [("aten::mm", 4)]


def test_a_long_curve_keeps_its_ends_and_its_spike() -> None:
    points = np.stack([np.arange(1000.0), np.zeros(1000)], axis=1)
    points[500, 1] = 1000
    rows = largest_triangles(points, 10)
    assert (len(rows), rows[0], rows[-1], 500 in rows) == (10, 0, 999, True)
    assert largest_triangles(points, 1000).tolist() == list(range(1000))
    assert len(memory_curve(Context(made()), max_points=3).rows()) == 4  # three of the GPU, one of the CPU


def test_a_curve_of_two_points_is_refused() -> None:
    with pytest.raises(ViewError, match="3 or more"):
        memory_curve(Context(made()), max_points=2)


def test_a_trace_without_allocations_says_how_to_get_them() -> None:
    for view in (memory_statistics, memory_curve, memory_events, memory_peak):
        answer = view(Context(trace({})))
        assert (len(answer), "profile_memory" in answer.notes[0]) == (0, True)
    for view in (memory_statistics, memory_curve, memory_events):
        assert len(view(Context(trace({})), compat=Compat.PLUGIN)) == 0


def test_what_an_operator_inside_one_of_its_name_allocated_counts_once() -> None:
    nested = [op(0, 100, "aten::sum", 1), op(10, 50, "aten::sum", 2)]
    (row,) = memory_statistics(Context(made([record(15, 100, A, 160)], nested))).rows()
    assert (row["size_increase_bytes"], row["allocation_count"], row["self_allocation_bytes"]) == (100, 1, 100)


# ------------------------------------------------------------ who holds the memory, and when


FRAMES = [
    {"start": 0, "duration": 500_000, "name": "train.py(8): main", "thread": 1},
    {"start": 150_000, "duration": 200_000, "name": "train.py(30): step", "thread": 1},
]
HELD = [  # 50 bytes are from before the recording
    record(10_000, 100, A, 150, total_reserved=200),
    record(210_000, 30, B, 180, total_reserved=300),
    record(410_000, -100, A, 80, total_reserved=300),
]


def held(records: list[Row] = HELD) -> Context:
    ops = [op(0, 100_000, "aten::linear", 1), op(200_000, 100_000, "aten::relu", 2)]
    return Context(trace({"cpu_op": ops, "cpu_instant_event": records, "python_function": FRAMES}))


@pytest.mark.parametrize("view", [memory_holders, memory_peak_blocks, memory_snapshot, memory_fragmentation])
def test_without_allocations_nobody_holds_anything(view: View) -> None:
    found = view(held([]))
    assert (len(found), found.notes) == (0, ("the trace has no allocations: record with profile_memory=True",))


def test_each_operator_holds_its_blocks_from_their_allocation_to_their_release() -> None:
    rows = memory_holders(held(), points=3).rows()
    assert [(row["operator"], row["time_ns"] - START_NS, row["held_bytes"]) for row in rows] == [
        ("aten::linear", 10_000, 100),
        ("aten::linear", 210_000, 100),
        ("aten::linear", 410_000, 0),
        ("aten::relu", 10_000, 0),
        ("aten::relu", 210_000, 30),
        ("aten::relu", 410_000, 30),
    ]


def test_operators_beyond_the_limit_share_a_row() -> None:
    rows = memory_holders(held(), points=2, operators=1).rows()
    assert [(row["operator"], row["held_bytes"]) for row in rows] == [
        ("aten::linear", 100), ("aten::linear", 0), ("other operators", 0), ("other operators", 30),
    ]  # fmt: skip


def test_blocks_at_the_peak_have_the_stack_of_their_operator() -> None:
    rows = memory_peak_blocks(held()).rows()
    assert [(row["operator"], row["held_bytes"], row["blocks"], row["call_stack"]) for row in rows] == [
        ("aten::linear", 100, 1, "train.py(8): main"),
        ("aten::relu", 30, 1, "train.py(30): step;train.py(8): main"),
    ]
    assert rows[0]["time_ns"] == START_NS + 210_000


def test_a_curve_needs_two_moments() -> None:
    with pytest.raises(ViewError, match="points=1"):
        memory_holders(held(), points=1)


@pytest.mark.parametrize("view", [memory_holders, memory_peak, memory_peak_blocks])
def test_allocations_without_addresses_are_told(view: View) -> None:
    old = {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 1, "tid": 1, "ts": 10, "s": "t"}
    events = [
        event("cpu_op", "aten::empty", 5, 20),
        *(
            {**old, "ts": ts, "args": {"Device Type": 0, "Device Id": -1, "Bytes": size}}
            for ts, size in ((10, 512), (30, -512))
        ),
    ]
    assert NO_ADDRESSES in view(Context(load_events(*events))).notes


def shown(found: Result, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in found.rows()]


def test_without_a_moment_the_blocks_of_the_peak_are_shown_with_age_and_stack() -> None:
    found = memory_snapshot(held())
    assert shown(found, "operator", "size_bytes", "blocks", "address", "age_us", "call_stack") == [
        ("aten::linear", 100, 1, A, 200, "train.py(8): main"),
        ("aten::relu", 30, 1, B, 0, "train.py(30): step;train.py(8): main"),
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
    found = memory_snapshot(held(), at_ns=START_NS + at)
    assert shown(found, "operator", "size_bytes") == expected
    assert {row["time_ns"] for row in found.rows()} == {START_NS + at}
    assert sum(row["size_bytes"] for row in found.rows()) == found.rows()[0]["allocated_bytes"]


def test_smaller_blocks_share_a_row() -> None:
    found = memory_snapshot(held(), top=1)
    assert shown(found, "size_bytes", "blocks") == [(100, 1), (30, 1), (50, None)]
    with pytest.raises(ViewError, match="top=0 would show no blocks"):
        memory_snapshot(held(), top=0)


def test_fragmentation_is_what_is_reserved_and_not_allocated() -> None:
    (row,) = memory_fragmentation(held()).rows()
    assert (row["peak_bytes"], row["peak_ns"] - START_NS) == (180, 210_000)
    assert (row["reserved_bytes"], row["unused_bytes"], row["unused_pct"]) == (300, 120, 40)
    assert row["mean_unused_pct"] == pytest.approx((25 + 40) / 2)
    assert (row["most_unused_bytes"], row["most_unused_ns"] - START_NS) == (220, 410_000)


def test_a_device_whose_reserved_bytes_are_unknown_has_its_peak_alone() -> None:
    unknown = record(10_000, 100, A, 150, total_reserved=-1, device=1)
    found = memory_fragmentation(held([*HELD, unknown]))
    assert shown(found, "device", "peak_bytes", "unused_bytes") == [("GPU0", 180, 120), ("GPU1", 150, None)]
    assert found.notes == (f"GPU1: {NO_RESERVED}",)
