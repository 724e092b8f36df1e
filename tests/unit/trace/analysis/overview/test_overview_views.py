"""The overview of one small trace of two steps, worked out by hand."""

from typing import Any

import pytest
from kineto_trace.analysis.overview.overview_views import (
    gpu_summary,
    gpu_utilization,
    overview,
    recordings,
    sm_efficiency,
    step_breakdown,
)
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.view import Compat
from support.trace_files import traces
from support.trace_files.traces import START_NS, target, trace

SHAPE = {"grid_x": 66, "grid_y": 1, "grid_z": 1, "block_x": 256, "block_y": 1, "block_z": 1, "registers": 32}
GPU = {**traces.H100, "name": "NVIDIA H100", "totalGlobalMem": 80_000}


def us(start: int, length: int, name: str, **further: Any) -> dict[str, Any]:
    return {"name": name, "start": 1000 * start, "duration": 1000 * length, **further}


def two_steps(**changes: Any) -> Trace:
    """Steps 0-100 and 100-200; each launches a kernel of 40 µs that ends after the step."""
    return traces.trace(
        {
            "user_annotation": [
                us(0, 100, "ProfilerStep#4", id=1, finished=1),
                us(100, 100, "ProfilerStep#5", id=2, finished=1),
            ],
            "cpu_op": [us(10, 30, "aten::mm", id=3, finished=1), us(110, 50, "aten::mm", id=4, finished=1)],
            "cuda_runtime": [
                us(50, 5, "cudaMemcpyAsync", correlation=3),
                us(130, 2, "cudaMemsetAsync", correlation=4),
                us(20, 5, "cudaLaunchKernel", correlation=1, external_id=3),
                us(120, 5, "cudaLaunchKernel", correlation=2, external_id=4),
            ],
            "kernel": [
                us(80, 40, "nvjet_x", correlation=1, external_id=3, **SHAPE),
                us(180, 40, "elementwise", correlation=2, external_id=4, **SHAPE),
            ],
            "gpu_memcpy": [us(60, 10, "Memcpy HtoD", correlation=3)],
            "gpu_memset": [us(170, 5, "Memset (Device)", correlation=4)],
        },
        devices=(GPU,),
        **changes,
    )


def test_steps_are_those_of_the_host_and_rows_sum_to_them() -> None:
    rows = step_breakdown(Context(two_steps())).rows()
    assert [row["step"] for row in rows] == ["4", "5", "average"]
    assert [row["start_ns"] for row in rows] == [traces.START_NS, traces.START_NS + 100_000, None]
    # step 4: kernel 80-100, copy 60-70, calls 20-25 and 50-55, operator 10-20 and 25-40
    # step 5: kernel 100-120 and 180-200, fill 170-175, calls 120-125 and 130-132, operator 125-130 and 132-160
    wanted = {
        "kernel_us": [20, 40, 30],
        "memcpy_us": [10, 0, 5],
        "memset_us": [0, 5, 2.5],
        "runtime_us": [10, 7, 8.5],
        "cpu_exec_us": [25, 33, 29],
    }
    assert {name: [row[name] for row in rows] for name in wanted} == wanted
    assert [row["other_us"] for row in rows] == [35, 15, 25]
    assert [row["kernel_pct"] for row in rows] == [20, 40, 30]
    assert all(sum(row[name] or 0 for name in row if name.endswith("_pct")) == pytest.approx(100) for row in rows)


def test_steps_can_end_on_the_device() -> None:
    result = step_breakdown(Context(two_steps()), step_ends="device")
    assert result.values("total_us") == [120, 100, 110]
    assert result.values("kernel_us") == [40, 40, 40]
    with pytest.raises(ViewError, match="step_ends='gpu' is not valid; use one of host, device"):
        step_breakdown(Context(two_steps()), step_ends="gpu")


def test_the_plugin_counts_steps_on_the_device() -> None:
    result = step_breakdown(Context(two_steps()), compat=Compat.PLUGIN)
    assert result.values("total_us") == pytest.approx([120, 100, 110], abs=0.01)
    assert result.values("cpu_exec_us") == pytest.approx([25, 33, 29], abs=0.01)
    assert result.values("kernel_pct") == [33.33, 40.0, 36.36]


