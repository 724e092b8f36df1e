"""The critical path: what held up what, in traces whose path is known."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.critical_path_views import TRACK, critical_path_breakdown, critical_path_edges, overlay
from kineto_trace.arrays.longest_paths import Edges, longest
from kineto_trace.errors import ViewError
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.view import Compat
from support.trace_files import traces
from support.trace_files.h200 import recording
from support.trace_files.ranks import context, event, launched, step

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
US = 1000
EVENTS = [
    step(1, 0, 60),
    event("cpu_op", "aten::mm", 0, 20, **{"External id": 1}),
    event("cpu_op", "aten::relu", 25, 5, **{"External id": 2}),
    *launched("gemm", 5, 15, 60, 1),
]
# Made with HTA 0.6.1: critical_path_analysis(0, "", None), durations by bound_by
HTA_FIGURES = {
    "mlp-cupti130001": {"cpu_bound": 7330.0},
    "streams-cupti130001": {
        "cpu_bound": 3692.0,
        "gpu_compute_bound": 135.0,
        "gpu_kernel_kernel_overhead": 36.0,
        "gpu_kernel_launch_overhead": 9.0,
    },
    "graph-cupti130001": {
        "gpu_kernel_kernel_overhead": 1463.0,
        "cpu_bound": 186.0,
        "gpu_compute_bound": 73.0,
        "gpu_kernel_launch_overhead": 31.0,
    },
}


def op(name: str, start: int, duration: int, thread: int = 1, **more: Any) -> dict[str, Any]:
    values = {"thread": thread, "finished": 1, "inputs": -1, "sequence": -1, "id": start + 1}
    return {"name": name, "start": start * US, "duration": duration * US, **values, **more}


def call(name: str, start: int, duration: int, correlation: int, thread: int = 1) -> dict[str, Any]:
    return {
        "name": name,
        "start": start * US,
        "duration": duration * US,
        "thread": thread,
        "correlation": correlation,
    }


def kernel(name: str, start: int, duration: int, correlation: int, stream: int = 7) -> dict[str, Any]:
    return {
        "name": name,
        "start": start * US,
        "duration": duration * US,
        "correlation": correlation,
        "stream": stream,
    }


def sync(name: str, kind: int, start: int, duration: int, correlation: int, **more: Any) -> dict[str, Any]:
    values = {"type": kind, "stream": 0xFFFFFFFF, "wait_on_stream": -1, "wait_on_correlation": -1, **more}
    return {
        "name": name,
        "start": start * US,
        "duration": duration * US,
        "correlation": correlation,
        **values,
    }


def context_of(rows: Rows) -> Context:
    return Context(traces.trace(rows))


def path(rows: Rows, **options: Any) -> list[tuple[str, str | None, float]]:
    """(edge, name, us) of all edges that take time."""
    found = critical_path_edges(context_of(rows), **options).rows()
    return [(row["edge"], row["name"], row["duration_us"]) for row in found if row["duration_us"]]


def test_the_path_goes_through_the_launch_the_kernels_and_the_call_that_waits_for_them() -> None:
    assert path(GPU_BOUND) == [
        ("dependency", "ProfilerStep#1", 5.0),
        ("operator", "aten::mm", 3.0),
        ("kernel_launch_delay", "gemm", 7.0),
        ("operator", "gemm", 30.0),
        ("kernel_kernel_delay", "ncclDevKernel_AllReduce", 2.0),
        ("operator", "ncclDevKernel_AllReduce", 40.0),
        ("sync_dependency", "cudaDeviceSynchronize", 8.0),
        ("dependency", "ProfilerStep#1", 5.0),
    ]


def test_the_breakdown_adds_up_to_the_window() -> None:
    found = {row["bound_by"]: row["time_us"] for row in critical_path_breakdown(context_of(GPU_BOUND)).rows()}
    assert found == {
        "gpu_communication_bound": 40.0,
        "gpu_compute_bound": 30.0,
        "cpu_bound": 21.0,
        "gpu_kernel_launch_overhead": 7.0,
        "gpu_kernel_kernel_overhead": 2.0,
        "data_loading": 0.0,
        "gpu_memory_bound": 0.0,
    }
    assert sum(found.values()) == 100.0


def test_hta_sees_no_launch_delay_where_more_was_launched_before_the_kernel_began() -> None:
    found = critical_path_breakdown(context_of(GPU_BOUND), compat=Compat.HTA)
    # the queue held another launch when gemm began: nothing joins gemm to the host
    assert {row["bound_by"]: row["time_us"] for row in found.rows()} == {
        "gpu_communication_bound": 40.0,
        "gpu_compute_bound": 30.0,
        "gpu_kernel_kernel_overhead": 2.0,
    }


def test_hta_counts_no_time_between_outermost_operators_and_none_in_calls_that_wait() -> None:
    rows: Rows = {
        "user_annotation": [op("ProfilerStep#1", 0, 100)],
        "cpu_op": [op("aten::add", 1, 4), op("aten::mm", 10, 10)],
        "cuda_runtime": [call("cudaLaunchKernel", 12, 3, 1), call("cudaDeviceSynchronize", 25, 70, 2)],
        "kernel": [kernel("gemm", 20, 60, 1)],
        "cuda_sync": [sync("Context Sync", 4, 26, 68, 2)],
    }
    found = critical_path_edges(context_of(rows), compat=Compat.HTA).rows()
    # not on it: 5..10 between the operators, and what cudaDeviceSynchronize took after the kernel
    assert [(row["edge"], row["name"], row["duration_us"]) for row in found] == [
        ("operator", "aten::add", 4.0),
        ("dependency", None, 0.0),
        ("operator", "aten::mm", 2.0),
        ("kernel_launch_delay", None, 8.0),
        ("operator", "gemm", 60.0),
    ]


def test_without_records_what_a_synchronising_call_waited_for_is_inferred_and_told() -> None:
    rows = {kind: table for kind, table in GPU_BOUND.items() if kind != "cuda_sync"}
    assert path(rows) == path(GPU_BOUND)
    found = critical_path_edges(context_of(rows))
    assert [row["name"] for row in found.rows() if row["inferred"]] == ["cudaDeviceSynchronize"]
    assert "inferred from times (1 of" in found.notes[0]
    assert path(rows, infer=False)[-2] == ("operator", "cudaDeviceSynchronize", 70.0)


def test_a_launch_that_comes_after_the_last_kernel_puts_the_host_on_the_path() -> None:
    rows: Rows = {
        "user_annotation": [op("ProfilerStep#1", 0, 60)],
        "cpu_op": [op("aten::mm", 0, 10), op("aten::relu", 30, 10)],
        "cuda_runtime": [call("cudaLaunchKernel", 2, 3, 1), call("cudaLaunchKernel", 33, 3, 2)],
        "kernel": [kernel("gemm", 10, 5, 1), kernel("relu", 40, 20, 2)],
    }
    assert path(rows) == [
        ("operator", "aten::mm", 2.0),
        ("operator", "cudaLaunchKernel", 3.0),
        ("operator", "aten::mm", 5.0),
        ("dependency", "ProfilerStep#1", 20.0),
        ("operator", "aten::relu", 3.0),
        ("kernel_launch_delay", "relu", 7.0),
        ("operator", "relu", 20.0),
    ]


def test_a_stream_that_waits_for_an_event_depends_on_the_kernel_before_its_record() -> None:
    rows: Rows = {
        "user_annotation": [op("ProfilerStep#1", 0, 20)],
        "cuda_runtime": [
            call("cudaLaunchKernel", 0, 2, 1),
            call("cudaEventRecord", 3, 1, 2),
            call("cudaStreamWaitEvent", 5, 1, 3),
            call("cudaLaunchKernel", 7, 2, 4),
        ],
        "kernel": [kernel("gemm", 10, 50, 1, 7), kernel("nccl", 62, 30, 4, 20)],
        "cuda_sync": [sync("Stream Wait Event", 2, 6, 1, 3, stream=20, wait_on_stream=7, wait_on_correlation=2)],
    }
    assert path(rows) == [
        ("kernel_launch_delay", "gemm", 10.0),
        ("operator", "gemm", 50.0),
        ("sync_dependency", "nccl", 2.0),
        ("operator", "nccl", 30.0),
    ]


def test_the_step_hands_over_to_the_thread_of_the_backward_pass_and_takes_it_back() -> None:
    rows: Rows = {
        "user_annotation": [op("ProfilerStep#1", 0, 100)],
        "cpu_op": [
            op("aten::mm", 0, 20),
            op("autograd::engine::evaluate_function: MmBackward0", 25, 40, thread=2),
            op("aten::add_", 70, 30),
        ],
    }
    assert path(rows) == [
        ("operator", "aten::mm", 20.0),
        ("dependency", None, 5.0),
        ("operator", "autograd::engine::evaluate_function: MmBackward0", 40.0),
        ("dependency", "ProfilerStep#1", 5.0),
        ("operator", "aten::add_", 30.0),
    ]


def test_a_launch_waits_for_the_lock_that_another_thread_has() -> None:
    rows: Rows = {
        "cuda_runtime": [call("cudaMalloc", 0, 50, 1, thread=2), call("cudaLaunchKernel", 10, 45, 2)],
        "cpu_op": [op("aten::mm", 5, 60)],
    }
    assert path(rows, annotation="") == [
        ("operator", "cudaMalloc", 50.0),
        ("dependency", "cudaLaunchKernel", 5.0),
        ("operator", "aten::mm", 10.0),
    ]


def test_a_copy_that_returns_when_it_is_done_was_waited_for() -> None:
    rows: Rows = {
        "cpu_op": [op("aten::item", 0, 50)],
        "cuda_runtime": [call("cudaMemcpyAsync", 5, 40, 1)],
        "gpu_memcpy": [kernel("Memcpy DtoH", 30, 10, 1)],
    }
    found = critical_path_breakdown(context_of(rows), annotation="")
    assert {row["bound_by"]: row["time_us"] for row in found.rows() if row["time_us"]} == {
        "gpu_kernel_launch_overhead": 25.0,
        "cpu_bound": 15.0,
        "gpu_memory_bound": 10.0,
    }


def test_time_below_data_loading_is_data_loading() -> None:
    rows: Rows = {
        "user_annotation": [op("ProfilerStep#1", 0, 50), op("enumerate(DataLoader)#_Iter.__next__", 10, 30)],
        "cpu_op": [op("aten::stack", 20, 10)],
    }
    found = critical_path_breakdown(context_of(rows))
    assert {row["bound_by"]: row["time_us"] for row in found.rows() if row["time_us"]} == {
        "data_loading": 30.0,
        "cpu_bound": 20.0,
    }


def test_what_other_threads_still_do_at_the_end_of_a_step_holds_nobody_up() -> None:
    rows: Rows = {
        "user_annotation": [op("ProfilerStep#1", 0, 50)],
        "cpu_op": [op("aten::mm", 0, 50), op("aten::pin_memory", 5, 200, thread=9)],
    }
    assert path(rows) == [("operator", "aten::mm", 50.0)]


def test_one_instance_of_an_annotation_is_a_window() -> None:
    steps = [op(f"ProfilerStep#{n}", 100 * n, 90) for n in range(3)]
    rows: Rows = {"user_annotation": steps, "cpu_op": [op("aten::mm", 100 * n, 10 * n + 10) for n in range(3)]}
    assert path(rows, instance=1) == [("operator", "aten::mm", 20.0), ("dependency", "ProfilerStep#1", 70.0)]
    assert sum(row[2] for row in path(rows, instance="0:1")) == 190.0
    with pytest.raises(ViewError, match="has instances 0 to 2, got 3"):
        path(rows, instance=3)
    with pytest.raises(ViewError, match="no annotation with 'epoch'"):
        path(rows, annotation="epoch")


def test_after_the_last_gpu_activity_of_another_thread_the_host_is_on_the_path() -> None:
    """The thread of the step has no events of its own: the path was as short as the GPU's work."""
    rows: Rows = {
        "user_annotation": [op("ProfilerStep#1", 0, 1000)],
        "cpu_op": [op("aten::mm", 5, 10, thread=2)],
        "cuda_runtime": [call("cudaLaunchKernel", 8, 3, 101, thread=2)],
        "kernel": [kernel("gemm", 15, 30, 101)],
    }
    assert path(rows) == [
        ("dependency", None, 5.0),
        ("operator", "aten::mm", 3.0),
        ("kernel_launch_delay", "gemm", 7.0),
        ("operator", "gemm", 30.0),
        ("dependency", "ProfilerStep#1", 955.0),
    ]
    found = {row["bound_by"]: row["time_us"] for row in critical_path_breakdown(context_of(rows)).rows()}
    assert (found["cpu_bound"], found["gpu_compute_bound"], sum(found.values())) == (963.0, 30.0, 1000.0)


