"""How readings become rows, and how often there is one."""

import math

import numpy as np
import pytest
from kinetod.counters.power.power_process import MOST_PERIOD_NS, PowerRows, ReadingPace

PERIOD = 50
S = 1_000_000_000


def made(rows: PowerRows, time_ns: int, *values: float | None) -> tuple[int, int, list[float]] | None:
    row = rows.row(time_ns, values, PERIOD)
    return None if row is None else (int(row["start_ns"][0]), int(row["end_ns"][0]), row["values"][0].tolist())


def test_a_row_goes_from_one_reading_to_the_next_with_the_values_of_the_later_one() -> None:
    rows = PowerRows([False, False])
    assert made(rows, 100, 1, 2) is None
    assert made(rows, 150, 3, 4) == (100, 150, [3, 4])
    assert made(rows, 210, 5, 6) == (150, 210, [5, 6])


def test_a_counter_becomes_its_growth_per_second() -> None:
    rows = PowerRows([True])
    assert made(rows, S, 10) is None
    assert made(rows, S + S // 2, 14) == (S, S + S // 2, [8])


@pytest.mark.parametrize(("then", "now"), [(10, 9), (None, 9), (10, None)])
def test_a_counter_that_began_anew_or_is_missing_has_no_value(then: float | None, now: float | None) -> None:
    rows = PowerRows([True])
    made(rows, 100, then)
    found = made(rows, 150, now)
    assert found is not None and math.isnan(found[2][0])


def test_a_value_that_is_not_to_be_had_is_none() -> None:
    rows = PowerRows([False])
    made(rows, 100, 1)
    found = made(rows, 150, None)
    assert found is not None and math.isnan(found[2][0])


def test_after_a_long_time_without_a_reading_only_the_last_period_is_told() -> None:
    rows = PowerRows([False, True])
    made(rows, S, 1, 10)
    assert made(rows, 2 * S, 2, 10) == (S, 2 * S, [2, 0])  # the longest row
    found = made(rows, 3 * S + 1, 3, 20)
    assert found is not None and found[:2] == (3 * S + 1 - PERIOD, 3 * S + 1)
    assert found[2][0] == 3 and math.isnan(found[2][1])


def test_a_clock_that_was_set_back_gives_no_row_that_overlaps() -> None:
    rows = PowerRows([False])
    made(rows, 100, 1)
    assert made(rows, 100, 2) is None
    assert made(rows, 40, 3) is None
    assert made(rows, 90, 4) == (40, 90, [4])


def test_readings_that_cost_little_keep_the_period() -> None:
    pace = ReadingPace(50_000_000)
    for _ in range(100):
        pace.add(1_000_000)
    assert pace.period_ns == 50_000_000


def test_readings_that_cost_much_are_rarer_but_not_rarer_than_twice_a_second() -> None:
    pace = ReadingPace(50_000_000)
    for _ in range(100):
        pace.add(6_000_000)
    assert pace.period_ns == pytest.approx(200_000_000, rel=0.01)
    for _ in range(100):
        pace.add(600_000_000)
    assert pace.period_ns == MOST_PERIOD_NS


def test_padding_of_rows_is_zero() -> None:
    row = PowerRows([False]).row(1, [1.0], PERIOD)
    assert row is None
    rows = PowerRows([False])
    rows.row(1, [1.0], PERIOD)
    row = rows.row(2, [1.0], PERIOD)
    assert row is not None and np.frombuffer(row.tobytes(), dtype=np.uint8)[20:].sum() == 0
