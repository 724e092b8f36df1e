"""Counters by training step and phase."""

from typing import Any

import pytest
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS
from kineto_trace.analysis.counters.step_counter_views import NO_STEPS, gpu_steps, step_counters
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from support.trace_files.simulated.sampled_gpu import MS, Run, sampled
from support.trace_files.traces import START_NS, trace


def trained(steps: int = 6) -> Trace:
    """Steps of 20 ms on the host; the GPU is 5 ms behind, computes for 10 ms and is idle for 10 ms."""
    runs, calls, notes, ops = [], [], [], []
    for step in range(steps):
        at = step * 20 * MS
        notes += [
            {"name": f"ProfilerStep#{step}", "start": at, "duration": 20 * MS, "id": step + 1, "finished": 1},
            {"name": "Optimizer.step#SGD.step", "start": at + 2 * MS, "duration": MS, "id": 100 + step, "finished": 1},
        ]
        for part, launched in enumerate((MS, 2 * MS + MS // 2)):
            correlation = 2 * step + part + 1
            calls.append({"name": "cudaLaunchKernel", "start": at + launched, "duration": 1000,
                          "correlation": correlation})  # fmt: skip
            runs.append(Run(name=("gemm", "adam")[part], start=at + 5 * MS + part * 6 * MS, duration=(6, 4)[part] * MS,
                            counters={"DRAM": (20, 80)[part]}, correlation=correlation))  # fmt: skip
        ops.append({"name": "aten::mm", "start": at, "duration": 2 * MS, "finished": 1, "id": 500 + step})
    rows: dict[str, Any] = {"cuda_runtime": calls, "user_annotation": notes, "cpu_op": ops}
    return sampled(runs, ["DRAM"], length_ns=steps * 20 * MS, rows=rows, noise=0, spread=0)


def test_a_step_on_the_gpu_begins_with_its_first_activity_and_ends_with_the_next_ones() -> None:
    found = gpu_steps(Context(trained()), 0)
    begins = [(start - START_NS) // MS for start in found.start.tolist()]
    assert begins == [5, 25, 45, 65, 85, 105]
    assert (found.end[:-1] == found.start[1:]).all()
    assert (int(found.end[-1]) - START_NS) // MS == begins[-1] + 10


def test_a_steps_value_is_the_mean_over_its_time_on_the_gpu() -> None:
    rows = [row for row in step_counters(Context(trained())).rows() if row["phase"] is None]
    assert (rows[1]["step"], rows[1]["time_us"], rows[1]["sampled_pct"]) == ("0", 20_000, 100)
    assert rows[1]["value"] == pytest.approx((6 * 20 + 4 * 80) / 20)
    assert rows[0]["step"] == "average"


def test_the_counters_of_one_step_stand_together() -> None:
    values = {"DRAM": 20, "SM busy": 90}
    runs = [Run(name="gemm", start=at * 10 * MS, duration=10 * MS, counters=values, correlation=at + 1)
            for at in range(3)]  # fmt: skip
    calls = [{"name": "cudaLaunchKernel", "start": run.start, "duration": 1000, "correlation": run.correlation}
             for run in runs]  # fmt: skip
    notes = [{"name": f"ProfilerStep#{at}", "start": at * 10 * MS, "duration": 10 * MS, "finished": 1, "id": at + 1}
             for at in range(3)]  # fmt: skip
    rows: dict[str, Any] = {"cuda_runtime": calls, "user_annotation": notes}
    measured = sampled(runs, ["DRAM", "SM busy"], length_ns=30 * MS, rows=rows, noise=0, spread=0)
    found = [row["step"] for row in step_counters(Context(measured)).rows() if row["phase"] is None]
    assert found == ["average", "average", "0", "0", "1", "1", "2", "2"]


def test_phases_have_the_work_that_was_launched_in_them() -> None:
    rows = {row["phase"]: row for row in step_counters(Context(trained())).rows() if row["step"] == "all"}
    assert rows["optimizer"]["value"] == pytest.approx(80) and rows["other"]["value"] == pytest.approx(20)
    assert rows["optimizer"]["time_us"] == 6 * 4000


def test_a_trace_without_steps_says_so() -> None:
    runs = [Run(name="copy", start=0, duration=50 * MS, counters={"DRAM": 80})]
    assert step_counters(Context(sampled(runs, ["DRAM"], length_ns=50 * MS))).notes == (NO_STEPS,)
    assert step_counters(Context(trace({}))).notes == (NO_COUNTERS,)