def test_a_window_without_events_says_so() -> None:
    result = critical_path_breakdown(context_of({"user_annotation": [op("ProfilerStep#1", 0, 1000)]}))
    assert "no operator, call or GPU activity lies in the window, so nothing is known about its time" in result.notes


def test_the_edges_leave_no_hole() -> None:
    found = critical_path_edges(context_of(GPU_BOUND)).rows()
    ends = [row["start_us"] + row["duration_us"] for row in found]
    assert [row["start_us"] for row in found] == [0.0, *ends[:-1]]


def random_rows(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Threads, streams, launches and waits of all sorts, also such as cannot be."""
    random = np.random.default_rng(seed)
    rows: dict[str, list[dict[str, Any]]] = {
        "cpu_op": [
            op("autograd::engine::evaluate_function: X" if thread == 2 else "aten::mm", *pair, thread=thread)
            for thread in (1, 2, 3)
            for pair in zip(random.integers(0, 900, 12).tolist(), random.integers(0, 60, 12).tolist(), strict=True)
        ]
    }
    names = ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaStreamWaitEvent", "cudaEventRecord"]
    starts = random.integers(0, 900, 60).tolist()
    rows["cuda_runtime"] = [
        call(names[random.integers(5)], start, int(random.integers(0, 40)), n, thread=int(random.integers(1, 4)))
        for n, start in enumerate(starts)
    ]
    rows["kernel"] = [
        kernel(
            "k", starts[n] + int(random.integers(-5, 80)), int(random.integers(0, 50)), n, int(random.integers(7, 9))
        )
        for n in range(0, 60, 2)
    ]
    rows["cuda_sync"] = [
        sync(
            "x",
            int(random.integers(1, 5)),
            starts[n],
            10,
            n,
            stream=int(random.integers(7, 9)),
            wait_on_stream=7,
            wait_on_correlation=int(random.integers(0, 60)),
        )
        for n in range(0, 60, 3)
    ]
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_the_path_of_any_trace_goes_from_its_beginning_to_its_end(seed: int) -> None:
    rows = random_rows(seed)
    if seed % 3 == 0:
        del rows["cuda_sync"]
    found = critical_path_edges(context_of(rows), annotation="").rows()
    ends = [row["start_us"] + row["duration_us"] for row in found]
    assert [row["start_us"] for row in found] == [0.0, *ends[:-1]]
    times = [
        (row["start"], row["start"] + row["duration"]) for kind in rows if kind != "cuda_sync" for row in rows[kind]
    ]
    launched = {row["correlation"] for row in rows["kernel"]}
    assert launched and ends[-1] * US <= max(end for _, end in times) - min(start for start, _ in times)
    assert all(row["duration_us"] >= 0 for row in found)


def test_of_equal_paths_the_one_by_the_earlier_edge_counts() -> None:
    edges = Edges(*(np.array(column) for column in ([0, 1, 0, 2], [1, 3, 2, 3], [5, 5, 4, 6])))
    assert longest(4, edges).tolist() == [0, 1]


def test_a_circle_has_no_longest_path() -> None:
    ends = np.array([0, 1])
    with pytest.raises(ViewError, match="in a cycle"):
        longest(2, Edges(ends, ends[::-1], np.array([1, 1])))


def test_a_trace_without_events_has_an_empty_path() -> None:
    assert path({}, annotation="") == []


def exported(trace: Trace, folder: Path) -> list[dict[str, Any]]:
    path = folder / "trace.json"
    export_trace(trace, path)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_the_path_is_a_track_of_its_own_in_a_file(tmp_path: Path) -> None:
    events = exported(overlay(context(EVENTS)), tmp_path)
    slices = [row for row in events if row.get("cat") == "critical_path" and row["ph"] == "X"]
    assert [(row["name"], row["ts"], row["dur"]) for row in slices] == [
        ("cpu_bound: aten::mm", 0, 5),
        ("gpu_kernel_launch_overhead: gemm", 5, 10),
        ("gpu_compute_bound: gemm", 15, 60),
    ]
    named = [row for row in events if row["name"] == "thread_name" and row["tid"] == slices[0]["tid"]]
    assert named[0]["args"] == {"name": TRACK}


def test_events_on_the_path_are_marked_and_joined_by_arrows(tmp_path: Path) -> None:
    events = exported(overlay(context(EVENTS)), tmp_path)
    assert [row["name"] for row in events if row.get("args", {}).get("critical") and row["ph"] == "X"] == [
        "aten::mm",
        "cudaLaunchKernel",
        "gemm",
    ]
    arrows = [row for row in events if row.get("cat") == "critical_path" and row["ph"] in "sf"]
    assert [(row["ph"], row["pid"], row["tid"], row["ts"], row["args"]["type"]) for row in arrows] == [
        ("s", 1, 1, 5, "critical_path_kernel_launch_delay"),
        ("f", 0, 7, 15, "critical_path_kernel_launch_delay"),
    ]


def test_what_is_not_on_the_path_can_be_left_out(tmp_path: Path) -> None:
    events = exported(overlay(context(EVENTS), only_critical=True), tmp_path)
    assert "aten::relu" not in {row["name"] for row in events}
    assert {"aten::mm", "cudaLaunchKernel", "gemm", "ProfilerStep#1"} <= {row["name"] for row in events}


def test_the_path_is_a_track_of_annotations_in_a_capture(tmp_path: Path) -> None:
    op = {"name": "aten::mm", "duration": 20_000, "thread": 1, "finished": 1, "inputs": -1, "id": 1}
    trace = overlay(Context(traces.trace({"cpu_op": [op]})), annotation="")
    events = exported(trace, tmp_path)
    assert [(row["name"], row["dur"]) for row in events if row.get("cat") == "user_annotation"] == [
        ("cpu_bound: aten::mm", 20)
    ]
    assert TRACK in trace.target.threads.values()


@pytest.mark.parametrize("name", HTA_FIGURES)
def test_hta_finds_the_same_in_recorded_traces(name: str) -> None:
    text = json.dumps(recording(name).kineto).encode()
    found = critical_path_breakdown(Context(load_chrome(BytesIO(text))), annotation="", compat=Compat.HTA)
    assert {row["bound_by"]: row["time_us"] for row in found.rows()} == HTA_FIGURES[name]


# One step of 100 us: an op launches two kernels, and the host waits for them.
GPU_BOUND: Rows = {
    "user_annotation": [op("ProfilerStep#1", 0, 100)],
    "cpu_op": [op("aten::mm", 5, 15)],
    "cuda_runtime": [
        call("cudaLaunchKernel", 8, 3, 101),
        call("cudaLaunchKernel", 12, 3, 102),
        call("cudaDeviceSynchronize", 25, 70, 103),
    ],
    "kernel": [kernel("gemm", 15, 30, 101), kernel("ncclDevKernel_AllReduce", 47, 40, 102)],
    "cuda_sync": [sync("Context Sync", 4, 26, 68, 103)],
}
