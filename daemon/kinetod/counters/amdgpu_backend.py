"""The backend for AMD's GPUs: readings of gpu_metrics, a table that the kernel driver exposes to everybody.

Theory of operation
    Nothing is loaded, opened or reserved on the GPU, and any number of processes can read the table, so nobody is kept
    from counters and COUNTERS_BUSY never occurs. For each reading the driver sends a message to the GPU's firmware,
    which also controls clocks and power; therefore the shortest interval is LEAST_NS, although the firmware updates its
    values every millisecond. A suspended GPU is not read, because reading would wake it.

    A sample spans two readings. A reading that is more than LATE intervals late starts a new series, and the time
    before it counts as lost; a table that the firmware has not updated is ignored.

    rocprofiler-sdk's device counting is not used: it opens its own queue on the GPU, whose high-priority packets made
    programs running at the same time hang, and it needs the GPU's profiling lock. amdgpu's perf events (data fabric,
    xGMI) exist for Vega 20 and Arcturus only.
"""

import contextlib
import errno
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from kineto_trace.base.quantities import format_duration

from kinetod.counters.interface import SETS as SET_NAMES
from kinetod.counters.interface import (
    CounterCode,
    CounterDevice,
    CounterError,
    CounterMetric,
    CounterPlan,
    LeftOutMetric,
    WantedCounters,
    checked_wanted,
)
from kinetod.counters.kernel_gpus import AMD, first_line, kernel_gpus
from kinetod.counters.sample_rings import ERROR, STOPPED, TOO_LONG, Failure, RingWriter
from kinetod.processes.drm_gpus import PROC, SYS, DrmGpu, drm_gpus

LEAST_NS = 10_000_000
LATE = 4
GIVE_UP_S = 5.0  # a GPU that is being reset cannot be read for some seconds
_SYSTEM = 4  # kn_failure_kind
_TABLE = "gpu_metrics"
_GONE = (errno.ENOENT, errno.ENODEV)
_MODULE_VERSION = "module/amdgpu/version"
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
MAX_BYTES = 1 << 16  # its size is a u16
GFX_CLOCKS = XGMI_LINKS = 8


# gpu_metrics: amdgpu's table about a GPU in /sys, decoded by its version. Pure.
#
# A table begins with its size (u16) and its version (two bytes). Versions 1.1 to 1.8 are structures, of which only the
# fields that we use are named here; a table whose size does not match its version is not read, since some kernels had
# other structures under the same version. Version 1.9 describes itself: a count of attributes (i32), and for each its
# encoding (u64: unit, type, number, length) and its values, without padding. A field with all bits set has no value.
# Sources: `drivers/gpu/drm/amd/include/kgd_pp_interface.h` of Linux, and `rocm_smi_gpu_metrics.h` of ROCm, whose
# structures were compiled for sizes and offsets; for 1.9 the enumerations of the former.
class UnknownTableError(Exception):
    """The table cannot be read. The message describes it."""


class MetricsTable(msgspec.Struct, frozen=True, kw_only=True):
    """One table. fields: values by the driver's field name, without fields that have no value."""

    version: str
    fields: Mapping[str, tuple[int, ...]]


class _Field(msgspec.Struct, frozen=True):
    offset: int
    kind: str  # format character of `struct`
    count: int = 1


_V1_1 = {
    "temperature_hotspot": _Field(6, "H"),
    "average_gfx_activity": _Field(16, "H"),
    "average_umc_activity": _Field(18, "H"),
    "average_socket_power": _Field(22, "H"),
    "current_gfxclk": _Field(54, "H"),
    "current_uclk": _Field(58, "H"),
}
_V1_2 = _V1_1 | {"firmware_timestamp": _Field(96, "Q")}
_V1_3 = _V1_2 | {"indep_throttle_status": _Field(112, "Q")}


def _instinct(energy: int, xgmi: int, firmware: int) -> dict[str, _Field]:
    """Fields of 1.4 and later, whose parts are the same at other offsets. xgmi: of the bytes read; firmware: of its
    timestamp.
    """
    return {
        "temperature_hotspot": _Field(4, "H"),
        "curr_socket_power": _Field(10, "H"),
        "average_gfx_activity": _Field(12, "H"),
        "average_umc_activity": _Field(14, "H"),
        "energy_accumulator": _Field(energy, "Q"),
        "xgmi_read_data_acc": _Field(xgmi, "Q", XGMI_LINKS),
        "xgmi_write_data_acc": _Field(xgmi + 64, "Q", XGMI_LINKS),
        "firmware_timestamp": _Field(firmware, "Q"),
        "current_gfxclk": _Field(firmware + 8, "H", GFX_CLOCKS),
        "current_uclk": _Field(firmware + 48, "H"),
    }


