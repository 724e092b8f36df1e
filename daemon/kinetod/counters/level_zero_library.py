"""Level Zero's tools through ctypes: GPUs, groups of metrics, and streams of reports. Structures by their offsets.

Theory of operation
    The driver gives metrics only to processes that had ZET_ENABLE_METRICS=1 when zeInit was called, so it is set here,
    in kinetod-counters' own environment. A GPU of several tiles is one device (ZE_FLAT_DEVICE_HIERARCHY), as in Sysman,
    which the daemon uses to name GPUs. STRUCTURES has the sizes and offsets of the public headers.

    A stream's reports are raw: the driver converts each into one value for each metric of the group, in their order. If
    the hardware's buffer has overflowed, the call returns WARNING_DROPPED_DATA, and older drivers then do not report
    how much they wrote. So the buffer is zeroed before each read, and trailing zeros are ignored.

Errors
    Every function returns 0 or a code, which LevelZeroFailure carries. level_zero_backend.py says what the codes mean.
"""

import ctypes
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from kineto_trace.base.array_types import Structs

from kinetod.base.safe_text import clean
from kinetod.gpus.level_zero import LIBRARY, Structure
from kinetod.processes.drm_gpus import PROC

# Read when the loader and the driver are loaded.
ENVIRONMENT = {"ZET_ENABLE_METRICS": "1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
_HIDES_GPUS = "ZE_AFFINITY_MASK"
GPU_ONLY = 1
TYPE_GPU = 1
INTEL = 0x8086
TIME_BASED = 2
DROPPED_DATA = 0x70020001
UNSUPPORTED = 0x78000003
CONTEXT_DESC = 0xD
_MAX_HANDLES = 4096
_MAX_BYTES = 64 << 20
_CLOCK_TRIES = 10
_CLOCK_READ_NS = 20_000
_HZ_LEAST = 1_000_000  # a lower resolution is ns per tick: the driver does not know DEVICE_PROPERTIES_1_2

STRUCTURES = {
    "ze_device_properties_t": Structure(
        0x20006, 368, {"type": ("I", 16), "vendorId": ("I", 20), "deviceId": ("I", 24), "timerResolution": ("Q", 80),
                       "timestampValidBits": ("I", 88), "uuid": ("16s", 96), "name": ("256s", 112)},
    ),
    "ze_pci_ext_properties_t": Structure(
        0x10008, 48, {"address.domain": ("I", 16), "address.bus": ("I", 20), "address.device": ("I", 24),
                      "address.function": ("I", 28)},
    ),
    "zet_metric_group_properties_t": Structure(
        1, 544, {"name": ("256s", 16), "samplingType": ("I", 528), "domain": ("I", 532), "metricCount": ("I", 536)},
    ),
    "zet_metric_properties_t": Structure(
        2, 1056, {"name": ("256s", 16), "metricType": ("I", 788), "resultType": ("I", 792),
                  "resultUnits": ("256s", 796)},
    ),
    "zet_metric_streamer_desc_t": Structure(3, 24, {"notifyEveryNReports": ("I", 16), "samplingPeriod": ("I", 20)}),
    "zet_metric_global_timestamps_resolution_exp_t": Structure(
        9, 32, {"timerResolution": ("Q", 16), "timestampValidBits": ("Q", 24)},
    ),
    "zet_typed_value_t": Structure(0, 16, {"type": ("I", 0), "value": ("Q", 8)}),
}  # fmt: skip
VALUE = np.dtype([("type", "<u4"), ("reserved", "<u4"), ("bits", "<u8")])
STREAMS = frozenset(("anon_inode:[i915_perf]", "anon_inode:[xe_oa]"))  # of i915_perf.c and xe_oa.c in the kernel


class LevelZeroFailure(Exception):
    """A function failed. code: its result."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code:#x}")
        self.function = function
        self.code = code


class IntelGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One device. handle, context: of Level Zero."""

    handle: int
    context: int
    uuid: str  # the daemon's name, from Sysman
    name: str
    device_id: int
    pci_bus_id: str
    tiles: int
    hertz: float  # frequency of its timestamps
    wrap_ns: float  # when its timestamps wrap


class GroupMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a group. type: zet_metric_type_t; value_type: zet_value_type_t; unit: the driver's word."""

    name: str
    type: int
    value_type: int
    unit: str


class MetricGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics that are measured together. wrap_ns: when their timestamps wrap; 0: the driver does not say."""

    handle: int
    name: str
    domain: int
    metrics: tuple[GroupMetric, ...]
    wrap_ns: float = 0.0


class ClockReading(NamedTuple):
    """A GPU timestamp and the Unix time of the same moment, both in ns."""

    unix_ns: int
    gpu_ns: float


class ToolsLibrary:
    """The initialised loader. Raises OSError if it is missing, and LevelZeroFailure."""

    def __init__(self, library: str = "") -> None:
        os.environ.update(ENVIRONMENT)
        os.environ.pop(_HIDES_GPUS, None)
        self._library = ctypes.CDLL(library or LIBRARY)
        self.call("zeInit", ctypes.c_uint32(GPU_ONLY))
        self.version = ""  # of the first driver's interface, such as "1.9"
        self._contexts: dict[int, int] = {}

    def call(self, function: str, *arguments: Any, also: int = 0) -> int:
        """Calls a function. also: a code that is not treated as failure."""
        try:
            found = getattr(self._library, function)
        except AttributeError as exc:
            raise LevelZeroFailure(function, UNSUPPORTED) from exc
        found.restype = ctypes.c_uint32
        code = int(found(*arguments))
        if code not in (0, also):
            raise LevelZeroFailure(function, code)
        return code

    def gpus(self) -> list[IntelGpu]:
        """Every Intel GPU, in the order of the PCI bus."""
        found = []
        for driver in self._handles("zeDriverGet"):
            version = ctypes.c_uint32(0)
            self.call("zeDriverGetApiVersion", ctypes.c_void_p(driver), ctypes.byref(version))
            self.version = self.version or f"{version.value >> 16}.{version.value & 0xFFFF}"
            for device in self._handles("zeDeviceGet", driver):
                properties = self._read("zeDeviceGetProperties", device, "ze_device_properties_t")
                if properties["type"] == TYPE_GPU and properties["vendorId"] == INTEL:
                    found.append(self._gpu(driver, device, properties))
        return sorted(found, key=lambda gpu: (gpu.pci_bus_id, gpu.uuid))

    def _gpu(self, driver: int, device: int, properties: dict[str, Any]) -> IntelGpu:
        if driver not in self._contexts:
            made, how = ctypes.c_void_p(), _block(24, CONTEXT_DESC)
            self.call("zeContextCreate", ctypes.c_void_p(driver), how, ctypes.byref(made))
            self._contexts[driver] = int(made.value or 0)
        pci = self._read("zeDevicePciGetPropertiesExt", device, "ze_pci_ext_properties_t")
        resolution = properties["timerResolution"] or 1
        hertz = float(resolution) if resolution >= _HZ_LEAST else 1e9 / resolution
        return IntelGpu(
            handle=device,
            context=self._contexts[driver],
            uuid=properties["uuid"].hex(),
            name=_text(properties["name"]),
            device_id=properties["deviceId"],
            pci_bus_id=_address(pci),
            tiles=max(1, len(self._handles("zeDeviceGetSubDevices", device))),
            hertz=hertz,
            wrap_ns=_wrap_ns(min(properties["timestampValidBits"], 32), hertz),
        )

    def groups(self, gpu: IntelGpu) -> list[MetricGroup]:
        """The groups of metrics that can be streamed."""
        found = []
        for handle in self._handles("zetMetricGroupGet", gpu.handle):
            properties = self._read("zetMetricGroupGetProperties", handle, "zet_metric_group_properties_t")
            if properties["samplingType"] != TIME_BASED:
                continue
            metrics = tuple(map(self._metric, self._handles("zetMetricGet", handle)))
            found.append(
                MetricGroup(
                    handle=handle,
                    name=_text(properties["name"]),
                    domain=properties["domain"],
                    metrics=metrics,
                    wrap_ns=self._group_wrap_ns(handle),
                )
            )
        return found

    def _metric(self, handle: int) -> GroupMetric:
        properties = self._read("zetMetricGetProperties", handle, "zet_metric_properties_t")
        return GroupMetric(
            name=_text(properties["name"]),
            type=properties["metricType"],
            value_type=properties["resultType"],
            unit=_text(properties["resultUnits"]),
        )

    def _group_wrap_ns(self, group: int) -> float:
        layout = STRUCTURES["zet_metric_global_timestamps_resolution_exp_t"]
        clock, properties = _block(layout.size, layout.type), _block(544, 1)
        struct.pack_into("=Q", properties, 8, ctypes.addressof(clock))
        try:
            self.call("zetMetricGroupGetProperties", ctypes.c_void_p(group), properties)
        except LevelZeroFailure:  # drivers before 2023
            return 0.0
        told = _fields(clock, layout)
        return _wrap_ns(told["timestampValidBits"], told["timerResolution"])

    def clock(self, gpu: IntelGpu) -> ClockReading:
        """The GPU's timestamp now: the first reading that took hardly any time, otherwise the fastest of several."""
        host, ticks = ctypes.c_uint64(), ctypes.c_uint64()
        best, least_ns = ClockReading(0, 0.0), 0
        for attempt in range(_CLOCK_TRIES):
            before = time.time_ns()
            self.call(
                "zeDeviceGetGlobalTimestamps", ctypes.c_void_p(gpu.handle), ctypes.byref(host), ctypes.byref(ticks)
            )
            took_ns = time.time_ns() - before
            if attempt == 0 or 0 <= took_ns < least_ns:
                least_ns = took_ns
                best = ClockReading(before + took_ns // 2, ticks.value * 1e9 / gpu.hertz % gpu.wrap_ns)
            if 0 <= least_ns < _CLOCK_READ_NS:
                break
        return best

    def open(self, gpu: IntelGpu, group: MetricGroup, interval_ns: int, notify_every: int) -> "MetricStream":
        """Activates the group and starts streaming its reports."""
        handles = (ctypes.c_void_p * 1)(group.handle)
        context, device = ctypes.c_void_p(gpu.context), ctypes.c_void_p(gpu.handle)
        self.call("zetContextActivateMetricGroups", context, device, ctypes.c_uint32(1), handles)
        try:
            how, made = _block(24, 3), ctypes.c_void_p()
            struct.pack_into("=II", how, 16, notify_every, interval_ns)
            self.call(
                "zetMetricStreamerOpen", context, device, ctypes.c_void_p(group.handle), how, None, ctypes.byref(made)
            )
            (period,) = struct.unpack_from("=I", how.raw, 20)
            return MetricStream(self, gpu, group, int(made.value or 0), period or interval_ns, notify_every)
        except BaseException:
            self.deactivate(gpu)
            raise

    def deactivate(self, gpu: IntelGpu) -> None:
        """Releases the metric groups of a GPU."""
        self.call(
            "zetContextActivateMetricGroups",
            ctypes.c_void_p(gpu.context),
            ctypes.c_void_p(gpu.handle),
            ctypes.c_uint32(0),
            None,
        )

    def _handles(self, function: str, *of: int) -> list[int]:
        count, owner = ctypes.c_uint32(0), [ctypes.c_void_p(each) for each in of]
        self.call(function, *owner, ctypes.byref(count), None)
        found = (ctypes.c_void_p * min(count.value, _MAX_HANDLES))()
        count.value = len(found)
        if found:
            self.call(function, *owner, ctypes.byref(count), found)
        return [int(each) for each in found[: count.value] if each]

    def _read(self, function: str, handle: int, structure: str) -> dict[str, Any]:
        layout = STRUCTURES[structure]
        block = _block(layout.size, layout.type)
        self.call(function, ctypes.c_void_p(handle), block)
        return _fields(block, layout)


class MetricStream:
    """Reports of one GPU. period_ns: the hardware's interval, close to the requested one."""

    def __init__(
        self, tools: ToolsLibrary, gpu: IntelGpu, group: MetricGroup, handle: int, period_ns: int, reports: int
    ) -> None:
        self.period_ns = period_ns
        self._tools = tools
        self._gpu = gpu
        self._group = group
        self._handle = handle
        self._reports = reports
        try:
            self._report_bytes = self._bytes_of(1)
            size = min(max(self._bytes_of(reports), self._report_bytes), _MAX_BYTES)
        except BaseException:
            self.close()
            raise
        self._buffer = ctypes.create_string_buffer(size)

    def _bytes_of(self, reports: int) -> int:
        size = ctypes.c_size_t(0)
        self._tools.call(
            "zetMetricStreamerReadData",
            ctypes.c_void_p(self._handle),
            ctypes.c_uint32(reports),
            ctypes.byref(size),
            None,
        )
        return max(size.value, 1)

    def read(self) -> tuple[Structs, bool]:
        """Values (reports, metrics) as VALUE, and whether more may be there now."""
        size = ctypes.c_size_t(len(self._buffer))
        code = self._tools.call(
            "zetMetricStreamerReadData",
            ctypes.c_void_p(self._handle),
            ctypes.c_uint32(self._reports),
            ctypes.byref(size),
            self._buffer,
            also=DROPPED_DATA,
        )
        used = min(size.value, len(self._buffer))
        if code == DROPPED_DATA:
            written = len(self._buffer.raw[:used].rstrip(b"\0"))
            used = -(-written // self._report_bytes) * self._report_bytes
        more = used + self._report_bytes > len(self._buffer)
        try:
            return self._values(used), more
        finally:
            ctypes.memset(self._buffer, 0, used)

    def _values(self, used: int) -> Structs:
        width = len(self._group.metrics)
        if not used:
            return np.empty((0, width), dtype=VALUE)
        count = ctypes.c_uint32(0)
        arguments = (ctypes.c_void_p(self._group.handle), ctypes.c_uint32(0), ctypes.c_size_t(used), self._buffer)
        function = "zetMetricGroupCalculateMetricValues"
        self._tools.call(function, *arguments, ctypes.byref(count), None)
        values = np.zeros(count.value, dtype=VALUE)
        self._tools.call(function, *arguments, ctypes.byref(count), ctypes.c_void_p(values.ctypes.data))
        reports = min(count.value, len(values)) // width
        return values[: reports * width].reshape(reports, width)

    def close(self) -> None:
        """Ends the stream, which frees the counters. Raises LevelZeroFailure."""
        handle, self._handle = self._handle, 0
        if handle:
            self._tools.call("zetMetricStreamerClose", ctypes.c_void_p(handle))
            self._tools.deactivate(self._gpu)


def _address(pci: dict[str, Any]) -> str:
    domain, bus, device, function = (pci[f"address.{part}"] for part in ("domain", "bus", "device", "function"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def _wrap_ns(bits: int, hertz: float) -> float:
    return 2.0**bits * 1e9 / hertz if bits and hertz else 0.0


def _block(size: int, kind: int) -> Any:
    block = ctypes.create_string_buffer(size)
    struct.pack_into("=I", block, 0, kind)
    return block


def _fields(block: Any, layout: Structure) -> dict[str, Any]:
    return {name: struct.unpack_from(f"={code}", block.raw, at)[0] for name, (code, at) in layout.fields.items()}


def _text(raw: bytes) -> str:
    return clean(raw.partition(b"\0")[0].decode("utf-8", "replace"), 128)


# Finds who streams metrics of Intel's GPUs: a stream is an open file of a process, recognised by its name in /proc.
# Blocking. The name does not identify the GPU; other users' files are visible only with the right to trace them.
def stream_holder(proc: Path = PROC) -> str:
    """A name such as "unitrace (process 1234)"; empty if none is visible. This process's own streams do not count."""
    own = str(os.getpid())
    for folder in proc.glob("[0-9]*"):
        if folder.name != own and any(target in STREAMS for target in _open_files(folder)):
            return f"{_name(folder)} (process {folder.name})"
    return ""


def _open_files(folder: Path) -> Iterator[str]:
    try:
        files = list((folder / "fd").iterdir())
    except OSError:
        return
    for file in files:
        try:
            yield str(file.readlink())
        except OSError:
            continue


def _name(folder: Path) -> str:
    try:
        return clean((folder / "comm").read_text(errors="replace").strip(), 64) or "a process"
    except OSError:
        return "a process"
