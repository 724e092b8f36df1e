"""Power, clocks, temperature and throttling."""

from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.counters.roofline import NO_CLOCKS, OWN_POWER, gpu_clocks, throttling_spans
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable
from support.trace_files.simulated.sampled_gpu import counter_table
from support.trace_files.traces import START_NS, trace

TENTH = 100_000_000
SAMPLES = 10
LENGTH = SAMPLES * TENTH


def sampled(counters: dict[str, list[float]], **rows: Any) -> Context:
    """Samples of 100 ms over a second."""
    strings = StringTable()
    columns = [
        {"label": label, "device": 0, "start": START_NS + TENTH * np.arange(len(value)), "value": np.array(value),
         "duration": np.full(len(value), TENTH)}
        for label, value in counters.items()
    ]  # fmt: skip
    table = counter_table(columns, strings)
    return Context(trace({}, strings=tuple(strings.strings), tables={"counter": table}, length_ns=LENGTH))


SLOW = {
    "Power": [600.0] * 6 + [700.0] * 4,
    "Power limit": [700.0] * 10,
    "SM clock": [1.98e9] * 6 + [1.4e9] * 4,
    "Temperature": [60.0] * 10,
    "Throttled by power": [0.0] * 6 + [1.0] * 4,
    "Throttled by heat": [0.0] * 10,
}


def test_a_gpu_has_its_clocks_and_how_long_it_was_throttled() -> None:
    (row,) = gpu_clocks(Context(sampled(SLOW).trace)).rows()
    assert (row["power_w"], row["max_power_w"], row["power_limit_w"]) == (640, 700, 700)
    assert (row["sm_clock_mhz"], row["max_sm_clock_mhz"]) == (pytest.approx(1748), 1980)
    assert (row["power_throttled_pct"], row["heat_throttled_pct"]) == (pytest.approx(40), 0)
    assert row["hardware_throttled_pct"] is None and row["memory_clock_mhz"] is None  # not sampled
    assert row["steps_throttled_pct"] == pytest.approx(40)
    assert row["throttled_sm_clock_mhz"] == pytest.approx(1400)


def test_what_sampling_costs_is_told_where_the_power_limit_held_and_counters_were_sampled() -> None:
    dram = {"DRAM": [10.0] * 10}
    assert OWN_POWER in gpu_clocks(sampled({**SLOW, **dram})).notes
    assert OWN_POWER not in gpu_clocks(sampled(SLOW)).notes
    assert OWN_POWER not in gpu_clocks(sampled({**SLOW, **dram, "Throttled by power": [0.0] * 10})).notes


def test_spans_of_throttling_are_told_with_what_the_gpu_did_in_them() -> None:
    marks = [0, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    found = throttling_spans(sampled({**SLOW, "Throttled by power": [float(mark) for mark in marks]})).rows()
    assert [((row["start_ns"] - START_NS) // TENTH, row["duration_us"], row["reason"]) for row in found] == [
        (1, 200_000, "power"), (6, 100_000, "power"),
    ]  # fmt: skip
    assert (found[1]["sm_clock_mhz"], found[1]["power_w"]) == (pytest.approx(1400), 700)


def test_a_gpu_that_ran_freely_and_one_of_which_nothing_is_known_are_told_apart() -> None:
    free = {**SLOW, "Throttled by power": [0.0] * 10}
    assert throttling_spans(sampled(free)).notes == ("no GPU was throttled",)
    assert throttling_spans(sampled({"DRAM": [10.0] * 10})).notes == (NO_CLOCKS,)
    assert gpu_clocks(sampled({"DRAM": [10.0] * 10})).notes == (NO_CLOCKS,)
    assert gpu_clocks(Context(trace({}))).notes == (NO_COUNTERS,)
    assert throttling_spans(Context(trace({}))).notes == (NO_COUNTERS,)
