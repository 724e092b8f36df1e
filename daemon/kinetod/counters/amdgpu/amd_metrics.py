"""What the fields of gpu_metrics tell of a GPU: metrics, their sets, and values from two readings. Pure.

Theory of operation
    A value of a sample is either what the second reading says, or the difference of both over the time between them:

    percentages, clocks, temperature   as the GPU's firmware states them: an average over a time of its own, some
                                       milliseconds at most, which ends with the reading
    power, xGMI                        from sums that only grow: exact means of the sample
    throttling                         the share of the firmware's cycles in the sample in which it held the clock back

    Time between readings is the firmware's where the table has it. Fields whose unit is not the same in all kernels
    (`pcie_bandwidth_inst`) or is not certain (`gfx_activity_acc`) are not used.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kinetod.counters.amdgpu.metrics_table import MetricsTable
from kinetod.counters.interface import CounterMetric, LeftOutMetric

_ENERGY_JOULES = 2.0**-16  # kgd_pp_interface.h: "15.259uJ (2^-16) units"
_DATA_BYTES = 1024  # "KiloBytes"
_MEGA = 1e6
TIMESTAMP_NS = 10  # of firmware_timestamp
_HEAT = ("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc")
_CYCLES = "accumulation_counter"
_U32 = 1 << 32
# Bits of indep_throttle_status, amdgpu_smu.h.
_POWER_BITS = 0x00FF_00FF  # limits of power, and of current
_HEAT_BITS = 0x3FFF << 32
_HARDWARE_BITS = 0x3 << 46 | 0x3 << 56  # PROCHOT, and limits of reliability


class TableReading(msgspec.Struct, frozen=True, kw_only=True):
    """A table, and when it was read: monotonic, in ns."""

    table: MetricsTable
    time_ns: int


class AmdMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric. needs: fields that a table must have; value: of two readings, NaN if there is none."""

    metric: CounterMetric
    needs: tuple[str, ...]
    value: Callable[[TableReading, TableReading], float]


def passed_s(before: TableReading, after: TableReading) -> float:
    """The time between two readings, by the firmware's clock where there is one."""
    first, second = _one(before, "firmware_timestamp"), _one(after, "firmware_timestamp")
    if first is not None and second is not None and second > first:
        return (second - first) * TIMESTAMP_NS / 1e9
    return (after.time_ns - before.time_ns) / 1e9


def _one(reading: TableReading, field: str) -> int | None:
    values = reading.table.fields.get(field, ())
    return values[0] if values else None


def _now(field: str, factor: float = 1.0, most: float = math.inf) -> Callable[[TableReading, TableReading], float]:
    def value(_: TableReading, after: TableReading) -> float:
        values = after.table.fields.get(field, ())
        found = factor * sum(values) / len(values) if values else math.nan
        return found if found <= most else math.nan

    return value


def _rate(field: str, factor: float) -> Callable[[TableReading, TableReading], float]:
    def value(before: TableReading, after: TableReading) -> float:
        first, second = before.table.fields.get(field, ()), after.table.fields.get(field, ())
        seconds = passed_s(before, after)
        grown = sum(second) - sum(first)
        if not first or len(first) != len(second) or grown < 0 or seconds <= 0:
            return math.nan
        return grown * factor / seconds

    return value


def _share(*fields: str) -> Callable[[TableReading, TableReading], float]:
    """The largest share of cycles in which one of these residencies has grown."""

    def grown(before: TableReading, after: TableReading, field: str) -> int | None:
        first, second = _one(before, field), _one(after, field)
        if first is None or second is None:
            return None
        return second - first if second >= first else second - first + _U32

    def value(before: TableReading, after: TableReading) -> float:
        cycles = grown(before, after, _CYCLES)
        found = [each for field in fields if (each := grown(before, after, field)) is not None]
        if not cycles or not found or max(found) > cycles:
            return math.nan
        return max(found) / cycles

    return value


def _bits(mask: int) -> Callable[[TableReading, TableReading], float]:
    def value(_: TableReading, after: TableReading) -> float:
        status = _one(after, "indep_throttle_status")
        return math.nan if status is None else float(bool(status & mask))

    return value


