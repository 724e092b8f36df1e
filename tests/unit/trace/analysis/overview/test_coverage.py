"""What a source did not record is no share of anything: figures of a source that ended early or dropped records."""

from typing import Any

import pytest
from kineto_trace.analysis.host_time.thread_views import threads
from kineto_trace.analysis.overview.not_recorded_views import validate
from kineto_trace.analysis.overview.overview_views import gpu_summary, gpu_utilization, overview, step_breakdown
from kineto_trace.conversion.target_conversion import gpu_busy_fraction
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES, Trace
from support.trace_files import traces

MS = 1_000_000
START = traces.START_NS
OPS, GPU, STACKS = OP_TABLES, (*GPU_TABLES, *API_TABLES), ("python_function",)


def missing(source: str, kinds: tuple[str, ...], *parts: tuple[float, float]) -> SourceCoverage:
    """A source that lacks these parts (ms)."""
    times = tuple((START + int(start * MS), START + int(end * MS)) for start, end in parts)
    return SourceCoverage(source=source, kinds=kinds, missing=times, dropped=7)


def ms(name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": int(start * MS), "duration": int(length * MS), "finished": 1, **more}


def steps_of_ten(count: int, *coverage: SourceCoverage, recorded: int) -> Trace:
    """Steps of 10 ms, 6.9 of which are operators; the first `recorded` steps have them."""
    steps = [ms(f"ProfilerStep#{n}", 10 * n, 10) for n in range(count)]
    ops = [ms("aten::mm", 10 * n + 1, 6.9) for n in range(recorded)]
    return traces.trace({"user_annotation": steps, "cpu_op": ops}, length_ns=10 * count * MS, coverage=coverage)


def test_operators_that_ended_early_are_shares_of_the_time_that_they_cover() -> None:
    context = Context(steps_of_ten(20, missing("torch_ops", OPS, (40, 200)), recorded=4))
    (row,) = overview(context).rows()
    assert (row["steps"], row["step_us"]) == (20, 10_000)
    assert (row["cpu_exec_pct"], row["other_pct"], row["unrecorded_pct"]) == pytest.approx((69, 31, 80))
    note = (
        "80 % of the steps' time is unrecorded: a source does not cover it (see the view validate); shares of the mean "
        "step refer to the 4 of 20 measured steps that were recorded completely"
    )
    assert overview(context).notes == (note, "the trace has no GPU activity")
    rows = step_breakdown(context).rows()
    assert [(row["cpu_exec_pct"], row["other_pct"], row["unrecorded_pct"]) for row in (rows[3], rows[4], rows[-1])] == [
        pytest.approx((69, 31, 0)),
        (0, 0, 100),
        pytest.approx((69, 31, 0)),
    ]


def test_without_a_step_that_is_recorded_wholly_shares_are_those_of_the_recorded_time() -> None:
    holes = [(10 * n + 8, 10 * n + 10) for n in range(5)]
    (row,) = overview(Context(steps_of_ten(5, missing("torch_ops", OPS, *holes), recorded=5))).rows()
    assert row["cpu_exec_pct"] == pytest.approx(100 * 6.9 / 8)
    assert row["cpu_exec_pct"] + row["other_pct"] == pytest.approx(100)
    assert row["unrecorded_pct"] == pytest.approx(20)


def test_what_the_gpu_did_meanwhile_still_counts() -> None:
    trace = traces.trace(
        {"user_annotation": [ms("ProfilerStep#1", 0, 10)], "kernel": [ms("gemm", 2, 4)]},
        length_ns=10 * MS,
        coverage=(missing("torch_ops", OPS, (0, 10)),),
    )
    row = step_breakdown(Context(trace)).rows()[0]
    assert (row["kernel_us"], row["other_us"], row["unrecorded_us"]) == (4000, 0, 6000)


def test_where_the_gpu_was_not_recorded_nothing_is_known() -> None:
    trace = traces.trace(
        {
            "user_annotation": [ms("ProfilerStep#1", 0, 10)],
            "cpu_op": [ms("aten::mm", 0, 10)],
            "kernel": [ms("gemm", 0, 4)],
        },
        length_ns=10 * MS,
        coverage=(missing("cupti", GPU, (5, 10)),),
    )
    row = step_breakdown(Context(trace)).rows()[0]
    assert (row["kernel_us"], row["cpu_exec_us"], row["unrecorded_us"]) == (4000, 1000, 5000)
    (gpu,) = gpu_summary(Context(trace)).rows()
    assert (gpu["utilization_pct"], gpu["busy_pct"]) == (80, 80)
    assert gpu_busy_fraction(trace) == 0.8
    course = gpu_utilization(Context(trace)).values("utilization_pct")
    assert course == [100] * 40 + [0] * 10 + [None] * 50


def test_kernels_where_the_source_lost_others_are_no_share_of_what_it_recorded() -> None:
    kernel = ms("gemm", 0, 9, grid_x=132, grid_y=1, grid_z=1, block_x=128, block_y=1, block_z=1, blocks_per_sm=1)
    trace = traces.trace(
        {"user_annotation": [ms("ProfilerStep#1", 0, 10)], "kernel": [kernel]},
        length_ns=10 * MS,
        coverage=(missing("cupti", GPU, (2, 10)),),
        devices=(traces.H100,),
    )
    (gpu,) = gpu_summary(Context(trace)).rows()
    assert (gpu["utilization_pct"], gpu["sm_efficiency_pct"]) == pytest.approx((100, 100))


def test_validation_has_the_coverage_of_each_source() -> None:
    found = validate(Context(steps_of_ten(20, missing("torch_ops", OPS, (40, 200)), recorded=4)))
    (row,) = [row for row in found.rows() if row["part"] == "coverage by torch_ops"]
    assert (row["ok"], row["complete_pct"], row["rows"]) == (False, pytest.approx(20), 24)
    assert found.notes == (
        "torch_ops covers 20 % of the window of 200 ms (7 records were dropped: buffers were full); missing: "
        "40 ms to 200 ms",
    )
    whole = validate(Context(steps_of_ten(2, missing("torch_ops", OPS), recorded=2)))
    assert [row["ok"] for row in whole.rows() if row["part"] == "coverage by torch_ops"] == [True]
    assert whole.notes == ()


def test_cpu_time_of_threads_is_a_share_of_the_time_in_which_stacks_were_sampled() -> None:
    use = {"thread": 7, "samples": 9, "python": 9, "running": 9, "waiting": 0, "idle": 0, "has_gil": 9}
    trace = traces.trace(
        {},
        length_ns=10 * MS,
        target=traces.target(thread_use=[{**use, "cpu_ns": 2 * MS}]),
        coverage=(missing("python_stacks", STACKS, (0, 6)),),
    )
    assert threads(Context(trace)).values("cpu_pct") == [50]