_RESIDENCIES = (
    "accumulation_counter", "prochot_residency_acc", "ppt_residency_acc", "socket_thm_residency_acc",
    "vr_thm_residency_acc", "hbm_thm_residency_acc",
)  # fmt: skip


def _residencies(offset: int) -> dict[str, _Field]:
    return {name: _Field(offset + 4 * place, "I") for place, name in enumerate(_RESIDENCIES)}


_V1_7 = _instinct(24, 136, 288) | _residencies(40)
# Size and fields by version.
LAYOUTS: Mapping[tuple[int, int], tuple[int, Mapping[str, _Field]]] = {
    (1, 1): (96, _V1_1),
    (1, 2): (104, _V1_2),
    (1, 3): (120, _V1_3),
    (1, 4): (288, _instinct(24, 104, 232)),
    (1, 5): (360, _instinct(88, 176, 304)),
    (1, 6): (1664, _instinct(16, 128, 256) | _residencies(32)),
    (1, 7): (2208, _V1_7),
    (1, 8): (3872, _V1_7),
}
SELF_DESCRIBING = (1, 9)
_HEADER = struct.Struct("<HBB")
_ATTRIBUTES_AT = 8
_TYPES = "BbHhIiQq"  # amdgpu_metrics_attr_type
# amdgpu_metrics_attr_id
ATTRIBUTES: Mapping[int, str] = {
    0: "temperature_hotspot",
    3: "curr_socket_power",
    4: "average_gfx_activity",
    5: "average_umc_activity",
    7: "energy_accumulator",
    9: "accumulation_counter",
    10: "prochot_residency_acc",
    11: "ppt_residency_acc",
    12: "socket_thm_residency_acc",
    13: "vr_thm_residency_acc",
    14: "hbm_thm_residency_acc",
    29: "xgmi_read_data_acc",
    30: "xgmi_write_data_acc",
    32: "firmware_timestamp",
    33: "current_gfxclk",
    37: "current_uclk",
}


def read_table(data: bytes) -> MetricsTable:
    """Decodes a table. Raises UnknownTableError."""
    if len(data) < _HEADER.size:
        raise UnknownTableError(f"it has only {len(data)} bytes, too few for a version")
    size, *version = _HEADER.unpack_from(data)
    key = (version[0], version[1])
    name = f"{key[0]}.{key[1]}"
    if size != len(data):
        raise UnknownTableError(f"the header of version {name} states {size} bytes, but {len(data)} were read")
    if key == SELF_DESCRIBING:
        return MetricsTable(version=name, fields=_described(data))
    layout = LAYOUTS.get(key)
    if layout is None:
        apu = "; such tables come from processors with integrated graphics" if key[0] > 1 else ""
        raise UnknownTableError(f"version {name} is not supported{apu}")
    if size != layout[0]:
        raise UnknownTableError(f"version {name} has {size} bytes, but its known layout has {layout[0]}")
    fields = {}
    for field, place in layout[1].items():
        if values := _values(data, place.offset, place.kind, place.count):
            fields[field] = values
    return MetricsTable(version=name, fields=fields)


def _described(data: bytes) -> dict[str, tuple[int, ...]]:
    """Decodes a table that describes itself. Raises UnknownTableError."""
    fields: dict[str, tuple[int, ...]] = {}
    try:
        (count,) = struct.unpack_from("<i", data, 4)
        at = _ATTRIBUTES_AT
        for _ in range(count):
            (encoding,) = struct.unpack_from("<Q", data, at)
            kind, number, length = _TYPES[encoding >> 20 & 0xF], encoding >> 10 & 0x3FF, encoding & 0x3FF
            at += 8
            values = _values(data, at, kind, length)
            at += struct.calcsize(f"<{length}{kind}")
            if values and number in ATTRIBUTES:
                fields[ATTRIBUTES[number]] = values
    except (struct.error, IndexError) as exc:
        raise UnknownTableError(f"the self-description of version 1.9 is invalid: {exc}") from exc
    return fields


def _values(data: bytes, offset: int, kind: str, count: int) -> tuple[int, ...]:
    """Returns the values that are set. Raises struct.error."""
    found = struct.unpack_from(f"<{count}{kind}", data, offset)
    none = (1 << 8 * struct.calcsize(kind)) - 1 if kind.isupper() else -1
    return tuple(value for value in found if value != none)


