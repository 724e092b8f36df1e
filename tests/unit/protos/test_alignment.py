"""One start iteration for all targets of a capture."""

from collections.abc import Sequence
from typing import Any

import pytest
from kineto_agent.protocol import wire
from kineto_protos.alignment import Aligned, Sample, plan
from support.agent.agent_daemon import start_request

S = 10**9
STEP_NS = S // 20
MINUTES_NS = 600 * S


def samples(*counts: Sequence[int]) -> list[Sample]:
    """One sequence per sample."""
    return [Sample(number * STEP_NS, tuple(each)) for number, each in enumerate(counts)]


def wanted(**changes: Any) -> wire.Start:
    return start_request(duration_ns=None, iterations=5, **changes)


def planned(
    *counts: Sequence[int], comparable: bool = True, patience_ns: int = MINUTES_NS, **changes: Any
) -> list[Aligned]:
    return plan(samples(*counts), wanted(**changes), comparable=comparable, patience_ns=patience_ns)


def starts(plans: Sequence[Aligned]) -> list[int | None]:
    return [each.start_iteration for each in plans]


def test_slow_targets_start_two_iterations_after_the_one_that_is_furthest() -> None:
    plans = planned([10, 11, 10])
    assert starts(plans) == [13, 13, 13]
    assert {each.warning for each in plans} == {""}
    assert plans[0].warmup_iterations == 1


def test_the_request_of_each_target_has_the_common_start() -> None:
    request = planned([10, 11])[0].applied(wanted(iteration_roundup=0))
    assert (request.iterations, request.start_iteration, request.warmup_iterations) == (5, 13, 1)


def test_the_faster_the_more_iterations_are_left_for_delivery_and_for_the_sources() -> None:
    plans = planned([100, 0], [119, 1], [139, 1], [159, 2], [179, 2])  # 400 a second
    assert plans[0].warmup_iterations == plans[1].warmup_iterations == 200
    assert starts(plans) == [179 + 200 + 1 + 100] * 2


def test_the_wanted_warm_up_is_kept_if_it_is_longer() -> None:
    assert [each.warmup_iterations for each in planned([10, 10], warmup_iterations=7)] == [7, 7]
    assert starts(planned([10, 10], warmup_iterations=7)) == [18, 18]


def test_a_wanted_start_that_all_can_make_stays() -> None:
    plans = planned([10, 20], start_iteration=1000)
    assert starts(plans) == [1000, 1000]
    assert plans[0].warning == ""


def test_a_wanted_start_that_one_cannot_make_moves_for_all_with_a_warning() -> None:
    plans = planned([10, 1000], start_iteration=900, iteration_roundup=50)
    assert starts(plans) == [1050, 1050]
    assert plans[0].warning.startswith("it was too late to record iteration 900 in all 2 processes")


@pytest.mark.parametrize(("current", "first"), [(97, 100), (98, 100), (99, 200), (100, 200)])
def test_the_start_is_rounded_up(current: int, first: int) -> None:
    plans = planned([current, 3], iteration_roundup=100)
    assert starts(plans) == [first, first]
    assert plans[0].roundup == 100


def test_rounding_a_wanted_start_is_no_warning() -> None:
    assert [each.warning for each in planned([10, 10], start_iteration=120, iteration_roundup=100)] == ["", ""]


def test_targets_too_far_behind_are_aligned_among_themselves() -> None:
    plans = planned([100_000, 10, 12], [100_000, 10, 12])
    assert starts(plans) == [None, 14, 14]
    assert plans[0].warning.startswith("recorded the same iterations as 0 of the 2 other processes")
    assert plans[1].warning.startswith("recorded the same iterations as 1 of the 2 other processes")


def test_a_target_that_gets_there_in_time_is_waited_for() -> None:
    assert starts(planned([3000, 10], [3000, 12], [3000, 14])) == [3039, 3039]


def test_a_wanted_start_is_waited_for_however_far_it_is() -> None:
    assert starts(planned([100, 0], [100, 0], start_iteration=10**6)) == [10**6, 10**6]


def test_a_target_that_never_stepped_gets_the_request_as_it_is() -> None:
    plans = planned([10, -1, 12], warmup_iterations=3)
    assert starts(plans) == [16, None, 16]
    assert (plans[1].warmup_iterations, plans[1].warning[:11]) == (3, "not aligned")


def test_where_none_or_only_one_has_stepped_nothing_changes() -> None:
    assert starts(planned([-1, -1])) == [None, None]
    assert starts(planned([5, -1], start_iteration=3)) == [3, 3]


def test_counts_that_began_with_the_agent_are_made_comparable() -> None:
    """Three ranks in lockstep, whose agents came one after another; once the third is asked a moment too late."""
    plans = planned([7, 5, 2], [8, 6, 3], [9, 7, 5], [10, 8, 5], comparable=False, iteration_roundup=10)
    apart = [plans[0].start_iteration or 0, plans[1].start_iteration or 0, plans[2].start_iteration or 0]
    assert [apart[0] - each for each in apart] == [0, 2, 5]
    assert apart[0] % 10 == 0
    assert {each.roundup for each in plans} == {0}


def test_absurd_counts_and_pauses_do_no_harm() -> None:
    assert starts(planned([2**53, 1], [2**53, 1])) == [None, None]
    assert starts(plan([Sample(5, (1, 1))], wanted(), comparable=True, patience_ns=0)) == [3, 3]
    assert starts(planned([50, 40], [10, 45])) == [136, 136]


def test_the_longer_a_request_is_on_its_way_the_more_iterations_are_left_for_it() -> None:
    request = wanted()
    seen = samples([100, 0], [119, 1], [139, 1], [159, 2], [179, 2])  # 400 a second
    plans = plan(seen, request, comparable=True, patience_ns=MINUTES_NS, delivery_s=2.0)
    assert starts(plans) == [179 + 200 + 1 + 800] * 2
