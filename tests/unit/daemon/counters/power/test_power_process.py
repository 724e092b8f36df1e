"""How readings become rows, and how often there is one."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.power.interface import PowerMetric
from kinetod.counters.power.power_process import MOST_PERIOD_NS, DrmPower, PowerRows, ReadingPace
from support.accelerators.drm_host import DrmHost

PERIOD = 50
S = 1_000_000_000


GAUGE, COUNTER = PowerMetric(name="g", label="g", unit=""), PowerMetric(name="c", label="c", unit="", counter=True)
RARE_GAUGE = PowerMetric(name="G", label="G", unit="", costly=True)
RARE_COUNTER = PowerMetric(name="C", label="C", unit="", counter=True, costly=True)
Made = list[tuple[int, int, list[float]]]


def taken(rows: PowerRows) -> Made:
    return [(int(row["start_ns"]), int(row["end_ns"]), row["values"].tolist()) for row in rows.take()]


def made(rows: PowerRows, time_ns: int, *values: float | None) -> Made:
    """Of a whole reading."""
    rows.add(time_ns, values, PERIOD, whole=True)
    return taken(rows)


def test_a_row_goes_from_one_reading_to_the_next_with_the_values_of_the_later_one() -> None:
    rows = PowerRows([GAUGE, GAUGE])
    assert made(rows, 100, 1, 2) == []
    assert made(rows, 150, 3, 4) == [(100, 150, [3, 4])]
    assert made(rows, 210, 5, 6) == [(150, 210, [5, 6])]


def test_a_counter_becomes_its_growth_per_second() -> None:
    rows = PowerRows([COUNTER])
    assert made(rows, S, 10) == []
    assert made(rows, S + S // 2, 14) == [(S, S + S // 2, [8])]


def test_costly_figures_of_a_whole_reading_are_those_of_all_rows_since_the_last_one() -> None:
    rows = PowerRows([GAUGE, COUNTER, RARE_GAUGE, RARE_COUNTER])
    assert made(rows, S, 1, 0, 7, 100) == []
    rows.add(S + 100, [2, 0, None, None], PERIOD, whole=False)
    rows.add(S + 200, [3, 1, None, None], PERIOD, whole=False)
    assert made(rows, S + 400, 4, 1, 8, 108) == [
        (S, S + 100, [2, 0, 8, 2e7]),
        (S + 100, S + 200, [3, 1e7, 8, 2e7]),
        (S + 200, S + 400, [4, 0, 8, 2e7]),
    ]


def test_rows_without_a_whole_reading_after_them_have_no_costly_figures() -> None:
    rows = PowerRows([GAUGE, RARE_COUNTER])
    made(rows, S, 1, 100)
    rows.add(S + 100, [2, None], PERIOD, whole=False)
    ((_, _, found),) = taken(rows)
    assert found[0] == 2 and math.isnan(found[1])


@pytest.mark.parametrize(("then", "now"), [(10, 9), (None, 9), (10, None)])
def test_a_counter_that_began_anew_or_is_missing_has_no_value(then: float | None, now: float | None) -> None:
    rows = PowerRows([COUNTER])
    made(rows, 100, then)
    ((_, _, found),) = made(rows, 150, now)
    assert math.isnan(found[0])


def test_a_value_that_is_not_to_be_had_is_none() -> None:
    rows = PowerRows([GAUGE])
    made(rows, 100, 1)
    ((_, _, found),) = made(rows, 150, None)
    assert math.isnan(found[0])


@pytest.mark.parametrize("counter", [COUNTER, RARE_COUNTER])
def test_after_a_long_time_without_a_reading_only_the_last_period_is_told(counter: PowerMetric) -> None:
    rows = PowerRows([GAUGE, counter])
    made(rows, S, 1, 10)
    assert made(rows, 2 * S, 2, 10) == [(S, 2 * S, [2, 0])]  # the longest row
    ((start, end, found),) = made(rows, 3 * S + 1, 3, 20)
    assert (start, end) == (3 * S + 1 - PERIOD, 3 * S + 1)
    assert found[0] == 3 and math.isnan(found[1])


@pytest.mark.parametrize("counter", [COUNTER, RARE_COUNTER])
def test_a_clock_that_was_set_back_gives_no_row_that_overlaps(counter: PowerMetric) -> None:
    rows = PowerRows([GAUGE, counter])
    made(rows, 100, 1, 0)
    assert made(rows, 100, 2, 0) == []
    assert made(rows, 40, 3, 0) == []
    assert made(rows, 90, 4, 0) == [(40, 90, [4, 0])]


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
    rows = PowerRows([GAUGE])
    made(rows, 1, 1.0)
    rows.add(2, [1.0], PERIOD, whole=True)
    assert np.frombuffer(rows.take().tobytes(), dtype=np.uint8)[20:].sum() == 0


ADDRESS = "0000:c1:00.0"


@pytest.fixture
def host(tmp_path: Path) -> DrmHost:
    return DrmHost(tmp_path)


def opened(host: DrmHost) -> DrmPower:
    return DrmPower(ADDRESS, sys=host.sys, proc=host.proc)


def told(power: DrmPower) -> dict[str, tuple[str, str, float | None]]:
    return {
        metric.label: (metric.name, metric.unit, value)
        for metric, value in zip(power.metrics, power.read(), strict=True)
    }


def test_an_amd_gpu_has_power_clocks_and_temperature(host: DrmHost) -> None:
    host.gpu(
        "amdgpu",
        ADDRESS,
        128,
        product_name="AMD Instinct MI300X",
        hwmon__hwmon3__power1_input="612000000",
        hwmon__hwmon3__power1_cap="750000000",
        hwmon__hwmon3__freq1_label="sclk",
        hwmon__hwmon3__freq1_input="2100000000",
        hwmon__hwmon3__freq2_label="mclk",
        hwmon__hwmon3__freq2_input="1300000000",
        hwmon__hwmon3__temp2_label="junction",
        hwmon__hwmon3__temp2_input="71000",
    )
    power = opened(host)
    assert (power.backend, power.chip, power.index) == ("amdgpu", "AMD Instinct MI300X", 0)
    assert told(power) == {
        "Power": ("power1_input", "W", 612.0),
        "Power limit": ("power1_cap", "W", 750.0),
        "SM clock": ("freq1_input", "Hz", 2.1e9),
        "Memory clock": ("freq2_input", "Hz", 1.3e9),
        "Temperature": ("temp2_input", "°C", 71.0),
    }
    assert not any(metric.counter for metric in power.metrics)


def test_an_intel_gpu_has_its_energy_as_power_and_the_reasons_for_lower_clocks(host: DrmHost) -> None:
    throttle = "tile0__gt0__freq0__throttle__"
    folder = host.gpu(
        "xe",
        ADDRESS,
        128,
        device="0xe20b",
        hwmon__hwmon1__energy1_input="5000000",
        hwmon__hwmon1__power1_max="190000000",
        tile0__gt0__freq0__act_freq="2850",
        **{f"{throttle}reason_{name}": "0" for name in ("pl1", "pl2", "pl4", "thermal", "ratl", "prochot", "vr_tdc")},
    )
    power = opened(host)
    assert told(power) == {
        "Power": ("energy1_input", "W", 5.0),  # joules so far, of which the rows have the growth
        "Power limit": ("power1_max", "W", 190.0),
        "SM clock": ("act_freq", "Hz", 2.85e9),
        "Throttled by power": ("reason_pl1", "", 0.0),
        "Throttled by heat": ("reason_thermal", "", 0.0),
        "Throttled by hardware": ("reason_prochot", "", 0.0),
    }
    assert [metric.label for metric in power.metrics if metric.counter] == ["Power"]
    host.write(folder, {f"{throttle}reason_pl4": "1", f"{throttle}reason_ratl": "1"})
    flags = {label: value for label, (_, unit, value) in told(power).items() if not unit}
    assert flags == {"Throttled by power": 1.0, "Throttled by heat": 1.0, "Throttled by hardware": 0.0}


def test_a_file_that_cannot_be_read_any_more_leaves_out_its_value(host: DrmHost) -> None:
    folder = host.gpu(
        "amdgpu", ADDRESS, 128, hwmon__hwmon1__power1_average="1000000", hwmon__hwmon1__power1_cap="2000000"
    )
    power = opened(host)
    (folder / "hwmon/hwmon1/power1_average").unlink()
    assert power.read() == [None, 2.0]


def test_a_gpu_that_is_gone_says_so(host: DrmHost) -> None:
    folder = host.gpu("amdgpu", ADDRESS, 128, hwmon__hwmon1__power1_average="1000000")
    power = opened(host)
    shutil.rmtree(folder)
    with pytest.raises(CounterError, match=f"the GPU at {ADDRESS} has fallen off the bus"):
        power.read()


def test_a_driver_without_such_files_and_an_address_without_a_gpu_are_refused(host: DrmHost) -> None:
    with pytest.raises(CounterError, match="there is no AMD or Intel GPU at") as none:
        opened(host)
    host.gpu("i915", ADDRESS, 128)
    with pytest.raises(CounterError, match="i915 has no files for its power, clocks or temperature") as bare:
        opened(host)
    assert none.value.code == bare.value.code == CounterCode.UNAVAILABLE