# Metrics computed from gpu_metrics, their sets, and values from two readings. Pure.
#
# A sample's value is either that of the second reading, or the difference of both divided by the time between them:
# - percentages, clocks, temperature: as the GPU's firmware states them, an average over a time of its own, some
#   milliseconds at most, which ends with the reading
# - power, xGMI: from sums that only grow, so exact means of the sample
# - throttling: the share of the firmware's cycles in the sample in which it held the clock back
# The time between readings is the firmware's where the table has it. Fields whose unit is not the same in all kernels
# (`pcie_bandwidth_inst`) or is not certain (`gfx_activity_acc`) are not used.
class TableReading(msgspec.Struct, frozen=True, kw_only=True):
    """A table and the monotonic time of its reading, in ns."""

    table: MetricsTable
    time_ns: int


class AmdMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric. needs: fields that a table must have; value: computes it from two readings, NaN if there is none."""

    metric: CounterMetric
    needs: tuple[str, ...]
    value: Callable[[TableReading, TableReading], float]


def passed_s(before: TableReading, after: TableReading) -> float:
    """Seconds between two readings, by the firmware's clock if the table has it."""
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
# On Instinct GPUs from MI300 on it is memory bandwidth utilisation, on others the activity of the memory controller.
_DRAM = _metric("average_umc_activity", "DRAM", "%", _now("average_umc_activity", most=100.0), "curr_socket_power")
_UMC = _metric(
    "average_umc_activity", "Memory controller busy", "%", _now("average_umc_activity", most=100.0),
    "average_umc_activity", "average_socket_power",
)  # fmt: skip
_POWER = _metric("energy_accumulator", "Power, mean", "W", _rate("energy_accumulator", _ENERGY_JOULES))
_CLOCK = _metric("current_gfxclk", "GPC clock", "Hz", _now("current_gfxclk", _MEGA))
# Not in any set, since a trace with counters gets these from other files of the driver.
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

# The names are those of metric_sets.SETS. If several metrics have the same label, the first available one counts.
SETS: Mapping[str, Sequence[AmdMetric]] = {
    "overview": (_GPU, _DRAM, _UMC, _POWER, _CLOCK, *_THROTTLING),
    "memory": (_DRAM, _UMC, _GPU, _CLOCK),
    "tensor": (),
    "interconnect": (*_XGMI, _GPU, _DRAM, _UMC),
}
ALL = (*(each for metrics in SETS.values() for each in metrics), *_BY_NAME)
NO_TENSOR = "the driver's gpu_metrics table does not cover matrix units or instructions"


def known_metrics(table: MetricsTable) -> dict[str, AmdMetric]:
    """The metrics that a table has, by name, in the order of the sets."""
    return {each.metric.name: each for each in ALL if all(field in table.fields for field in each.needs)}


def of_set(table: MetricsTable, name: str) -> tuple[list[AmdMetric], list[LeftOutMetric]]:
    """Returns the available metrics of a set, and the missing ones whose label no available metric has."""
    found: dict[str, AmdMetric] = {}
    missing: dict[str, str] = {}  # names by label
    for each in SETS[name]:
        label = each.metric.label
        if all(field in table.fields for field in each.needs):
            found.setdefault(label, each)
        else:
            missing.setdefault(label, each.metric.name)
    names = {each.metric.name for each in found.values()}
    why = f"this GPU's gpu_metrics table (version {table.version}) does not have it"
    left_out = [
        LeftOutMetric(name=metric, why=why)
        for label, metric in missing.items()
        if label not in found and metric not in names
    ]
    return list(found.values()), left_out


