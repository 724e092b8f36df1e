import _thread
import gc
import os
import threading
from typing import List

import pytest
from kineto_agent.steps.counting import RING_ITERATIONS, StepCounter, least_step_ratio, median_ns, step_ratio


class Optimizer:
    """Stands for any optimizer: the hook only looks at its identity."""


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns


def optimizer_step(counter: StepCounter, optimizer: object) -> None:
    counter.on_optimizer_step(optimizer, (), {})


def test_a_process_that_never_stepped_counts_minus_one() -> None:
    assert StepCounter().count == -1


def test_each_step_of_one_optimizer_is_an_iteration() -> None:
    counter, optimizer = StepCounter(), Optimizer()
    for _ in range(5):
        optimizer_step(counter, optimizer)
    assert counter.count == 5


def test_two_optimizers_in_a_loop_make_one_iteration() -> None:
    counter, first, second = StepCounter(), Optimizer(), Optimizer()
    for _ in range(5):
        optimizer_step(counter, first)
        optimizer_step(counter, second)
    assert counter.count == 5


def test_the_busiest_optimizer_counts() -> None:
    counter, often, seldom = StepCounter(), Optimizer(), Optimizer()
    for _ in range(4):
        for _ in range(3):
            optimizer_step(counter, often)
        optimizer_step(counter, seldom)
    assert counter.count == 12


def test_an_optimizer_that_replaces_another_goes_on_counting() -> None:
    counter = StepCounter()
    first = Optimizer()
    for _ in range(5):
        optimizer_step(counter, first)
    del first
    gc.collect()
    second = Optimizer()
    for _ in range(3):
        optimizer_step(counter, second)
    assert counter.count == 7  # its first step joined iteration 5
    assert len(counter._counts) == 1


def test_optimizers_are_not_kept_alive() -> None:
    counter, alive = StepCounter(), []
    for number in range(1000):
        optimizer = Optimizer()
        if number % 100 == 0:
            alive.append(optimizer)
        optimizer_step(counter, optimizer)
    del optimizer
    assert len(counter._counts) == 10


def test_an_optimizer_without_weak_references_is_left_out() -> None:
    counter = StepCounter()
    optimizer_step(counter, 5)
    assert counter.count == -1


def test_the_programs_own_steps_win() -> None:
    counter, optimizer = StepCounter(), Optimizer()
    optimizer_step(counter, optimizer)
    counter.step()
    for _ in range(5):
        optimizer_step(counter, optimizer)
    assert counter.count == 2


def test_an_awaited_iteration_wakes_once() -> None:
    counter, woken = StepCounter(), []
    counter.step()
    assert counter.watch(3, lambda: woken.append(counter.count)) is False
    for _ in range(5):
        counter.step()
    assert woken == [3]


def test_an_iteration_that_has_begun_is_said_at_once() -> None:
    counter = StepCounter()
    counter.step()
    assert counter.watch(1) is True


def test_nobody_is_woken_after_the_watch_ended() -> None:
    counter, woken = StepCounter(), []
    counter.watch(2, lambda: woken.append(1))
    counter.watch(None)
    for _ in range(5):
        counter.step()
    assert woken == []


def test_the_ring_knows_when_recent_iterations_began() -> None:
    counter = StepCounter(Clock())
    for _ in range(RING_ITERATIONS + 100):
        counter.step()
    assert counter.time_of(RING_ITERATIONS + 100) == 10 * (RING_ITERATIONS + 100)
    assert counter.time_of(200) == 2000
    assert counter.time_of(50) == 0
    assert counter.time_of(RING_ITERATIONS + 101) == 0
    assert counter.time_of(-1) == 0


def test_durations_are_those_of_iterations_inside_the_window() -> None:
    times = iter([100, 110, 130, 160, 200, 250])
    counter = StepCounter(lambda: next(times))
    for _ in range(6):
        counter.step()
    assert counter.durations_ns(0, 1000) == [10, 20, 30, 40, 50]
    assert counter.durations_ns(110, 200) == [20, 30, 40]


