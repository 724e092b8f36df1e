"""Samples as the points that a viewer draws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.formats.counter_series import (
    GAP,
    NONE,
    SAMPLE,
    hardware_series,
    parse_series,
    points,
    shortest_decimals,
)
from support.counters.trace_samples import NAN, sample
from support.trace_files.traces import START_NS, trace


def test_a_sample_is_a_point_and_one_more_is_at_its_end_if_nothing_follows_at_once() -> None:
    whole = trace({"counter": [sample(0, 10, 5), sample(10, 20, NAN), sample(25, 30, 7)]})
    (series,) = hardware_series(whole)
    found = points(whole.table("counter"), series)
    assert (found.time - START_NS).tolist() == [0, 10, 20, 25, 30]
    assert found.value.tolist() == [5, 0, 0, 7, 0]
    assert found.what.tolist() == [SAMPLE, NONE, GAP, SAMPLE, GAP]


def test_rows_in_any_order_are_series_in_the_order_of_time() -> None:
    rows = [sample(at, at + 10, at, device=device) for at in (50, 0, 20) for device in (1, 0)]
    found = hardware_series(trace({"counter": rows}))
    assert [(each.device, each.rows.tolist()) for each in found] == [(0, [3, 5, 1]), (1, [2, 4, 0])]


def test_rows_of_many_series_in_turns_are_as_many_series() -> None:
    rows = [sample(10 * at, 10 * at + 10, at, device=device) for at in range(1500) for device in range(3)]
    found = hardware_series(trace({"counter": rows}))
    assert [(each.device, each.rows.tolist()) for each in found] == [
        (device, list(range(device, 4500, 3))) for device in range(3)
    ]


@pytest.mark.parametrize(
    ("category", "shown", "expected"),
    [
        ("%,dram__x,hardware_counter", "DRAM %", ("DRAM", "%", "dram__x", True)),
        ("%,dram__x,hardware_counter_none", "DRAM %", ("DRAM", "%", "dram__x", False)),
        ("%,dram__x,hardware_counter", "DRAM % (dram__x)", ("DRAM", "%", "dram__x", True)),
        (",a,b,hardware_counter", "Hot", ("Hot", "", "a,b", True)),
        ("x,hardware_counter", "Hot", ("Hot", "x", "", True)),
    ],
)
def test_category_and_name_tell_what_was_measured(
    category: str, shown: str, expected: tuple[str, str, str, bool]
) -> None:
    assert parse_series(category, shown) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.3, "12.3"), (0.1, "0.1"), (1980000000, "1980000000.0"), (1e-7, "1e-07"), (16777217, "16777216.0"), (0, "0.0")],
)
def test_a_float32_has_no_more_digits_than_it_needs(value: float, text: str) -> None:
    (found,) = shortest_decimals(np.array([np.float32(value)], np.float64)).tolist()
    assert repr(found) == text


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_same_float32_is_nearest_to_the_shortest_decimals(value: float) -> None:
    (found,) = shortest_decimals(np.array([value])).tolist()
    assert np.float32(found) == np.float32(value)
    if value and abs(math.log10(abs(value))) < 11:
        assert len(repr(found)) <= len(repr(value))
