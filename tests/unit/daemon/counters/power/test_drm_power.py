"""Power, clocks and throttling of AMD's and Intel's GPUs by their drivers' files."""

import shutil
from pathlib import Path

import pytest
from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.power.drm_power import DrmPower
from support.accelerators.drm_host import DrmHost

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
    with pytest.raises(CounterError, match="there is no GPU of AMD or Intel at") as none:
        opened(host)
    host.gpu("i915", ADDRESS, 128)
    with pytest.raises(CounterError, match="i915 has no files of its power, clocks or temperature") as bare:
        opened(host)
    assert none.value.code == bare.value.code == CounterCode.UNAVAILABLE