@pytest.mark.parametrize(("values", "median"), [([], 0), ([5, 6], 0), ([9, 1, 5], 5), ([4, 1, 2, 3], 3)])
def test_the_median_of_too_few_is_none(values: List[int], median: int) -> None:
    assert median_ns(values) == median


# ---------------------------------------------------------------- who counts


def test_a_profilers_steps_count_where_nothing_else_does() -> None:
    counter, profiler = StepCounter(), Optimizer()
    for _ in range(4):
        counter.on_profiler_step(profiler)
    assert counter.count == 4


def test_optimizers_take_over_from_a_profiler_at_its_count() -> None:
    counter, profiler, optimizer = StepCounter(), Optimizer(), Optimizer()
    for _ in range(3):
        counter.on_profiler_step(profiler)
    for _ in range(3):
        optimizer_step(counter, optimizer)
        counter.on_profiler_step(profiler)
    assert counter.count == 5


def test_the_program_takes_over_from_optimizers_and_profilers() -> None:
    counter, profiler, optimizer = StepCounter(), Optimizer(), Optimizer()
    counter.on_profiler_step(profiler)
    optimizer_step(counter, optimizer)
    counter.step()
    for _ in range(3):
        counter.on_profiler_step(profiler)
        optimizer_step(counter, optimizer)
    assert counter.count == 2


# ---------------------------------------------------------------- what is told of the iterations


def stepped_at(*times: int) -> StepCounter:
    left = iter(times)
    counter = StepCounter(lambda: next(left))
    for _ in times:
        counter.step()
    return counter


def test_iterations_are_told_from_any_one_on() -> None:
    counter = stepped_at(100, 200, 300)  # iterations 1 to 3
    assert counter.begun_since(2) == ([(2, 200), (3, 300)], 0)
    assert counter.begun_since(0) == ([(1, 100), (2, 200), (3, 300)], 0)
    assert counter.begun_since(4) == ([], 0)
    assert StepCounter().begun_since(1) == ([], 0)


def test_forgotten_iterations_are_counted() -> None:
    counter = StepCounter(Clock())
    for _ in range(5000):
        counter.step()
    begun, forgotten = counter.begun_since(1)
    assert begun[-1] == (5000, 50_000)
    assert [number for number, _ in begun] == list(range(forgotten + 1, 5001))
    assert forgotten == 5000 - RING_ITERATIONS + 1


def test_the_copying_thread_is_woken_whenever_it_asks_beside_whoever_watches() -> None:
    counter, woken = StepCounter(), []

    def copy() -> None:
        woken.append(("copy", counter.count))
        counter.copy_after(3, copy)

    counter.step()
    counter.watch(5, lambda: woken.append(("watched", counter.count)))
    counter.copy_after(3, copy)
    for _ in range(11):
        counter.step()
    counter.copy_after(None)
    for _ in range(11):
        counter.step()
    assert woken == [("copy", 4), ("watched", 5), ("copy", 7), ("copy", 10)]


def test_a_copying_thread_that_waits_for_the_gil_is_woken_once() -> None:
    """Each wake releases the GIL for a moment: one for every iteration kept the thread from getting it for seconds."""
    counter, woken = StepCounter(), []
    counter.step()
    counter.copy_after(1, lambda: woken.append(counter.count))
    for _ in range(1000):
        counter.step()
    assert woken == [2]
    assert not counter.will_ask_to_copy


def test_the_thread_that_steps_is_noted() -> None:
    counter = StepCounter()
    assert counter.thread == 0
    counter.step()
    assert counter.thread == _thread.get_native_id()
    noted = []

    def work() -> None:
        counter.step()
        noted.append(_thread.get_native_id())

    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert [counter.thread] == noted


