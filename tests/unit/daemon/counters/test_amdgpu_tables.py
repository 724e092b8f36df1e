"""The driver's table gpu_metrics, and what its fields tell of a GPU."""

import math
from collections.abc import Sequence

import pytest
from kinetod.counters.amdgpu_backend import (
    LAYOUTS,
    SETS,
    TableReading,
    UnknownTableError,
    known_metrics,
    of_set,
    read_table,
)
from kinetod.counters.interface import SETS as SET_NAMES
from support.counters.gpu_metrics_tables import VERSIONS, packed

VALUES: dict[str, int | Sequence[int]] = {
    "temperature_hotspot": 51, "curr_socket_power": 700, "average_socket_power": 300, "average_gfx_activity": 97,
    "average_umc_activity": 41, "energy_accumulator": 1 << 40, "accumulation_counter": 77,
    "prochot_residency_acc": 1, "ppt_residency_acc": 2, "socket_thm_residency_acc": 3, "vr_thm_residency_acc": 4,
    "hbm_thm_residency_acc": 5, "xgmi_read_data_acc": [6, 7], "xgmi_write_data_acc": [8, 9],
    "firmware_timestamp": 10, "current_gfxclk": [2100, 1900], "current_uclk": 1300, "indep_throttle_status": 11,
}  # fmt: skip
EVERY = (*VERSIONS, (1, 9))


def reading(version: tuple[int, int], time_ns: int = 0, **values: int | Sequence[int]) -> TableReading:
    return TableReading(table=read_table(packed(version, {**VALUES, **values})), time_ns=time_ns)


def value(name: str, before: TableReading, after: TableReading) -> float:
    return known_metrics(after.table)[name].value(before, after)


@pytest.mark.parametrize("version", EVERY)
def test_every_field_is_read_where_the_kernel_puts_it(version: tuple[int, int]) -> None:
    found = read_table(packed(version, VALUES)).fields
    for name, values in found.items():
        wanted = VALUES[name]
        assert list(values) == (wanted if isinstance(wanted, list) else [wanted]) or (
            name == "current_gfxclk" and values == (2100,)  # before 1.4 there is one
        )
    assert found.keys() == (LAYOUTS[version][1].keys() if version in LAYOUTS else VALUES.keys() & found.keys())
    assert {"average_gfx_activity", "temperature_hotspot", "current_uclk"} <= found.keys()


@pytest.mark.parametrize("version", EVERY)
def test_a_field_without_a_value_is_left_out(version: tuple[int, int]) -> None:
    assert read_table(packed(version, {"current_uclk": 5})).fields == {"current_uclk": (5,)}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x04\x00", "it has only 2 bytes, too few for a version"),
        (b"\x05\x00\x01\x03", r"the header of version 1\.3 states 5 bytes, but 4 were read"),
        (b"\x06\x00\x01\x03\0\0", r"version 1\.3 has 6 bytes, but its known layout has 120"),
        (
            b"\x06\x00\x03\x00\0\0",
            r"version 3\.0 is not supported; such tables come from processors with integrated graphics",
        ),
        (b"\x06\x00\x01\x0a\0\0", r"version 1\.10 is not supported$"),
        (b"\x08\x00\x01\x09\x01\0\0\0", r"the self-description of version 1\.9 is invalid"),
        (b"\x10\x00\x01\x09\x01\0\0\0\x01\0\xf0\0\0\0\0\0", r"the self-description of version 1\.9 is invalid"),
    ],
)
def test_a_table_that_is_not_known_is_not_read(data: bytes, problem: str) -> None:
    with pytest.raises(UnknownTableError, match=problem):
        read_table(data)


def test_sums_become_exact_means_by_the_clock_of_the_firmware() -> None:
    before = reading((1, 7), 0)
    after = reading(
        (1, 7), 99, energy_accumulator=(1 << 40) + 65536 * 7, firmware_timestamp=10 + 1_000_000,
        xgmi_read_data_acc=[1006, 7], xgmi_write_data_acc=[8, 29],
    )  # fmt: skip
    assert value("energy_accumulator", before, after) == 700.0  # 7 J in 10 ms
    assert value("xgmi_read_data_acc", before, after) == 1000 * 1024 * 100
    assert value("xgmi_write_data_acc", before, after) == 20 * 1024 * 100


