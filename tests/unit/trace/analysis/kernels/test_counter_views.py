import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.launches.counter_overlay import with_counters
from kineto_trace.analysis.view_catalog import find_view
from kineto_trace.view_api.view import Compat
from support.trace_files.chrome_files import load_events, written
from support.trace_files.hta_events import Event, context, event, gpu, launch, op, rows

FMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
ADD = "smsp__sass_thread_inst_executed_op_hadd_pred_on.sum"


def profiled(name: str, ts: float, **counters: float) -> Event:
    return event("cuda_profiler_range", name, ts, 5, 0, 0, **counters)


@pytest.mark.parametrize("hta", [False, True])
def test_the_nth_range_belongs_to_the_nth_launch(hta: bool) -> None:
    events = [
        *(
            op("aten::linear", 0, 50),
            op("aten::addmm", 5, 20),
            launch(1, 10),
            launch(2, 60, name="cudaLaunchKernelExC"),
        ),
        *(profiled("second", 90, cycles=7), profiled("first", 80, **{FMA: 10, ADD: 3})),
    ]
    columns = ("kernel", "op_stack", "top_op", "bottom_op", "counter", "value", "flop")
    stack = ["aten::linear", "aten::addmm"]
    assert rows(events, "counters_with_operators", *columns, hta=hta) == [
        ("first", stack, "aten::linear", "aten::addmm", FMA, 10, 20),
        ("first", stack, "aten::linear", "aten::addmm", ADD, 3, 3),
        ("second", [], None, None, "cycles", 7, None),
    ]


def test_ranges_that_cannot_be_paired_are_told_of() -> None:
    result = find_view("counters_with_operators")(context([profiled("a", 1, cycles=1)]))
    assert result.notes == ("1 ranges and 0 calls cudaLaunchKernel… cannot be paired",)
    result = find_view("counters_with_operators")(context([launch(1, 0)]))
    assert result.notes == ("there are no events of the category cuda_profiler_range in the trace",)


@pytest.fixture
def events() -> list[Event]:
    copy = gpu("Memcpy HtoD (Pinned -> Device)", 20, 10, 2, kind="gpu_memcpy", bytes=20_000)
    return [launch(1, 0), gpu("k", 5, 9, 1), launch(2, 3, name="cudaMemcpyAsync"), copy]


def counters(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    found = [row for row in events if row["ph"] == "C"]
    return [(row["name"], row["pid"], row["ts"], row.get("id"), row["args"]) for row in found]


QUEUE = [
    ("Queue Length", 0, 0, 7, {"Queue Length": 1}),
    ("Queue Length", 0, 3, 7, {"Queue Length": 2}),
    ("Queue Length", 0, 5, 7, {"Queue Length": 1}),
    ("Queue Length", 0, 20, 7, {"Queue Length": 0}),
]
COPIES = [("Memcpy HtoD", 0, 20, None, {"Memcpy BW": 2.0}), ("Memcpy HtoD", 0, 30, None, {"Memcpy BW": 0.0})]


def test_counters_are_events_of_the_written_trace(events: list[Event]) -> None:
    trace = with_counters(load_events(*events))
    found = json.loads(written(trace))["traceEvents"]
    assert [{**row, "args": None} for row in found[:4]] == [{**row, "args": None} for row in events]
    assert counters(found) == QUEUE + COPIES


def test_one_sort_of_counters_can_be_left_out(events: list[Event]) -> None:
    assert counters(json.loads(written(with_counters(load_events(*events), bandwidth=False)))["traceEvents"]) == QUEUE
    only = with_counters(load_events(*events), queue_length=False, compat=Compat.HTA)
    assert [row[0] for row in counters(json.loads(written(only))["traceEvents"])] == ["Memcpy HtoD", "Memcpy HtoD"]


def test_counters_stand_behind_other_events_without_a_table(events: list[Event]) -> None:
    mark = {"ph": "i", "name": "mark", "pid": 1, "tid": 1, "ts": 4, "s": "g"}
    found = json.loads(written(with_counters(load_events(mark, *events))))["traceEvents"]
    assert found[0] == mark
    assert len(counters(found)) == 6


def test_captures_can_have_counters_too(events: list[Event]) -> None:
    loaded = load_events(*events)
    tables = {kind: replace(table, origin={}) for kind, table in loaded.tables.items()}
    found = json.loads(written(with_counters(replace(loaded, head=None, tables=tables))))
    shift = min(row["ts"] for row in found["traceEvents"] if row.get("cat") == "cuda_runtime")
    assert [(row[0], round(row[2] - shift)) for row in counters(found["traceEvents"])] == [
        (name, ts) for name, _, ts, _, _ in QUEUE + COPIES
    ]


def test_a_trace_without_gpu_work_gets_no_rows() -> None:
    trace = with_counters(load_events(op("a", 0, 1)))
    assert len(trace.table("other")) == 0
    assert np.array_equal(trace.table("cpu_op")["duration"], [1000])