def test_a_forked_child_notes_its_own_thread() -> None:
    counter = StepCounter()
    counter.step()
    child = os.fork()
    if child == 0:
        counter.forget_thread()
        counter.step()
        os._exit(0 if counter.thread == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0


STEADY = [100, 102, 99, 101, 100, 98, 103, 100] * 8


def times(factor: float, durations: List[int] = STEADY) -> List[int]:
    return [round(each * factor) for each in durations]


@pytest.mark.parametrize("factor", [0.95, 1.0, 1.25, 4.0])
def test_of_two_steady_paces_the_ratio_is_told(factor: float) -> None:
    assert step_ratio(STEADY, times(factor)) == pytest.approx(factor, rel=0.02)


def test_single_slow_iterations_do_not_make_a_pace_unsteady() -> None:
    hiccups = [5000 if number % 20 == 7 else each for number, each in enumerate(STEADY)]
    assert step_ratio(hiccups, hiccups) == 1.0


@pytest.mark.parametrize(
    "other",
    [
        [],
        [100] * 7,
        [400] * 32 + [100] * 32,  # something else ran on the machine, and ended
        [100 + number for number in range(64)],
        [100] * 60 + [150] * 4 + [100] * 20 + [200] * 24,
        [0] * 64,
    ],
    ids=["none", "too few", "a jump", "a drift", "slow at the end", "no time at all"],
)
def test_of_too_few_or_unsteady_iterations_no_ratio_is_told(other: List[int]) -> None:
    assert step_ratio(STEADY, other) == 0


@pytest.mark.parametrize("other", [[], [100] * 7, [100 * 2**number for number in range(9)], [0] * 64])
def test_of_too_few_iterations_before_or_none_of_one_pace_no_ratio_is_told(other: List[int]) -> None:
    assert step_ratio(other, STEADY) == 0


@pytest.mark.parametrize("warm_up", [[900] * 40, [5000] + [300] * 20, [200 - number for number in range(64)]])
def test_the_first_iterations_of_a_program_do_not_hide_the_pace_before_the_capture(warm_up: List[int]) -> None:
    assert step_ratio(warm_up + STEADY, times(1.25)) == pytest.approx(1.25, rel=0.02)
    assert least_step_ratio(warm_up + STEADY, times(1.25)) == 0


def test_of_a_pace_that_changes_it_is_told_how_much_slower_it_became_at_least() -> None:
    speeding_up = times(1.4) + times(1.2)
    assert step_ratio(STEADY, speeding_up) == 0
    assert least_step_ratio(STEADY, speeding_up) == pytest.approx(1.2, rel=0.02)
    drifting = [100 * 2**number for number in range(3) for _ in range(8)]
    assert least_step_ratio(drifting, [800] * 64) == 2


@pytest.mark.parametrize(
    ("before", "during"),
    [
        (STEADY, times(1.25)),  # a ratio is told
        (STEADY, times(1.2) + times(0.9)),
        ([100] * 32 + [400] * 7, STEADY),
        (STEADY, [400] * 7),
        ([100] * 7, times(1.2) + times(1.4)),
        (STEADY, [0] * 60 + [400] * 4),
        ([0] * 60 + [100] * 4, times(1.2) + times(1.4)),
    ],
    ids=["steady", "faster at times", "slower before", "too few", "too few before", "no times", "no times before"],
)
def test_no_least_ratio_is_told_of_what_the_change_of_pace_explains(before: List[int], during: List[int]) -> None:
    assert least_step_ratio(before, during) == 0


def test_a_program_that_got_faster_was_slowed_by_something_else_before() -> None:
    assert step_ratio(times(3.7), STEADY) == 0


def test_the_pace_is_that_of_the_latest_iterations_until_one_takes_many_times_as_long() -> None:
    clock = Clock()
    counter = StepCounter(clock)
    assert counter.pace_ns()[0] == 0
    for length_ms in (40, 50, 60, 50):
        counter.step()
        clock.now_ns += length_ms * 1_000_000
    assert counter.pace_ns()[0] == 50_000_010
    clock.now_ns += 900_000_000
    assert counter.pace_ns() == (50_000_010, 0)
    clock.now_ns += 200_000_000
    assert counter.pace_ns()[0] == 0
    assert counter.pace_ns()[1] // 1_000_000 == 50 + 900 + 200
    counter.step()
    assert (counter.pace_ns()[0] > 0, counter.pace_ns()[1]) == (True, 0)


def test_a_program_that_has_not_begun_to_step_is_not_stalled() -> None:
    assert StepCounter(Clock()).pace_ns()[1] == 0