class AmdgpuSampling:
    """A GPU that is being read."""

    def __init__(
        self, folder: Path, plan: CounterPlan, metrics: Sequence[AmdMetric], interval_ns: int, ring: RingWriter
    ) -> None:
        self.plan = plan
        self._folder = folder
        self._metrics = metrics
        self._interval_ns = interval_ns
        self._ring = ring
        self._before: tuple[TableReading, int] | None = None  # the latest reading, and its Unix time
        self._latest_ns = 0  # time up to which samples or losses are reported

    def run(self) -> None:
        """Reads until the end."""
        begun = good = due = time.monotonic_ns()
        while True:
            due = max(due + self._interval_ns, time.monotonic_ns())
            if self._ring.wait((due - time.monotonic_ns()) / 1e9):
                return self._ring.end(STOPPED)
            if time.monotonic_ns() - begun >= self._ring.most_ns:
                return self._ring.end(TOO_LONG)
            try:
                self._sample()
                good = time.monotonic_ns()
            except (OSError, UnknownTableError) as exc:
                self._before = None
                gone = isinstance(exc, OSError) and exc.errno in _GONE
                if gone or isinstance(exc, UnknownTableError) or time.monotonic_ns() - good > GIVE_UP_S * 1e9:
                    return self._ring.end(ERROR, _failure(exc))

    def _sample(self) -> None:
        """Raises OSError, UnknownTableError."""
        if is_asleep(self._folder):
            self._before = None
            return
        table, now_ns = gpu_table(self._folder), time.time_ns()
        after = TableReading(table=table, time_ns=time.monotonic_ns())
        before, self._before = self._before, (after, now_ns)
        if before is None:
            self._note_lost(now_ns)
            return
        reading, start_ns = before
        if (stamp := table.fields.get("firmware_timestamp")) and stamp == reading.table.fields.get(
            "firmware_timestamp"
        ):
            self._before = before
            return
        if after.time_ns - reading.time_ns > LATE * self._interval_ns or now_ns <= start_ns:
            self._note_lost(now_ns)
            return
        values = [metric.value(reading, after) for metric in self._metrics]
        self._ring.put(start_ns, now_ns, np.array(values, dtype=np.float32))
        self._latest_ns = now_ns

    def _note_lost(self, now_ns: int) -> None:
        if self._latest_ns and now_ns > self._latest_ns:
            self._ring.note_gap(now_ns - self._latest_ns)
        self._latest_ns = now_ns

    def close(self) -> None:
        """Does nothing: no resource is held."""


class AmdgpuBackend:
    """Implements interface.CounterBackend. sys, proc: where /sys and /proc are."""

    name = "amdgpu"
    serves_once = False

    def __init__(self, *, sys: Path = SYS, proc: Path = PROC) -> None:
        self._sys = sys
        self._proc = proc
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self.library_version = ""

    def open(self) -> None:
        """Finds the version of the driver, or of the kernel that it is part of."""
        self.library_version = first_line(self._sys / _MODULE_VERSION) or first_line(
            self._proc / "sys/kernel/osrelease"
        )

    def devices(self) -> list[CounterDevice]:
        """Every AMD GPU that the driver lists."""
        drivers = {gpu.pci_bus_id: gpu for gpu in drm_gpus(self._sys, self._proc)}
        known = [gpu for gpu in kernel_gpus(AMD, self._sys, self._proc) if gpu.pci_bus_id in drivers]
        if not known:
            raise CounterError(CounterCode.UNAVAILABLE, "no AMD GPU on this host uses the amdgpu driver")
        with self._lock:
            self._folders = {gpu.uuid: drivers[gpu.pci_bus_id].folder for gpu in known}
        return [self._described(gpu, drivers[gpu.pci_bus_id]) for gpu in known]

    def _described(self, gpu: CounterDevice, driver: DrmGpu) -> CounterDevice:
        code = problem = ""
        try:
            checked_table(driver.folder)
        except CounterError as exc:
            code, problem = exc.code, exc.reason
        chip = _chip(driver.render, self._sys)
        return msgspec.structs.replace(gpu, chip=chip, code=code, problem=problem, least_interval_ns=LEAST_NS)

    def _folder(self, uuid: str) -> Path:
        if uuid not in self._folders:
            self.devices()
        if (folder := self._folders.get(uuid)) is None:
            reason = f"there is no GPU {uuid}; `kinetoctl counters list` lists those that can be measured"
            raise CounterError(CounterCode.UNAVAILABLE, reason)
        return folder

    def _table(self, uuid: str) -> MetricsTable:
        folder = self._folder(uuid)
        try:
            return checked_table(folder)
        except CounterError as exc:
            raise CounterError(exc.code, f"GPU {uuid}: {exc.reason}") from exc

    def base_metrics(self, uuid: str) -> list[str]:
        """The metrics that the table has."""
        return list(known_metrics(self._table(uuid)))

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """Everything wanted fits together, if the table has it."""
        return self._chosen(uuid, wanted)[0]

    def _chosen(self, uuid: str, wanted: WantedCounters) -> tuple[CounterPlan, list[AmdMetric]]:
        checked_wanted(wanted, tuple(SET_NAMES))
        table = self._table(uuid)
        if wanted.set_name:
            chosen, left_out = of_set(table, wanted.set_name)
            if not chosen:
                why = left_out[0].why if left_out else NO_TENSOR
                reason = f"GPU {uuid}: no metric of the set {wanted.set_name} is available: {why}"
                raise CounterError(CounterCode.INVALID_METRIC, reason)
            plan = CounterPlan(metrics=tuple(each.metric for each in chosen), left_out=tuple(left_out))
            return plan, chosen
        known = known_metrics(table)
        if missing := [name for name in wanted.metrics if name not in known]:
            everywhere = {each.metric.name for each in ALL}
            why = (
                f"this GPU's gpu_metrics table (version {table.version}) does not have {missing[0]!r}"
                if missing[0] in everywhere
                else f"there is no metric {missing[0]!r}"
            )
            reason = f"GPU {uuid}: {why}; `kinetoctl counters list --metrics` lists all metrics"
            raise CounterError(CounterCode.INVALID_METRIC, reason)
        chosen = [known[name] for name in wanted.metrics]
        return CounterPlan(metrics=tuple(each.metric for each in chosen)), chosen

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> AmdgpuSampling:
        """Starts the sampling."""
        if interval_ns < LEAST_NS:
            reason = (
                f"GPU {uuid}: an interval of {format_duration(interval_ns)} is too short: each reading of an "
                "AMD GPU occupies its firmware, which also controls its clocks; use at least "
                f"{format_duration(LEAST_NS)}"
            )
            raise CounterError(CounterCode.INVALID_METRIC, reason)
        plan, chosen = self._chosen(uuid, wanted)
        return AmdgpuSampling(self._folder(uuid), plan, chosen, interval_ns, make_ring(len(chosen)))


