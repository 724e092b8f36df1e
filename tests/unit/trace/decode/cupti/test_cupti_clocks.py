"""CUPTI's records in a process that has used torch's profiler bear another clock."""

import numpy as np
import pytest
from kineto_trace.decode.cupti.cupti_clocks import clocks_of, translate

UNIX, COUNTER, MONOTONIC = 1_790_000_000_000_000_000, 55_000_000_000_000, 9_000_000_000_000
SECOND = 1_000_000_000
# two samples, two seconds apart; the counter runs at 3 GHz, and the wall clock is slewed a little
SAMPLES = [
    [UNIX, COUNTER, MONOTONIC],
    [UNIX + 2 * SECOND + 200, COUNTER + 6 * SECOND, MONOTONIC + 2 * SECOND],
]


def columns(*starts: int, length: int = 3000) -> dict[str, np.ndarray]:
    return {"start": np.array(starts, np.int64), "duration": np.full(len(starts), length, np.int64)}


def test_unix_times_stay_as_they_are() -> None:
    rows = columns(UNIX + 5, UNIX + SECOND)
    assert not translate(rows, clocks_of(SAMPLES))
    assert rows["start"].tolist() == [UNIX + 5, UNIX + SECOND]


def test_readings_of_the_time_stamp_counter_become_unix_times() -> None:
    rows = columns(COUNTER, COUNTER + 3 * SECOND, 0)
    rows["queued"] = np.array([0, COUNTER + 3 * SECOND, 0], np.uint64)
    assert translate(rows, clocks_of(SAMPLES))
    assert rows["start"].tolist() == [UNIX, UNIX + SECOND + 100, 0]
    assert rows["duration"].tolist() == [1000] * 3
    assert rows["queued"].tolist() == [0, UNIX + SECOND + 100, 0]
    assert rows["queued"].dtype == np.uint64


def test_monotonic_times_become_unix_times() -> None:
    rows = columns(MONOTONIC + SECOND, MONOTONIC + 3 * SECOND)  # the second one after the last sample
    assert translate(rows, clocks_of(SAMPLES))
    assert rows["start"].tolist() == [UNIX + SECOND + 100, UNIX + 3 * SECOND + 300]
    assert rows["duration"].tolist() == [3000] * 2


def test_a_machine_without_a_counter_has_two_clocks() -> None:
    samples = [[UNIX, 0, MONOTONIC], [UNIX + SECOND, 0, MONOTONIC + SECOND]]
    assert [clock.first for clock in clocks_of(samples)] == [UNIX, MONOTONIC]


@pytest.mark.parametrize(
    "samples",
    [
        None,
        [],
        "ab",
        [SAMPLES[0]],
        [SAMPLES[0], SAMPLES[0]],
        [SAMPLES[0], ["x", 1, 2]],
        [[-1, 1, 1], SAMPLES[1]],
        [SAMPLES[0][:2], SAMPLES[1][:2]],
        SAMPLES[::-1],
    ],
)
def test_samples_that_say_nothing_change_nothing(samples: object) -> None:
    rows = columns(COUNTER)
    assert not translate(rows, clocks_of(samples))
    assert rows["start"].tolist() == [COUNTER]
    assert not translate(columns(), clocks_of(SAMPLES))
