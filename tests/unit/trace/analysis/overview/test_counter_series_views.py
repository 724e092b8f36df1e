import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.overview.counter_series_views import NO_COUNTERS, counter_curves, counter_summary, counters
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import PROCESS, KernelCounters
from kineto_trace.model.trace import StringTable
from kineto_trace.open.trace_opener import open_trace
from support.trace_files.simulated.sampled_gpu import counter_table
from support.trace_files.traces import START_NS, target, trace

NOTHING: dict[str, Any] = {}


def kernel_counters(**process: list[int]) -> dict[str, Any]:
    times = [START_NS, START_NS + 500_000_000, START_NS + 1_000_000_000]
    full = {name: np.array(process.get(name, [-1, -1]), np.int64) for name in PROCESS}
    blank = np.empty(0, np.int64)
    rows = dict.fromkeys(("interval", "thread", "cpu_ns", "wait_ns", "switches"), blank)
    lives = dict.fromkeys(("thread", "first_ns", "last_ns"), blank)
    events = dict.fromkeys(
        ("thread", "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults"), blank
    )
    names = ("pid", "first_ns", "last_ns", "cpu_ns", "wait_ns", "major_faults", "read_bytes")
    return KernelCounters(
        times=np.array(times),
        rows=rows,
        events=events,
        lives=lives,
        process=full,
        children=dict.fromkeys(names, blank),
        child_names=(),
    ).to_json()


def test_what_the_kernel_counted_is_per_second_and_what_was_not_read_is_no_row() -> None:
    found = kernel_counters(cpu_ns=[1_000_000_000, 250_000_000], read_bytes=[-1, 4096], major_faults=[0, 0])
    rows = counters(Context(trace(NOTHING, target=target(kernel_counters=found)))).rows()
    assert [(row["counter"], row["unit"], row["time_ns"] - START_NS, row["value"]) for row in rows] == [
        ("process: CPU time", "cores", 0, 2.0),
        ("process: CPU time", "cores", 500_000_000, 0.5),
        ("process: read from storage", "B/s", 500_000_000, 8192.0),
    ]


def test_the_allocators_levels_are_counters() -> None:
    row = {"start": 5, "name": "[memory]", "bytes": 100, "address": 1, "device_type": 1, "device": 0}
    made = trace({"cpu_instant_event": [{**row, "total_allocated": 150, "total_reserved": 1000}]})
    rows = counters(Context(made)).rows()
    assert [(row["counter"], row["unit"], row["value"]) for row in rows] == [
        ("GPU0: allocated", "bytes", 150.0), ("GPU0: reserved", "bytes", 1000.0),
    ]  # fmt: skip