def is_asleep(folder: Path) -> bool:
    """Whether the GPU is suspended; asking does not wake it."""
    return first_line(folder / "power/runtime_status") in ("suspended", "suspending")


def gpu_table(folder: Path) -> MetricsTable:
    """Reads the table. Raises OSError, UnknownTableError."""
    descriptor = os.open(folder / _TABLE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_table(os.read(descriptor, MAX_BYTES))
    finally:
        os.close(descriptor)


def checked_table(folder: Path) -> MetricsTable:
    """The table of a GPU that can be measured. Raises CounterError."""
    if is_asleep(folder):
        reason = "the GPU is suspended, and reading its counters would wake it; first start a program that uses it"
        raise CounterError(CounterCode.UNAVAILABLE, reason)
    try:
        table = gpu_table(folder)
    except PermissionError as exc:
        if exc.errno == errno.EPERM:  # the driver's error for a GPU that is being reset
            raise CounterError(CounterCode.UNAVAILABLE, _unreadable(exc)) from exc
        reason = f"this user cannot read the driver's table {folder / _TABLE}"
        raise CounterError(CounterCode.NOT_PERMITTED, reason) from exc
    except FileNotFoundError as exc:
        reason = "the driver has no gpu_metrics table for this GPU: the GPU is too old, or virtual"
        raise CounterError(CounterCode.UNAVAILABLE, reason) from exc
    except OSError as exc:
        raise CounterError(CounterCode.UNAVAILABLE, _unreadable(exc)) from exc
    except UnknownTableError as exc:
        raise CounterError(CounterCode.UNAVAILABLE, f"the driver's gpu_metrics table cannot be read: {exc}") from exc
    if not known_metrics(table):
        raise CounterError(CounterCode.UNAVAILABLE, "the driver's gpu_metrics table for this GPU is empty")
    return table


def _unreadable(error: OSError) -> str:
    return f"the driver cannot read the GPU now ({error.strerror}): it may be resetting; see `dmesg`"


def _failure(error: Exception) -> Failure:
    number = error.errno or 0 if isinstance(error, OSError) else 0
    text = (error.strerror or "") if isinstance(error, OSError) else str(error)
    return Failure(kind=_SYSTEM, result=number, call=_TABLE.encode(), text=text.encode()[:400])


def _chip(render: str, sys: Path) -> str:
    """The chip's name, such as "gfx942", from ROCm's part of the driver; empty if that does not list the GPU."""
    for node in (sys / "class/kfd/kfd/topology/nodes").glob("*/properties"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = dict(line.split(maxsplit=1) for line in node.read_text().splitlines() if " " in line)
            if f"renderD{facts['drm_render_minor'].strip()}" == render:
                version = int(facts["gfx_target_version"])
                return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return ""