def test_a_trace_without_steps_is_one_part_and_has_no_step_time() -> None:
    rows = {"kernel": [us(50, 10, "k")], "cpu_op": [us(0, 20, "aten::a", id=1)]}
    result = step_breakdown(Context(traces.trace(rows)))
    assert result.values("step") == ["all", "average"]
    assert result.values("total_us") == [60, 60]
    assert "shares refer to the whole trace" in result.notes[0]
    (row,) = overview(Context(traces.trace(rows))).rows()
    assert (row["steps"], row["step_us"], row["kernel_pct"]) == (0, None, pytest.approx(100 / 6))
    plugin = step_breakdown(Context(traces.trace(rows)), compat=Compat.PLUGIN)
    assert plugin.values("step") == ["0", "average"]
    assert plugin.values("total_us") == pytest.approx([20, 20], abs=0.01)


def test_an_empty_trace_has_no_step_and_says_so() -> None:
    context = Context(traces.trace({}))
    assert len(step_breakdown(context)) == 0
    assert step_breakdown(context).notes
    assert overview(context).values("steps") == [0]
    assert len(gpu_summary(context)) == len(gpu_utilization(context)) == len(sm_efficiency(context)) == 0


def test_a_gpu_is_measured_from_the_first_step_to_the_last() -> None:
    (row,) = gpu_summary(Context(two_steps())).rows()
    assert (row["device"], row["name"], row["memory_bytes"], row["compute_capability"]) == (
        0,
        "NVIDIA H100",
        80_000,
        "9.0",
    )
    assert (row["kernels"], row["kernel_us"]) == (2, 80)
    assert row["utilization_pct"] == 30  # 80-120 and 180-200 of 200
    assert row["busy_pct"] == 37.5  # and the copy and the fill
    assert row["sm_efficiency_pct"] == pytest.approx(15)  # half of the multiprocessors
    assert row["occupancy_pct"] == 6  # 0.5 blocks x 256 threads of 2048, as a whole number
    assert row["tensor_core_pct"] == 50
    assert row["peak_memory_bytes"] is None


def test_the_plugin_knows_no_tensor_cores_of_hopper() -> None:
    (row,) = gpu_summary(Context(two_steps()), compat=Compat.PLUGIN).rows()
    assert row["tensor_core_pct"] == 0
    assert row["utilization_pct"] == 36.36  # 80 of 220


def test_the_overview_is_one_row() -> None:
    (row,) = overview(Context(two_steps())).rows()
    assert (row["steps"], row["step_us"], row["gpus"], row["gpu_name"]) == (2, 100, 1, "NVIDIA H100")
    assert (row["kernel_pct"], row["other_pct"], row["utilization_pct"]) == (30, 25, 30)
    assert (row["tensor_core_pct"], row["tensor_core_eligible_pct"]) == (50, 100)


def test_figures_of_gpus_are_missing_from_an_overview_without_gpu_activity() -> None:
    on_host = traces.trace({"cpu_op": [{"start": 10, "duration": 40, "name": "aten::mm", "thread": 1}]})
    (row,) = overview(Context(on_host)).rows()
    assert (row["kernel_pct"], row["memcpy_pct"], row["memset_pct"]) == (None, None, None)
    assert (row["kernels"], row["kernel_us"], row["gpus"]) == (None, None, None)


def test_utilization_and_efficiency_over_time() -> None:
    context = Context(two_steps())
    buckets = gpu_utilization(context)
    assert set(buckets.values("duration_us")) == {10}
    assert buckets.values("utilization_pct") == [0] * 8 + [100] * 4 + [0] * 6 + [100] * 4
    stretches = sm_efficiency(context).rows()
    assert [(row["start_ns"] - traces.START_NS, row["duration_us"]) for row in stretches] == [
        (80_000, 40),
        (180_000, 40),
    ]
    assert [row["sm_efficiency_pct"] for row in stretches] == [50, 50]