def test_each_member_of_a_files_counter_is_one_without_a_unit(tmp_path: Path) -> None:
    events = [
        {"ph": "C", "name": "SM active", "pid": 0, "ts": 10, "args": {"value": 40}},
        {"ph": "C", "name": "SM active", "pid": 0, "ts": 5, "args": {"value": 20.5, "note": "text"}},
        {"ph": "C", "name": "link", "pid": 0, "ts": 7, "args": {"read": 1}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    rows = counters(Context(open_trace(path))).rows()
    assert [(row["counter"], row["unit"], row["value"]) for row in rows] == [
        ("SM active", None, 20.5), ("SM active", None, 40.0), ("link: read", None, 1.0),
    ]  # fmt: skip


def test_members_of_a_files_counter_that_have_a_column_are_counters_as_others_are(tmp_path: Path) -> None:
    events = [
        {"ph": "C", "name": "Memory", "pid": 5, "ts": 10, "args": {"bytes": 40, "size": 0, "free": 2}},
        {"ph": "C", "name": "Memory", "pid": 5, "ts": 20, "args": {"bytes": 41.5, "free": 10**400}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    rows = counters(Context(open_trace(path))).rows()
    assert [(row["counter"], row["value"]) for row in rows] == [
        ("Memory: free", 2), ("Memory: bytes", 40), ("Memory: bytes", 41.5), ("Memory: size", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("pids", [(0, 1), ("GPU 0", "GPU 1")])
def test_counters_of_one_name_in_several_processes_are_as_many(tmp_path: Path, pids: tuple[object, object]) -> None:
    events = [
        {"ph": "C", "name": "utilization", "pid": pid, "ts": at, "args": {"%": 50 + 40 * number}}
        for at in (10, 20)
        for number, pid in enumerate(pids)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    rows = counter_summary(Context(open_trace(path))).rows()
    shown = [pid if isinstance(pid, str) else f"process {pid}" for pid in pids]
    assert [(row["counter"], row["samples"], row["mean"]) for row in rows] == [
        (f"{shown[0]}: utilization: %", 2, 50), (f"{shown[1]}: utilization: %", 2, 90),
    ]  # fmt: skip


def test_long_series_can_be_thinned() -> None:
    rows = [
        {"start": at, "name": "[memory]", "bytes": 1, "address": at, "device_type": 1, "device": 0,
         "total_allocated": at, "total_reserved": -1}
        for at in range(1, 101)
    ]  # fmt: skip
    context = Context(trace({"cpu_instant_event": rows}))
    assert (len(counters(context)), len(counters(context, max_points=10))) == (100, 10)
    with pytest.raises(ViewError, match="max_points=2"):
        counters(context, max_points=2)


def test_a_trace_without_counters_says_which_option_records_them() -> None:
    assert counters(Context(trace(NOTHING))).notes == (NO_COUNTERS,)


def test_samples_from_before_the_first_activity_have_negative_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    samples = [{"ph": "C", "name": "HBM", "pid": 9, "tid": 0, "ts": ts, "args": {"KB": ts}} for ts in (40, 140)]
    work = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 100, "dur": 20, "args": {}}
    path.write_text(json.dumps({"traceEvents": [*samples, work]}))
    assert [(row["time_us"], row["value"]) for row in counters(Context(open_trace(path))).rows()] == [
        (-60, 40),
        (40, 140),
    ]


def test_the_mean_of_a_counter_is_over_the_time_that_its_values_hold() -> None:
    row = {"name": "[memory]", "bytes": 1, "address": 1, "device_type": 1, "device": 0, "total_reserved": -1}
    rows = [{**row, "start": 0, "total_allocated": 100}, {**row, "start": 750, "total_allocated": 500}]
    made = trace({"cpu_instant_event": rows}, length_ns=1_000)
    (found,) = counter_summary(Context(made)).rows()
    assert (found["counter"], found["unit"], found["samples"]) == ("GPU0: allocated", "bytes", 2)
    assert (found["mean"], found["min"], found["max"], found["last"]) == (200, 100, 500, 500)


def test_a_sample_before_the_window_counts_from_its_beginning(tmp_path: Path) -> None:
    events = [
        {"ph": "C", "name": "SM active", "pid": 0, "ts": 1, "args": {"value": 40}},
        {"ph": "X", "name": "op", "cat": "cpu_op", "pid": 0, "tid": 1, "ts": 10, "dur": 10},
        {"ph": "C", "name": "SM active", "pid": 0, "ts": 15, "args": {"value": 20}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (found,) = counter_summary(Context(open_trace(path))).rows()
    assert found["mean"] == pytest.approx(30)


def test_the_mean_of_the_largest_values_does_not_overflow(tmp_path: Path) -> None:
    events = [{"ph": "C", "name": "large", "pid": 0, "ts": at, "args": {"value": 1e308}} for at in (1, 2_000_000, 3e9)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "X", "name": "op", "cat": "cpu_op", "pid": 0, "tid": 1,
                                                           "ts": 1, "dur": 4e9}]}))  # fmt: skip
    (found,) = counter_summary(Context(open_trace(path))).rows()
    assert found["mean"] == pytest.approx(1e308)


def test_hardware_counters_hold_for_their_samples_and_are_unknown_between_them() -> None:
    strings, start = StringTable(), START_NS + np.array([0, 100, 500])
    column = {"label": "DRAM", "device": 1, "start": start, "duration": np.full(3, 100), "value": [10.0, 30, 50]}
    tables = {"counter": counter_table([column], strings)}
    context = Context(trace(NOTHING, strings=tuple(strings.strings), tables=tables, length_ns=1_000))
    rows = counters(context).rows()
    assert [(row["counter"], row["unit"], row["time_ns"] - START_NS, row["value"]) for row in rows] == [
        ("GPU1: DRAM", "%", 0, 10), ("GPU1: DRAM", "%", 100, 30), ("GPU1: DRAM", "%", 200, None),
        ("GPU1: DRAM", "%", 500, 50), ("GPU1: DRAM", "%", 600, None),
    ]  # fmt: skip
    (found,) = counter_summary(context).rows()
    assert (found["samples"], found["mean"], found["min"], found["last"]) == (3, 30, 10, 50)
    assert len(counters(context, max_points=3)) == 3


def test_a_long_gap_between_samples_stays_unknown_where_curves_are_thinned() -> None:
    strings, start = StringTable(), START_NS + 100 * np.append(np.arange(500), 700 + np.arange(500))
    start = start + (np.arange(1000) % 10 == 9)  # a gap of 1 ns at every tenth sample, which nobody could see
    column = {
        "label": "DRAM",
        "device": 0,
        "start": start,
        "duration": np.full(1000, 100),
        "value": np.arange(1000.0) % 90,
    }
    tables = {"counter": counter_table([column], strings)}
    context = Context(trace(NOTHING, strings=tuple(strings.strings), tables=tables, length_ns=120_000))
    for view in (counters, counter_curves):
        rows = view(context, max_points=100).rows()
        assert 90 <= len(rows) <= 100
        key = "value" if view is counters else "value_pct"
        unknown = [at for at, row in enumerate(rows) if row[key] is None]
        assert [rows[at]["time_ns"] - START_NS for at in unknown] == [50_001]
        assert rows[unknown[0] + 1]["time_ns"] - START_NS == 70_000


def test_curves_have_the_percentages_alone_thinned_to_what_shows_their_shape() -> None:
    strings, start = StringTable(), START_NS + 100 * np.arange(50)
    column = {"device": 1, "start": start, "duration": np.full(50, 100), "value": np.arange(50.0)}
    samples = counter_table([{**column, "label": "DRAM"}, {**column, "label": "PCIe read"}], strings)
    context = Context(trace(NOTHING, strings=tuple(strings.strings), tables={"counter": samples}, length_ns=5_000))
    rows = counter_curves(context).rows()
    assert {(row["device"], row["counter"]) for row in rows} == {(1, "DRAM")}
    assert (len(rows), rows[0]["value_pct"], rows[-1]["value_pct"]) == (51, 0, None)
    assert len(counter_curves(context, max_points=5)) == 5
    assert "kinetoctl trace --counters" in counter_curves(Context(trace(NOTHING))).notes[0]
