"""Rows of two traces beside each other: matched by their keys, per step, and never a verdict without its noise."""

from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.diff.diff_views import diff_kernels, diff_ops, diff_steps
from kineto_trace.analysis.diff.view_differences import (
    COMPARED,
    CheckOutcome,
    ComparedRows,
    ComparedSteps,
    Extent,
    checks_result,
    regressions,
    view_differences,
)
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import Result, make_result
from support.trace_files.step_traces import context, noisy

STEPS = tuple(map(str, range(20)))
STEPLESS = Extent(2.0, float("nan"), frozenset())


def result(view: str, rows: list[dict[str, Any]]) -> Result:
    """A result of a view; what is not given is missing."""
    schema = VIEWS[view].result_columns
    return make_result(view, schema, {column.name: [row.get(column.name) for row in rows] for column in schema})


def extent(window_s: float, step_s: float = 0.1) -> Extent:
    return Extent(window_s, step_s, frozenset(STEPS))


def compared(baseline: Result, other: Result, first: Extent = STEPLESS, second: Extent = STEPLESS) -> Result:
    return view_differences(baseline, other, ({0: first}, {0: second}))


def kernel(name: str, us: float, **more: Any) -> dict[str, Any]:
    return {"rank": 0, "name": name, "op": "aten::mm", "grid": "1", "block": "1", "total_us": us, "calls": 1, **more}


def test_every_view_that_is_compared_has_the_columns_that_are_named() -> None:
    for name, how in COMPARED.items():
        figures = how.figures if isinstance(how, ComparedSteps) else (*how.sums, *how.plain)
        columns = {column.name: column.type for column in VIEWS[name].result_columns}
        assert set(how.keys) | set(figures) <= set(columns), name
        assert {columns[figure] for figure in figures} <= {"int", "float"}, name
        assert isinstance(how, ComparedRows) or "step" in columns, name


def test_rows_are_matched_by_their_keys_and_sums_are_per_second_without_steps() -> None:
    found = compared(
        result("kernels_by_op", [kernel("gemm", 20.0, mean_us=20.0), kernel("gone", 2.0, mean_us=2.0)]),
        result("kernels_by_op", [kernel("gemm", 60.0, mean_us=30.0), kernel("new", 4.0, mean_us=4.0)]),
    )
    names = ("name", "total_other_us", "total_baseline_us", "total_delta_us", "mean_other_us", "mean_delta_us")
    assert [tuple(row[name] for name in names) for row in found.rows()] == [
        ("gemm", 30.0, 10.0, 20.0, 30.0, 10.0),
        ("new", 2.0, 0.0, 2.0, 4.0, None),
        ("gone", 0.0, 1.0, -1.0, None, None),
    ]
    assert not [column.name for column in found.columns if "verdict" in column.name]
    assert found.notes[0].startswith("differences are not judged")
    assert "per second" in found.notes[1]


def test_sums_are_per_step_if_both_traces_have_steps() -> None:
    one, two = result("kernels_by_op", [kernel("gemm", 40.0)]), result("kernels_by_op", [kernel("gemm", 80.0)])
    found = compared(one, two, extent(2.0), extent(4.0))
    assert [(row["total_baseline_us"], row["total_other_us"], row["total_delta_us"]) for row in found.rows()] == [
        (2.0, 2.0, 0.0)
    ]
    assert "per step" in found.notes[1]


def test_rows_with_equal_keys_are_added_up_and_their_means_are_unknown() -> None:
    one = result("kernels_by_op", [kernel("gemm", 10.0, mean_us=5.0), kernel("gemm", 30.0, mean_us=7.0)])
    (row,) = compared(one, one).rows()
    assert (row["total_other_us"], row["mean_other_us"]) == (20.0, None)


def of_steps(lengths: Any, waiting: float | None = None) -> Result:
    rows = [
        {"rank": 0, "step": step, "step_us": float(us), "waiting_us": waiting}
        for step, us in zip(STEPS, lengths, strict=True)
    ]
    return result("rank_steps", [*rows, {"rank": 0, "step": "cut", "step_us": 1e9}])


def test_steps_are_judged_by_their_noise_and_incomplete_ones_do_not_count() -> None:
    noise = np.random.default_rng(7).normal(0, 5, (2, len(STEPS)))
    (row,) = compared(of_steps(1000 + noise[0]), of_steps(1100 + noise[1]), extent(2.0), extent(2.0)).rows()
    assert row["step_verdict"] == "longer"
    assert row["step_delta_us"] == pytest.approx(100, abs=5)
    assert row["waiting_verdict"] == "unknown"
    assert row["waiting_delta_us"] is None


@pytest.mark.slow
def test_noise_is_never_called_a_change() -> None:
    random = np.random.default_rng(3)
    called = 0
    for _ in range(100):
        one, two = (of_steps(1000 + random.normal(0, 50, len(STEPS))) for _ in range(2))
        (row,) = compared(one, two, extent(2.0), extent(2.0)).rows()
        called += row["step_verdict"] != "within noise"
    assert called <= 5


