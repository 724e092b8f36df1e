import numpy as np
import numpy.typing as npt
import pytest
from kineto_trace.analysis.diff.step_noise import (
    ERROR_RATE,
    Differences,
    StepTimes,
    differences,
    discoveries,
    quantile,
    rank_test,
    two_sided,
    typical_mean,
)

Floats = npt.NDArray[np.float64]


def judge(baseline: Floats, other: Floats, resolution_us: float = 0.0) -> Differences:
    first, second = (StepTimes(us, (us > 0).astype(float), resolution_us) for us in (baseline, other))
    return differences(first, second)


def false_changes(draw: object, *, rows: int, steps: tuple[int, int], tries: int = 30) -> tuple[float, float]:
    """The share of rows that are called changed though nothing is, and of tries with any."""
    shares = []
    for seed in range(tries):
        random = np.random.default_rng(seed)
        found = judge(*(draw(random, (rows, count)) for count in steps))  # type: ignore[operator]
        shares.append(found.changed.mean())
    return float(np.mean(shares)), float(np.mean(np.array(shares) > 0))


def test_probabilities_of_student_are_those_of_the_tables() -> None:
    freedom = np.array([1.0, 2, 4, 10, 30, 1e5])
    of_05 = np.array([12.7062, 4.30265, 2.77645, 2.22814, 2.04227, 1.95996])
    assert two_sided(of_05, freedom) == pytest.approx(np.full(6, 0.05), rel=1e-3)
    assert quantile(0.05, freedom) == pytest.approx(of_05, rel=0.01)
    assert quantile(1e-4, freedom[1:4]) == pytest.approx([99.99, 15.544, 6.2111], rel=0.01)
    assert two_sided(np.array([0.0, np.inf]), np.array([3.0, 3.0])).tolist() == [1.0, 0.0]


def test_ranks_are_judged_exactly_for_few_steps_and_nearly_so_for_many() -> None:
    assert rank_test(np.zeros((1, 3)), np.ones((1, 3))).tolist() == [0.1]  # 2 of 20 ways
    assert rank_test(np.array([[0.0, 1, 0, 1]]), np.array([[1.0, 0, 1, 0]])).tolist() == [1.0]
    many = rank_test(np.arange(30.0)[np.newaxis, :15], np.arange(30.0)[np.newaxis, 15:])
    assert 0 < many[0] < 1e-5


def test_of_many_probabilities_those_are_found_that_keep_the_rate() -> None:
    changed, level = discoveries(np.array([0.001, 0.02, 0.04, 0.9]), 0.05)
    assert (changed.tolist(), level) == ([True, True, False, False], 0.025)
    assert discoveries(np.array([0.03, 0.9]), 0.05)[0].tolist() == [False, False]


@pytest.mark.parametrize(
    "steps", [(3, 3), *(pytest.param(steps, marks=pytest.mark.slow) for steps in ((4, 5), (6, 30), (12, 40)))]
)
def test_nothing_is_called_changed_where_nothing_is(steps: tuple[int, int]) -> None:
    share, tries = false_changes(lambda random, shape: random.normal(100, 5, shape), rows=100, steps=steps)
    assert (share <= ERROR_RATE, tries <= 0.15) == (True, True), (share, tries)


@pytest.mark.parametrize(
    "steps", [(4, 4), *(pytest.param(steps, marks=pytest.mark.slow) for steps in ((12, 12), (10, 50)))]
)
def test_skewed_times_and_single_slow_steps_are_noise(steps: tuple[int, int]) -> None:
    share, _ = false_changes(lambda random, shape: random.lognormal(3, 1, shape), rows=100, steps=steps)
    assert share <= ERROR_RATE


def test_steps_that_resemble_their_neighbours_count_for_fewer() -> None:
    def walk(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
        values = random.normal(0, 1, shape)
        for step in range(1, shape[1]):
            values[:, step] += 0.6 * values[:, step - 1]
        return 100 + values

    share, _ = false_changes(walk, rows=50, steps=(40, 40))
    assert share <= ERROR_RATE


def test_a_fifth_more_is_found_with_an_interval_around_it() -> None:
    random = np.random.default_rng(1)
    baseline = random.normal(100, 1, (50, 5))
    other = random.normal(100, 1, (50, 5))
    other[3] *= 1.2
    found = judge(baseline, other)
    assert np.flatnonzero(found.changed).tolist() == [3]
    assert 0 < found.low[3] < 20 < found.high[3]


def test_a_row_is_changed_exactly_if_its_interval_excludes_zero() -> None:
    random = np.random.default_rng(2)
    scale = np.repeat([1.0, 1.05], 40)[:, np.newaxis]
    found = judge(random.normal(100, 2, (80, 8)), scale * random.normal(100, 2, (80, 8)))
    assert 0 < np.count_nonzero(found.changed) < 80
    assert ((found.low > 0) | (found.high < 0)).tolist() == found.changed.tolist()


def test_one_slow_step_does_not_hide_a_change_where_there_are_many_steps() -> None:
    random = np.random.default_rng(3)
    baseline, other = random.normal(100, 2, (1, 30)), random.normal(120, 2, (1, 30))
    baseline[0, 4] = 5000
    found = judge(baseline, other)
    assert found.changed.tolist() == [True]
    assert found.baseline[0] == pytest.approx(100, abs=2)
    assert typical_mean(baseline[0]) == found.baseline[0]


def test_values_that_are_equal_by_chance_do_not_make_a_change() -> None:
    random = np.random.default_rng(4)
    baseline, other = random.normal(10, 2, (40, 3)), random.normal(10, 2, (40, 3))
    baseline[0], other[0] = 10, 10.5
    assert not judge(baseline, other).changed.any()


def test_times_rounded_to_microseconds_differ_by_one_without_meaning() -> None:
    assert not judge(np.full((30, 3), 3.0), np.repeat([[3.0], [4.0]], [29, 1], axis=0) * np.ones(3), 1.0).changed.any()


def test_what_every_step_of_one_trace_alone_has_is_changed() -> None:
    random = np.random.default_rng(5)
    both = random.normal(100, 3, (60, 8))
    baseline, other = both[:, :4].copy(), both[:, 4:].copy()
    baseline[0] = 0
    other[1] = 0
    assert np.flatnonzero(judge(baseline, other).changed).tolist() == [0, 1]


def test_what_only_some_steps_have_is_judged_by_ranks_and_has_no_interval() -> None:
    baseline, other = np.zeros((1, 6)), np.zeros((1, 6))
    baseline[0, 0], other[0, [2, 4]] = 50, 50
    found = judge(baseline, other)
    assert (found.changed.tolist(), np.isnan(found.low).tolist()) == ([False], [True])


@pytest.mark.parametrize("steps", [(1, 9), (9, 1), (0, 3)])
def test_one_step_tells_nothing_about_noise(steps: tuple[int, int]) -> None:
    first, second = (np.full((2, count), 1.0 + count) for count in steps)
    found = judge(first, second)
    assert (found.changed.tolist(), np.isnan(found.p).tolist()) == ([False, False], [True, True])


def test_rows_without_any_noise_differ_if_they_differ() -> None:
    assert judge(np.full((1, 4), 5.0), np.full((1, 4), 6.0)).changed.tolist() == [True]
    assert judge(np.full((1, 4), 5.0), np.full((1, 4), 5.0)).changed.tolist() == [False]
