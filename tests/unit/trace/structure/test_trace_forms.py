"""Older forms of traces, and those of files, as views see them."""

import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace import run_view
from kineto_trace.formats.flame_graphs import FlameGraph, folded, stacks
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.sql import Database
from kineto_trace.sql.arrow_tables import SqlSource
from kineto_trace.structure.trace_forms import recording_span, with_current_forms
from kineto_trace.view_api.result import Result
from support.trace_files import traces
from support.trace_files.chrome_files import event, load_events, names, written
from support.trace_files.sampled_stacks import BACKWARD, FORWARD, LOADER, MAIN, OPTIMIZER, sampled_trace


def mtia(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return event("mtia_ccp_events", name, ts, dur, args=args) | {"pid": 9, "tid": 4}


def run_on_mtia() -> Trace:
    return load_events(
        event("cpu_op", "aten::mul", 0, 10, args={"External id": 1}),
        event("mtia_runtime", "runFunction", 2, 3, args={"correlation": 7}),
        mtia("fc-dtype_Float", 20, 30, stream=1, correlation=7, row=0),
        mtia("dma_request", 60, 40, stream=2, direction="HOST_TO_DEVICE", size=4000),
        mtia("event_wait", 0, 200, stream=2, wait_on_stream=1),
    )


def test_work_of_mtia_is_device_activity() -> None:
    trace = run_on_mtia()
    (kernel,) = run_view("kernels_by_op", trace).rows()
    assert (kernel["name"], kernel["op"], kernel["total_us"]) == ("fc-dtype_Float", "aten::mul", 30)
    (copy,) = run_view("memory_bandwidth_summary", trace).rows()
    assert (copy["kind"], copy["device"], copy["mean"]) == ("Memcpy HtoD", 9, 0.1)
    (busy,) = run_view("temporal_breakdown", trace).rows()
    assert (busy["compute_us"], busy["non_compute_us"], busy["idle_us"]) == (30, 40, 10)


def test_waits_of_mtia_are_no_work() -> None:
    meant = Context(run_on_mtia()).get(with_current_forms).trace
    assert names(meant, "other") == ["event_wait"]


def test_figures_of_other_tools_and_exports_are_those_of_the_file() -> None:
    trace = run_on_mtia()
    assert len(run_view("kernels", trace, compat="plugin")) == 0
    assert written(trace).count(b"mtia_ccp_events") == 3


RANGES = ("ProfilerStep#1", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "Optimizer.step#SGD.step")


@pytest.mark.parametrize("name", RANGES)
def test_ranges_that_old_files_call_operators_are_annotations(name: str) -> None:
    trace = load_events(event("Operator", name, 0, 50), event("Operator", "aten::add_", 10, 5))
    assert run_view("operators", trace).values("name") == ["aten::add_"]
    assert names(Context(trace).get(with_current_forms).trace, "user_annotation") == [name]


def test_steps_of_old_files_are_still_found() -> None:
    trace = load_events(event("Operator", "ProfilerStep#1", 0, 50), event("Operator", "aten::add_", 10, 5))
    assert run_view("step_breakdown", trace).values("step") == ["1", "average"]


def test_annotations_of_the_file_stay() -> None:
    trace = load_events(
        event("user_annotation", "mine", 0, 50, args={"External id": 3, "Ev Idx": 4}),
        event("cpu_op", "DataParallel.forward", 0, 40, args={"External id": 2, "Sequence number": 5}),
    )
    meant = Context(trace).get(with_current_forms).trace
    assert names(meant, "user_annotation") == ["mine", "DataParallel.forward"]
    assert meant.table("user_annotation").origin["event_index"].tolist() == [4, 0]


def test_a_trace_of_today_is_the_same() -> None:
    context = Context(load_events(event("user_annotation", "ProfilerStep#1", 0, 50), event("cpu_op", "aten::mm", 1, 2)))
    assert context.get(with_current_forms) is context


def test_to_sql_work_of_mtia_is_kernels_and_copies() -> None:
    with Database([SqlSource("b.json", Context(load_events(mtia("dma_request", 0, 1, stream=2))))]) as database:
        bare = [tuple(row.values()) for row in database.query("SELECT bytes, copy_kind FROM gpu_memcpy").rows()]
    with Database([SqlSource("a.json", Context(run_on_mtia()))]) as database:
        kernels = database.query("SELECT name, device, stream, correlation, duration_ns, op, registers FROM kernel")
        copies = database.query("SELECT device, stream, bytes, copy_kind, correlation FROM gpu_memcpy")
        others = database.query("SELECT name FROM other")
        events = database.query("SELECT kind, count(*) AS count FROM events GROUP BY kind ORDER BY kind")
        activities = database.query("SELECT activities FROM traces")
    assert kernels.rows() == [
        {"name": "fc-dtype_Float", "device": 9, "stream": 1, "correlation": 7, "duration_ns": 30_000}
        | {"op": "aten::mul", "registers": None}
    ]
    assert copies.rows() == [{"device": 9, "stream": 2, "bytes": 4000, "copy_kind": 1, "correlation": None}]
    assert bare == [(None, 0)]
    assert others.values("name") == ["event_wait"]
    assert {row["kind"]: row["count"] for row in events.rows()} == {
        "cpu_op": 1,
        "cuda_runtime": 1,
        "kernel": 1,
        "gpu_memcpy": 1,
        "other": 1,
    }
    assert activities.values("activities") == [5]


def test_flame_graphs_of_the_gpu_have_the_work_of_mtia() -> None:
    found = folded(stacks(Context(run_on_mtia()), FlameGraph.GPU)).decode().splitlines()
    assert sorted(found) == [
        "launch not in the trace;Memcpy HtoD (dma_request) 40000",
        "thread 2;aten::mul;fc-dtype_Float 30000",
    ]


def test_the_recording_lasts_from_the_first_event_to_the_last() -> None:
    trace = traces.trace(
        {
            "kernel": [{"name": "k", "start": 4_000, "duration": 9_000}],
            "cuda_driver": [{"name": "cuInit", "start": 0, "duration": 50_000}],
        }
    )
    assert recording_span(Context(trace)) == (traces.START_NS + 4_000, traces.START_NS + 13_000)


SAMPLES = [(*MAIN, LOADER)] * 3 + [FORWARD] * 3 + [(*MAIN, BACKWARD)] * 3 + [(*MAIN, OPTIMIZER)]
OPS = [
    {"name": name, "start": start * 1_000_000, "duration": ms * 1_000_000}
    for name, start, ms in [("aten::linear", 33, 24), ("aten::mm", 66, 27), ("aten::add", 94, 3)]
]


@pytest.mark.parametrize("name", ["a.json.gz", "a.pftrace"])
def test_a_file_has_the_figures_of_the_columns_that_it_was_written_from(tmp_path: Path, name: str) -> None:
    """Its slices end where operators begin, so that they nest; the samples lie where they were."""
    use = {"thread": 1, "samples": 10, "python": 10, "running": 10, "waiting": 0, "idle": 0, "has_gil": 0, "cpu_ns": 0}
    stored = sampled_trace(SAMPLES, ops=OPS, steps=4, thread_use=[use], threads={1: "MainThread"})
    export_trace(stored, tmp_path / name)
    read = open_trace(tmp_path / name)
    assert read.table("python_function").origin["end_moved"].any()
    for view in ("overview", "time_causes", "step_phases", "hot_lines", "python_samples", "call_tree", "findings"):
        assert figures(run_view(view, Context(read))) == figures(run_view(view, Context(stored))), view


def figures(result: Result) -> Any:
    """Its rows, with sums rounded: their order differs."""
    return json.loads(json.dumps(result.rows()), parse_float=lambda text: round(float(text), 6))