def test_time_is_ours_where_the_firmware_tells_none() -> None:
    def at(time_ns: int, energy: int) -> TableReading:
        fields = {name: each for name, each in VALUES.items() if name != "firmware_timestamp"}
        return TableReading(table=read_table(packed((1, 5), {**fields, "energy_accumulator": energy})), time_ns=time_ns)

    assert value("energy_accumulator", at(0, 0), at(10_000_000, 65536)) == 100.0


def test_a_sum_that_shrinks_or_has_other_parts_has_no_value() -> None:
    before, later = reading((1, 7)), {"firmware_timestamp": 99}
    assert math.isnan(value("energy_accumulator", before, reading((1, 7), 1, energy_accumulator=0, **later)))
    assert math.isnan(value("xgmi_read_data_acc", before, reading((1, 7), 1, xgmi_read_data_acc=[99], **later)))


def test_throttling_is_the_share_of_the_cycles_and_heat_the_hottest_part() -> None:
    before = reading((1, 8))
    after = reading(
        (1, 8), accumulation_counter=87, ppt_residency_acc=7, socket_thm_residency_acc=3, vr_thm_residency_acc=6,
        hbm_thm_residency_acc=9, prochot_residency_acc=1,
    )  # fmt: skip
    assert value("ppt_residency_acc", before, after) == 0.5
    assert value("thm_residency_acc", before, after) == 0.4
    assert value("prochot_residency_acc", before, after) == 0.0


def test_counters_of_cycles_may_wrap() -> None:
    before = reading((1, 8), accumulation_counter=(1 << 32) - 6, ppt_residency_acc=(1 << 32) - 3)
    after = reading((1, 8), accumulation_counter=4, ppt_residency_acc=2)
    assert value("ppt_residency_acc", before, after) == 0.5
    stuck = reading((1, 8), accumulation_counter=(1 << 32) - 6)
    assert math.isnan(value("ppt_residency_acc", before, stuck))


@pytest.mark.parametrize(
    ("bit", "throttled"),
    [(0, "power"), (17, "power"), (36, "heat"), (45, "heat"), (47, "hardware"), (56, "hardware"), (8, "")],
)
def test_a_bit_of_the_status_says_what_throttles(bit: int, throttled: str) -> None:
    after = reading((1, 3), indep_throttle_status=1 << bit)
    for name in ("power", "heat", "hardware"):
        assert value(f"indep_throttle_status.{name}", after, after) == (name == throttled)


def test_a_percentage_above_100_is_none() -> None:
    after = reading((1, 3), average_gfx_activity=9700)
    assert math.isnan(value("average_gfx_activity", after, after))
    assert value("current_gfxclk", after, reading((1, 7))) == 2000e6


@pytest.mark.parametrize(
    ("version", "labels", "left_out"),
    [
        (
            (1, 3),
            ["GPU busy", "Memory controller busy", "GPC clock", "Throttled by power", "Throttled by heat",
             "Throttled by hardware"],
            ["energy_accumulator"],
        ),
        (
            (1, 5),
            ["GPU busy", "DRAM", "Power, mean", "GPC clock"],
            ["ppt_residency_acc", "thm_residency_acc", "prochot_residency_acc"],
        ),
        (
            (1, 8),
            ["GPU busy", "DRAM", "Power, mean", "GPC clock", "Throttled by power", "Throttled by heat",
             "Throttled by hardware"],
            [],
        ),
    ],
)  # fmt: skip
def test_the_overview_has_what_the_version_has(
    version: tuple[int, int], labels: list[str], left_out: list[str]
) -> None:
    chosen, missing = of_set(read_table(packed(version, VALUES)), "overview")
    assert [each.metric.label for each in chosen] == labels
    assert [each.name for each in missing] == left_out
    assert all(f"(version 1.{version[1]}) does not have it" in each.why for each in missing)


def test_sets_have_the_names_that_they_have_everywhere() -> None:
    assert SETS.keys() == SET_NAMES.keys()