def _metric(
    name: str, label: str, unit: str, value: Callable[[TableReading, TableReading], float], *needs: str
) -> AmdMetric:  # fmt: skip
    return AmdMetric(metric=CounterMetric(name=name, label=label, unit=unit), needs=needs or (name,), value=value)


_GPU = _metric("average_gfx_activity", "GPU busy", "%", _now("average_gfx_activity", most=100.0))
# Of Instinct GPUs from MI300 on it is the use of the memory's bandwidth, of others the activity of its controller.
_DRAM = _metric("average_umc_activity", "DRAM", "%", _now("average_umc_activity", most=100.0), "curr_socket_power")
_UMC = _metric(
    "average_umc_activity", "Memory controller busy", "%", _now("average_umc_activity", most=100.0),
    "average_umc_activity", "average_socket_power",
)  # fmt: skip
_POWER = _metric("energy_accumulator", "Power, mean", "W", _rate("energy_accumulator", _ENERGY_JOULES))
_CLOCK = _metric("current_gfxclk", "GPC clock", "Hz", _now("current_gfxclk", _MEGA))
# In no set, since a trace with counters has these by other files of the driver.
_BY_NAME = (
    _metric("average_socket_power", "Power", "W", _now("average_socket_power")),
    _metric("curr_socket_power", "Power", "W", _now("curr_socket_power")),
    _metric("current_uclk", "Memory clock", "Hz", _now("current_uclk", _MEGA)),
    _metric("temperature_hotspot", "Temperature", "°C", _now("temperature_hotspot")),
)
_STATUS = "indep_throttle_status"
_THROTTLING = (
    _metric("ppt_residency_acc", "Throttled by power", "", _share("ppt_residency_acc"), "ppt_residency_acc", _CYCLES),
    _metric("thm_residency_acc", "Throttled by heat", "", _share(*_HEAT), *_HEAT, _CYCLES),
    _metric(
        "prochot_residency_acc", "Throttled by hardware", "", _share("prochot_residency_acc"), "prochot_residency_acc",
        _CYCLES,
    ),
    _metric(f"{_STATUS}.power", "Throttled by power", "", _bits(_POWER_BITS), _STATUS),
    _metric(f"{_STATUS}.heat", "Throttled by heat", "", _bits(_HEAT_BITS), _STATUS),
    _metric(f"{_STATUS}.hardware", "Throttled by hardware", "", _bits(_HARDWARE_BITS), _STATUS),
)  # fmt: skip
_XGMI = (
    _metric("xgmi_read_data_acc", "xGMI read", "B/s", _rate("xgmi_read_data_acc", _DATA_BYTES)),
    _metric("xgmi_write_data_acc", "xGMI written", "B/s", _rate("xgmi_write_data_acc", _DATA_BYTES)),
)

# The names are those of metric_sets.SETS. Of several metrics with the same label, the first one that is there counts.
SETS: Mapping[str, Sequence[AmdMetric]] = {
    "overview": (_GPU, _DRAM, _UMC, _POWER, _CLOCK, *_THROTTLING),
    "memory": (_DRAM, _UMC, _GPU, _CLOCK),
    "tensor": (),
    "interconnect": (*_XGMI, _GPU, _DRAM, _UMC),
}
ALL = (*(each for metrics in SETS.values() for each in metrics), *_BY_NAME)
NO_TENSOR = "amdgpu's table has nothing of the matrix units or of instructions"


def known_metrics(table: MetricsTable) -> dict[str, AmdMetric]:
    """Those that a table has, by name, in the order of the sets."""
    return {each.metric.name: each for each in ALL if all(field in table.fields for field in each.needs)}


def of_set(table: MetricsTable, name: str) -> tuple[list[AmdMetric], list[LeftOutMetric]]:
    """The metrics of a set, and those that a table lacks, of which none has a label of the former."""
    found: dict[str, AmdMetric] = {}
    missing: dict[str, str] = {}  # names by label
    for each in SETS[name]:
        label = each.metric.label
        if all(field in table.fields for field in each.needs):
            found.setdefault(label, each)
        else:
            missing.setdefault(label, each.metric.name)
    names = {each.metric.name for each in found.values()}
    why = f"the table of this GPU, version {table.version}, does not have it"
    left_out = [
        LeftOutMetric(name=metric, why=why)
        for label, metric in missing.items()
        if label not in found and metric not in names
    ]
    return list(found.values()), left_out
