"""What counts as a sample, and means over intervals."""

from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.counters.sampled_counters import (
    interval_means,
    left_out_note,
    sampled_counters,
    tracks_of,
)
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable
from support.trace_files.simulated.sampled_gpu import counter_table
from support.trace_files.traces import START_NS, trace


def sampled(values: list[float], *, unit: str = "%", label: str = "DRAM", **changes: Any) -> Context:
    """Samples of 100 ns, one after the other, unless start and duration say otherwise."""
    strings, start = StringTable(), START_NS + 100 * np.arange(len(values))
    column = {"label": label, "unit": unit, "device": 0, "start": start, "value": values}
    table = counter_table([{**column, "duration": np.full(len(values), 100), **changes}], strings)
    return Context(trace({}, strings=tuple(strings.strings), tables={"counter": table}, length_ns=1000))


def test_a_trace_without_samples_has_no_counters() -> None:
    assert sampled_counters(Context(trace({}))) == ()


def test_what_is_no_value_is_left_out_and_told() -> None:
    context = sampled([10, float("nan"), float("inf"), -3, 250, 103])
    (found,) = sampled_counters(context)
    assert found.value.tolist() == [10, 100]  # 103: the edge of a sample
    assert left_out_note(context) == ["4 of 6 samples are left out: their value is missing or impossible (DRAM)"]


def test_a_temperature_may_be_below_zero_and_a_rate_above_a_hundred() -> None:
    assert sampled_counters(sampled([-4.0, 30.0], unit="°C"))[0].value.tolist() == [-4, 30]
    assert sampled_counters(sampled([-4.0, 3e9], unit="B/s"))[0].value.tolist() == [3e9]


def test_samples_without_length_and_those_inside_of_another_are_none() -> None:
    start = START_NS + np.array([0, 50, 100, 200])
    (found,) = sampled_counters(sampled([1, 2, 3, 4], start=start, duration=np.array([100, 100, 0, 100])))
    assert found.value.tolist() == [1, 4]


def test_samples_in_any_order_are_put_in_order() -> None:
    start = START_NS + np.array([200, 0, 100])
    assert sampled_counters(sampled([3, 1, 2], start=start))[0].value.tolist() == [1, 2, 3]


def test_all_samples_without_a_value_leave_a_counter_without_samples() -> None:
    context = sampled([float("nan")] * 4)
    assert [len(found) for found in sampled_counters(context)] == [0]
    assert tracks_of(context, 0) == {}


def means(context: Context, *spans: tuple[int, int]) -> list[tuple[float, int]]:
    start, end = (np.array(side, np.int64) + START_NS for side in zip(*spans, strict=True))
    found = interval_means(sampled_counters(context)[0], start, end, np.arange(len(spans)), len(spans))
    return list(zip(found.mean.tolist(), found.covered_ns.tolist(), strict=True))


def test_a_mean_weighs_samples_by_how_much_of_them_lies_inside() -> None:
    found = means(sampled([10, 20, 60]), (50, 300), (0, 100), (250, 900))
    assert found == [(pytest.approx((10 * 50 + 20 * 100 + 60 * 100) / 250), 250), (10, 100), (60, 50)]


def test_an_interval_without_samples_has_no_mean() -> None:
    context = sampled([10, 20], start=START_NS + np.array([0, 500]))
    gap, empty, behind = means(context, (100, 500), (50, 50), (800, 900))
    assert np.isnan([gap[0], empty[0], behind[0]]).all() and (gap[1], empty[1], behind[1]) == (0, 0, 0)


def test_a_gap_between_samples_does_not_weigh() -> None:
    assert means(sampled([10, 20], start=START_NS + np.array([0, 500])), (0, 600)) == [(15, 200)]


def test_intervals_of_one_group_have_one_mean() -> None:
    (found,) = sampled_counters(sampled([10, 20, 60]))
    start = START_NS + np.array([0, 200, 100])
    both = interval_means(found, start, start + 100, np.array([0, 0, -1]), 1)
    assert (both.mean.tolist(), both.covered_ns.tolist()) == ([35], [200])