def test_the_peak_of_memory_is_that_of_the_allocator() -> None:
    events = [
        {"name": "[memory]", "device_type": 1, "device": 0, "total_allocated": allocated, "start": start}
        for start, allocated in ((0, 500), (5, 900), (9, 100), (10, -1))
    ]
    events.append({"name": "[memory]", "device_type": 0, "device": -1, "total_allocated": 7_000})
    trace = traces.trace({"cpu_instant_event": events, "kernel": [us(0, 1, "k")]})
    assert gpu_summary(Context(trace)).values("peak_memory_bytes") == [900]


def cut_steps(*whole: bool) -> Context:
    """Steps of 100, 200, … µs, of which some have not ended."""
    lengths = [100 * (place + 1) for place in range(len(whole))]
    steps = [
        us(sum(lengths[:place]), lengths[place], f"ProfilerStep#{place + 4}", id=place + 1, finished=complete)
        for place, complete in enumerate(whole)
    ]
    return Context(traces.trace({"user_annotation": steps, "kernel": [us(100, 50, "gemm")]}))


def test_incomplete_steps_are_shown_and_do_not_count_for_the_average() -> None:
    result = step_breakdown(cut_steps(False, True, False))
    assert [(row["step"], row["complete"], row["total_us"]) for row in result.rows()] == [
        ("4", False, 100),
        ("5", True, 200),
        ("6", False, 300),
        ("average", True, 200),
    ]
    assert result.values("kernel_pct")[-1] == 25
    note = "incomplete steps, left out of means because the recording began or ended during them: 4, 6"
    assert result.notes == (note,)
    (row,) = overview(cut_steps(False, True, False)).rows()
    assert (row["steps"], row["step_us"], row["kernel_pct"], row["utilization_pct"]) == (1, 200, 25, 25)


def test_without_a_complete_step_there_is_no_average_but_a_bound() -> None:
    result = overview(cut_steps(False, False))
    (row,) = result.rows()
    assert (row["steps"], row["step_us"], row["kernel_pct"]) == (0, None, pytest.approx(100 / 6))
    assert result.notes == (
        "no step is complete: the recording began or ended during steps 4, 5. A step takes at least 200 µs (the "
        "longest recorded part); shares refer to the recorded parts",
    )
    assert step_breakdown(cut_steps(False, False)).values("step") == ["4", "5"]


def row(**changes: Any) -> dict[str, Any]:
    (found,) = recordings(Context(trace({}, **changes))).rows()
    return found


def test_a_recording_names_its_process_machine_versions_and_window() -> None:
    of = target(
        rank=3, world_size=8, command=["python", "train.py"], job_id="4242", labels={"job": "7", "by": "me"},
        framework="torch 2.11.0", python_version="3.12.3",
    )  # fmt: skip
    found = row(
        target=of, devices=({"name": "NVIDIA H200"}, {"id": 1}), head={"kinetod": '{"version": "0.1.0"}'},
        versions={"cuda_runtime_version": 13020, "cuda_driver_version": 13000, "cupti_version": 130001},
    )  # fmt: skip
    assert found == {
        "rank": 3, "world_size": 8, "host": "host", "process": "python", "pid": 4242, "command": "python train.py",
        "job": "4242", "labels": ["by=me", "job=7"], "gpus": ["NVIDIA H200"],
        "framework": "torch 2.11.0", "python": "3.12.3", "cuda": "13.2",
        "driver_cuda": "13.0", "cupti": "130001", "kinetod": "0.1.0", "capture": "cap",
        "start_ns": START_NS, "length_us": 1000.0,
    }  # fmt: skip


def test_what_a_trace_does_not_have_is_missing() -> None:
    found = row(target=target(host="", capture_id="", pid=0, process_name=""), head={"kinetod": '"x"'},
                window_start_ns=0, window_end_ns=0)  # fmt: skip
    assert {name for name, value in found.items() if value is not None} == {"rank"}
