import pytest
from kineto_trace.analysis.diff.diff_views import diff_kernels, diff_ops, diff_steps
from kineto_trace.analysis.diff.regressions import CheckOutcome, checks_result, regressions
from kineto_trace.model.context import Context
from support.trace_files.step_traces import context, noisy


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
    assert check.message.endswith("cannot be judged: the noise would hide a regression of 5 %: record more steps")


def test_a_step_that_can_only_be_faster_passes_in_any_noise() -> None:
    result = diff_steps(side(10_000, 1, spread=0.1), side(8000, 5, spread=0.1))
    (check,) = regressions(result, 5, only="step")
    assert (check.outcome, check.message.endswith(": faster")) == (CheckOutcome.PASSED, True)


def test_rows_in_which_the_noise_would_hide_the_limit_are_counted() -> None:
    result = diff_ops(side(9000, 1, spread=0.3, small_us=4), side(9000, 5, spread=0.3, small_us=4))
    (check,) = regressions(result, 5)
    assert check.outcome is CheckOutcome.PASSED
    assert check.message.endswith("; in 1 of them the noise would hide that: record more steps")


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
