import numpy as np
import pytest
from kineto_trace.arrays.intervals import covered
from kineto_trace.conversion.trace_summary import summarize
from support.counters.trace_samples import sample
from support.trace_files.traces import START_NS, trace


def test_activities_have_the_names_that_their_vendor_declares() -> None:
    tables = {
        "kernel": [{"start": 0, "duration": 100, "name": "a"}],
        "cuda_runtime": [{"start": 0, "name": "launch"}] * 2,
    }
    value = trace(tables, categories={"cuda_runtime": "pebble_runtime", "cuda_driver": "pebble_driver"})
    assert summarize(value)["activities"] == {"kernel": 1, "pebble_runtime": 2}
    assert "pebble_runtime" in value._repr_html_()


def test_the_summary_of_a_trace() -> None:
    value = trace(
        {
            "kernel": [
                {"start": 0, "duration": 100, "name": "a"},
                {"start": 50, "duration": 100, "name": "b"},
                {"start": 500, "duration": 60, "name": "a"},
                {"start": 0, "duration": 1_000, "name": "c", "device": 1},
            ],
            "gpu_memcpy": [{"start": 150, "duration": 50, "name": "Memcpy"}],
            "cuda_runtime": [],
            "python_function": [
                {"name": "f", "self_samples": 3, "samples": 3},
                {"name": "g", "self_samples": 0, "samples": 3},
                {"name": "f", "self_samples": 2, "samples": 2},
            ],
        },
        length_ns=1_000,
        sample_period_ns=10,
    )
    assert summarize(value) == {
        "activities": {"kernel": 4, "gpu_memcpy": 1, "python_function": 3},
        "gpu_busy_fraction": pytest.approx((0.26 + 1.0) / 2),
        "top_kernels": [
            {"name": "c", "count": 1, "total_ns": 1000},
            {"name": "a", "count": 2, "total_ns": 160},
            {"name": "b", "count": 1, "total_ns": 100},
        ],
        "top_ops": [],
        "top_functions": [{"name": "f", "count": 5, "total_ns": 50, "waiting": 0, "lines": []}],
        "python_samples": {"unknown": 5, "running": 0, "waiting": 0, "idle": 0},
        "native_threads": [],
        "window_start_ns": START_NS,
        "window_end_ns": START_NS + 1_000,
        "out_of_window": 0,
        "iterations": 0,
        "first_iteration": 0,
    }


def test_without_a_gpu_the_busy_share_is_minus_one() -> None:
    assert summarize(trace({}))["gpu_busy_fraction"] == -1.0


def test_only_the_five_longest_kernels_are_named() -> None:
    kernels = [{"duration": number, "name": f"k{number}"} for number in range(1, 8)]
    names = [entry["name"] for entry in summarize(trace({"kernel": kernels}))["top_kernels"]]
    assert names == ["k7", "k6", "k5", "k4", "k3"]


def test_operators_count_without_the_operators_inside_them() -> None:
    ops = [
        {"start": 0, "duration": 100, "name": "aten::linear", "thread": 1, "finished": 1},
        {"start": 10, "duration": 80, "name": "aten::addmm", "thread": 1, "finished": 1},
        {"start": 20, "duration": 30, "name": "aten::linear", "thread": 2, "finished": 1},
        {"start": 950, "duration": 0, "name": "aten::copy_", "thread": 1, "finished": 0},  # to the window's end
    ]
    assert summarize(trace({"cpu_op": ops}, length_ns=1_000))["top_ops"] == [
        {"name": "aten::addmm", "count": 1, "total_ns": 80},
        {"name": "aten::linear", "count": 2, "total_ns": 50},
        {"name": "aten::copy_", "count": 1, "total_ns": 50},
    ]


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 10)], 10),
        ([(5, 10), (0, 7)], 10),
        ([(0, 3), (5, 9)], 7),
        ([(-5, 2), (98, 300)], 4),
        ([(0, 9), (2, 3)], 9),
    ],
)
def test_the_union_of_intervals(intervals: list[tuple[int, int]], length: int) -> None:
    pairs = np.array(intervals, np.int64).reshape(-1, 2)
    assert covered(pairs[:, 0], pairs[:, 1], 0, 100) == length


def test_samples_of_counters_are_no_activities() -> None:
    kernel = {"start": 0, "duration": 100, "name": "k"}
    found = summarize(trace({"kernel": [kernel], "counter": [sample(0, 900, 50)]}, length_ns=1_000))
    assert (found["activities"], found["gpu_busy_fraction"]) == ({"kernel": 1}, 0.1)