def test_rows_of_one_trace_only_are_said_to_be_left_out() -> None:
    found = compared(of_steps([1.0] * 20), of_steps([1.0] * 20), extent(2.0))
    assert (len(found), found.notes[1]) == (
        0,
        "1 row not compared: only one of the traces has complete steps",
    )


def test_moments_and_events_have_no_counterparts() -> None:
    nothing = result("memory_curve", [])
    with pytest.raises(ViewError, match="memory_curve cannot be compared: its rows are moments, events or texts"):
        compared(nothing, nothing)


def side(mm_us: float, seed: int, *, steps: int = 8, spread: float = 0.02, small_us: float = 2.0) -> Context:
    return context({"mm": noisy(mm_us, steps, seed, spread), "small": noisy(small_us, steps, seed + 1, spread)})


def test_a_step_that_is_slower_by_more_than_the_limit_fails() -> None:
    found = diff_steps(side(9000, 1), side(10_000, 5))
    (check,) = regressions(found, 5, only="step")
    assert (check.row, check.outcome) == ("step", CheckOutcome.FAILED)
    assert check.message.startswith("10") and check.message.endswith(": slower")
    assert "ms per step, +" in check.message and "interval +" in check.message


def test_a_smaller_regression_and_one_within_the_noise_pass() -> None:
    (check,) = regressions(diff_steps(side(9000, 1), side(10_000, 5)), 30, only="step")
    assert check.outcome is CheckOutcome.PASSED
    (check,) = regressions(diff_steps(side(9000, 1), side(9000, 5)), 1, only="step")
    assert check.outcome is CheckOutcome.PASSED
    (check,) = regressions(diff_steps(side(10_000, 1), side(9000, 5)), 5, only="step")
    assert (check.outcome, check.message.endswith(": faster")) == (CheckOutcome.PASSED, True)


def test_noise_that_would_hide_the_limit_cannot_be_judged() -> None:
    (check,) = regressions(diff_steps(side(9000, 1, spread=0.3), side(9000, 5, spread=0.3)), 5, only="step")
    assert check.outcome is CheckOutcome.UNKNOWN
    assert check.message.endswith("cannot be judged: the noise would hide a regression of 5 %; record more steps")


def test_a_step_that_can_only_be_faster_passes_in_any_noise() -> None:
    result = diff_steps(side(10_000, 1, spread=0.1), side(8000, 5, spread=0.1))
    (check,) = regressions(result, 5, only="step")
    assert (check.outcome, check.message.endswith(": faster")) == (CheckOutcome.PASSED, True)


def test_rows_in_which_the_noise_would_hide_the_limit_are_counted() -> None:
    result = diff_ops(side(9000, 1, spread=0.3, small_us=4), side(9000, 5, spread=0.3, small_us=4))
    (check,) = regressions(result, 5)
    assert check.outcome is CheckOutcome.PASSED
    assert check.message.endswith("; in 1 of them, the noise would hide such a slowdown: record more steps")


def test_checks_are_rows_for_programs() -> None:
    result = diff_steps(side(9000, 1), side(10_000, 5))
    (row,) = checks_result({"steps": regressions(result, 5, only="step")}).rows()
    assert (row["compared"], row["row"], row["outcome"]) == ("steps", "step", "failed")


def test_a_row_fails_only_if_the_step_notices_it() -> None:
    first, second = side(9000, 1), side(11_000, 5, small_us=4)
    assert [row["verdict"] for row in diff_ops(first, second).rows()] == ["slower", "slower"]
    assert [check.row for check in regressions(diff_ops(first, second), 10)] == ["mm (host time)"]
    (check,) = regressions(diff_ops(first, second), 50)
    assert (check.row, check.outcome) == ("diff_operators", CheckOutcome.PASSED)
    assert check.message == "none of 2 rows is slower by 50 % or more beyond the noise"


@pytest.mark.parametrize("steps", [1, 0])
def test_what_cannot_be_judged_does_not_pass(steps: int) -> None:
    other = side(9000, 1, steps=1) if steps else context({"mm": [5.0]}, annotated=False)
    for result, only in ((diff_steps(side(9000, 1), other), "step"), (diff_ops(side(9000, 1), other), "")):
        outcomes = {check.outcome for check in regressions(result, 5, only=only)}
        assert outcomes == {CheckOutcome.UNKNOWN}


def test_kernels_that_were_not_recorded_do_not_pass() -> None:
    with_gpu = context({"mm": noisy(9, 4, 1)}, {"gemm": noisy(50, 4, 2)})
    (check,) = regressions(diff_kernels(with_gpu, side(9, 3)), 5)
    assert (check.outcome, "no gpu times" in check.message) == (CheckOutcome.UNKNOWN, True)
    (check,) = regressions(diff_kernels(side(9, 3), side(9, 4)), 5)
    assert check.outcome is CheckOutcome.UNKNOWN
