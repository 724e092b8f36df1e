"""NVIDIA's GPUs through NVML (nvidia-ml-py), and the activity of one GPU's units by its performance monitoring (GPM).

Theory of operation
    From Hopper on, the GPU's counters always run. `nvmlGpmSampleGet` copies them, `nvmlGpmMetricsGet` computes the
    difference of two copies; two buffers alternate. They are not the counters that profilers reserve: DCGM, Nsight and
    CUPTI work at the same time, and processes on the GPU are not affected. DCGM takes its profiling fields 1001 to 1012
    from the same calls on these GPUs, by the same numbers of metrics (METRICS) and in the same units: percentages and
    MiB/s.

    `step` is called every second and for each reading. Missing values are tried again: a metric without a value has no
    total, and a failed call ends all totals, with the reason in `refusal`. After a failure, or if the set of metrics
    with values has changed, totals begin anew. An impossible value (not a number, negative, more than MOST_PERCENT)
    counts as missing.

    In MIG mode the counters are those of the GPU's instances: a value of the whole GPU would be wrong (DCGM#152: shares
    above 1), so there is none.

    The version words of the structures have no size in them, unlike NVML's others, and the driver reads only as many
    metrics as asked for; so the size of the binding's structure, which grew with the list of metrics, does not matter.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kineto_trace.base.install_advice import install_advice

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import SHARES, GpuActivity, GpuProcess, GpuState, LibraryError, LibraryState

_KIB = 1024
_ALL_LINKS = 0xFFFFFFFF  # NVML: the sum over all NVLinks
_MAX_EVENTS = 1000  # Xids taken per reading
T = TypeVar("T")

# NVML's numbers; with DCGM's fields in dcgmlib/src/dcgm_fields.cpp (DcgmFieldIdToNvmlGpmMetricId).
METRICS = {
    "graphics_active": 1,  # NVML_GPM_METRIC_GRAPHICS_UTIL, DCGM 1001
    "sm_active": 2,  # SM_UTIL, 1002
    "sm_occupancy": 3,  # SM_OCCUPANCY, 1003
    "tensor_active": 5,  # ANY_TENSOR_UTIL, 1004
    "dram_active": 10,  # DRAM_BW_UTIL, 1005
    "fp64_active": 11,  # FP64_UTIL, 1006
    "fp32_active": 12,  # FP32_UTIL, 1007
    "fp16_active": 13,  # FP16_UTIL, 1008
    "pcie_transmit": 20,  # PCIE_TX_PER_SEC, 1009
    "pcie_receive": 21,  # PCIE_RX_PER_SEC, 1010
    "nvlink_transmit": 61,  # NVLINK_TOTAL_TX_PER_SEC, 1011
    "nvlink_receive": 60,  # NVLINK_TOTAL_RX_PER_SEC, 1012
}
LEAST_S = 0.1  # between two samples: DCGM's shortest interval on these GPUs
MOST_PERCENT = 105.0  # counters are not all copied in the same cycle: slightly above 100 counts as 100
_MIB = 1 << 20
_MIG_ON = 1
OFF = "switched off by metrics.gpu_activity"
IN_MIG_MODE = "in MIG mode the counters belong to GPU instances, which kinetod does not measure"
NO_COUNTERS = "this GPU does not have the counters for it; NVIDIA GPUs since Hopper have them"
OLD_DRIVER = "the driver or nvidia-ml-py is too old for GPM"
NOT_ALLOWED = "the driver does not allow this user to read the counters"


class GpmCounter:
    """Totals of one GPU. Not thread-safe.

    nvml: pynvml, initialised. handle: of the GPU. `activity` is None while nothing is counted, for the reason in
    `refusal`.
    """

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._supported: bool | None = None  # None: not checked yet
        self._buffers: list[Any] = []  # the older sample first
        self._sampled_ns: int | None = None  # time of the later one; None: there is none to compare with
        self.activity: GpuActivity | None = None
        self.refusal = ""

    def step(self) -> None:
        """Takes a sample and adds the activity since the last one, unless that is too recent. Raises nothing."""
        if self._sampled_ns is not None and self._clock() - self._sampled_ns < LEAST_S * 1e9:
            return
        nvml = self._nvml
        try:
            if problem := self._unfit():
                self._refuse(problem)
                return
            self._sample()
        except nvml.NVMLError as exc:
            self._refuse(self._reason(exc))
        except AttributeError:  # missing in this pynvml
            self._refuse(OLD_DRIVER)

    def close(self) -> None:
        """Frees the buffers."""
        self._refuse("")
        for buffer in self._buffers:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(buffer)
        self._buffers = []

    def _unfit(self) -> str:
        """Why this GPU has no counters of its own at present. Raises NVMLError, AttributeError."""
        nvml = self._nvml
        if self._supported is None:
            self._supported = bool(nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
        if not self._supported:
            return NO_COUNTERS
        try:
            current, _pending = nvml.nvmlDeviceGetMigMode(self._handle)
        except nvml.NVMLError as exc:
            if exc.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                raise
            return ""
        return IN_MIG_MODE if current == _MIG_ON else ""

    def _sample(self) -> None:
        """Takes a sample. Raises NVMLError, AttributeError."""
        nvml = self._nvml
        while len(self._buffers) < 2:
            self._buffers.append(nvml.nvmlGpmSampleAlloc())
        older, newer = self._buffers
        nvml.nvmlGpmSampleGet(self._handle, older)
        self._buffers = [newer, older]
        before_ns, self._sampled_ns = self._sampled_ns, self._clock()
        if before_ns is None:
            self.activity, self.refusal = GpuActivity(since_ns=self._sampled_ns), ""
            return
        self._add(self._rates(), (self._sampled_ns - before_ns) / 1e9, before_ns)

    def _rates(self) -> dict[str, float]:
        """Shares and bytes per second between the two samples. Raises NVMLError, AttributeError."""
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(METRICS)
        asked.sample1, asked.sample2 = self._buffers
        for place, number in enumerate(METRICS.values()):
            asked.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(asked)
        found = {}
        for place, name in enumerate(METRICS):
            metric = asked.metrics[place]
            if metric.nvmlReturn == nvml.NVML_SUCCESS and (rate := _checked(name, metric.value)) is not None:
                found[name] = rate
        return found

    def _add(self, rates: dict[str, float], seconds: float, began_ns: int) -> None:
        known = self.activity
        if known is None or (known.seconds and known.totals.keys() != rates.keys()):
            known = GpuActivity(since_ns=began_ns)
        totals = {name: known.totals.get(name, 0.0) + rate * seconds for name, rate in rates.items()}
        self.activity = GpuActivity(since_ns=known.since_ns, seconds=known.seconds + seconds, totals=totals)

    def _refuse(self, reason: str) -> None:
        self.activity, self.refusal, self._sampled_ns = None, reason, None

    def _reason(self, exc: Any) -> str:
        nvml = self._nvml
        return {
            nvml.NVML_ERROR_NOT_SUPPORTED: NO_COUNTERS,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND: OLD_DRIVER,
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: OLD_DRIVER,
            nvml.NVML_ERROR_NO_PERMISSION: NOT_ALLOWED,
        }.get(exc.value, f"NVML: {clean(str(exc), 200)}")


def _checked(name: str, value: float) -> float | None:
    """A share or bytes per second; None if the value is impossible."""
    if not math.isfinite(value) or value < 0:
        return None
    if name not in SHARES:
        return value * _MIB
    return min(value, 100.0) / 100 if value <= MOST_PERCENT else None


class GpuLost(Exception):
    """The GPU no longer answers."""


class NvmlCalls:
    """NVML. module: pynvml; None: the installed one."""

    def __init__(self, module: Any = None) -> None:
        self.nvml: Any = module

    def open(self) -> None:
        """Loads libnvidia-ml.so.1. Raises LibraryError."""
        if self.nvml is None:
            try:
                import pynvml
            except ImportError as exc:
                advice = install_advice("nvidia-ml-py")
                raise LibraryError(LibraryState.ABSENT, f"nvidia-ml-py is not installed ({advice})") from exc
            self.nvml = pynvml
        nvml = self.nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as exc:
            missing = exc.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
            raise LibraryError(LibraryState.ABSENT if missing else LibraryState.FAILED, said(exc)) from exc

    def maybe(self, function: Callable[..., T], *args: Any) -> T | None:
        """The function's result; None if the GPU or the driver does not support it.

        Raises GpuLost, and LibraryError if the library must be opened anew.
        """
        nvml = self.nvml
        try:
            return function(*args)
        except nvml.NVMLError as exc:
            if exc.value in self.lost_codes():
                raise GpuLost(said(exc)) from exc
            if exc.value in (nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
                raise LibraryError(LibraryState.FAILED, said(exc)) from exc
            return None

    def lost_codes(self) -> tuple[int, ...]:
        """Result codes for a GPU that no longer answers."""
        nvml = self.nvml
        return nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_GPU_NOT_FOUND

    def scaled(self, factor: float, function: Callable[..., int], *args: Any) -> float | None:
        """The function's result times a factor; otherwise like `maybe`."""
        value = self.maybe(function, *args)
        return None if value is None else value * factor

    def field(self, handle: Any, field: int, scope: int = 0) -> int | None:
        """The value of an integer field; otherwise like `maybe`."""
        nvml = self.nvml
        values = self.maybe(nvml.nvmlDeviceGetFieldValues, handle, [(field, scope)])
        if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        member = {
            nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
            nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        }.get(values[0].valueType)
        return None if member is None else int(getattr(values[0].value, member))


def said(exc: Exception) -> str:
    """Formats an error of NVML for people."""
    return f"NVML: {clean(str(exc), 200)}"


def nvml_text(value: str | bytes) -> str:
    """Cleans a text of NVML."""
    return clean(value.decode("utf-8", "replace") if isinstance(value, bytes) else value, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    handle: Any
    index: int
    uuid: str
    name: str
    pci_bus_id: str
    device: str
    counter: GpmCounter | None = None  # None: the GPU is lost, or counting is off

    def state(self, **values: Any) -> GpuState:
        return GpuState(
            vendor="nvidia",
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            pci_bus_id=self.pci_bus_id,
            device=self.device,
            **values,
        )


class Nvml:
    """NVML. `module` is pynvml (default: the installed one); activity: whether to count the activity of the GPUs'
    units.
    """

    name = "nvml"

    def __init__(self, module: Any = None, *, activity: bool = True) -> None:
        self._calls = NvmlCalls(module)
        self._nvml: Any = module
        self._activity = activity
        self._devices: list[_Device] = []
        self._events: Any = None
        self._xids: dict[str, dict[int, int]] = {}  # UUID -> Xid -> count
        self._sampled_us: dict[str, int] = {}  # UUID -> time of the last utilisation sample read

    def open(self) -> str:
        """Loads libnvidia-ml.so.1; returns the driver's version. Raises LibraryError."""
        self._calls.open()
        nvml = self._nvml = self._calls.nvml
        try:
            self._devices = [self._device(index) for index in range(nvml.nvmlDeviceGetCount())]
            version = nvml_text(nvml.nvmlSystemGetDriverVersion())
        except (nvml.NVMLError, GpuLost) as exc:
            self.close()
            raise LibraryError(LibraryState.FAILED, said(exc)) from exc
        self._watch_xids()
        return version

    def _device(self, index: int) -> _Device:
        """Opens one GPU. Raises NVMLError, unless only this GPU is lost."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as exc:
            if exc.value not in self._calls.lost_codes():
                raise
            return _Device(handle=None, index=index, uuid="", name="", pci_bus_id="", device="")
        minor = self._calls.maybe(nvml.nvmlDeviceGetMinorNumber, handle)
        pci = self._calls.maybe(nvml.nvmlDeviceGetPciInfo, handle)
        return _Device(
            handle=handle,
            index=index,
            uuid=nvml_text(nvml.nvmlDeviceGetUUID(handle)),
            name=nvml_text(nvml.nvmlDeviceGetName(handle)),
            pci_bus_id=nvml_text(pci.busId) if pci is not None else "",
            device=f"nvidia{minor}" if minor is not None else "",
            counter=GpmCounter(nvml, handle) if self._activity else None,
        )

    def close(self) -> None:
        """Releases the devices."""
        nvml = self._nvml
        for device in self._devices:
            if device.counter is not None:
                device.counter.close()
        self._devices = []
        if self._events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._events)
            self._events = None
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()

    def sample(self) -> None:
        """Counts the activity of the GPUs' units since the last call. Raises nothing."""
        for device in self._devices:
            if device.counter is not None:
                device.counter.step()

    def read(self) -> list[GpuState]:
        """The current state of every GPU. Raises LibraryError."""
        self._take_xids()
        self.sample()
        return [self._state(device, self._values) for device in self._devices]

    def read_processes(self) -> list[GpuState]:
        """Every GPU with its processes, without their use. Raises LibraryError."""
        return [self._state(device, self._users) for device in self._devices]

    def _state(self, device: _Device, values: Callable[[_Device], dict[str, Any]]) -> GpuState:
        try:
            return device.state(**values(device))
        except GpuLost:
            return device.state(works=False, xid_errors=dict(self._xids.get(device.uuid, {})))

    def _users(self, device: _Device) -> dict[str, Any]:
        if device.handle is None:
            raise GpuLost
        return {"processes": tuple(GpuProcess(pid=pid) for pid in sorted(self._used_by(device)))}

    def _values(self, device: _Device) -> dict[str, Any]:
        """All values except the identity, by GpuState's field names. Raises GpuLost, LibraryError."""
        if device.handle is None:
            raise GpuLost
        nvml, handle, scaled = self._nvml, device.handle, self._calls.scaled
        memory = self._memory(handle)
        memory_celsius = self._calls.field(handle, nvml.NVML_FI_DEV_MEMORY_TEMP)
        busy = self._calls.maybe(nvml.nvmlDeviceGetUtilizationRates, handle)
        return {
            "memory_total_bytes": int(memory.total) if memory is not None else None,
            "memory_used_bytes": int(memory.used) if memory is not None else None,
            "utilization": busy.gpu / 100 if busy is not None else None,
            "memory_utilization": busy.memory / 100 if busy is not None else None,
            "power_watts": scaled(1e-3, nvml.nvmlDeviceGetPowerUsage, handle),
            "power_limit_watts": scaled(1e-3, nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
            "energy_joules": scaled(1e-3, nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
            "temperature_celsius": scaled(1, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "memory_temperature_celsius": memory_celsius or None,  # 0: no sensor
            "sm_clock_hertz": scaled(1e6, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory_clock_hertz": scaled(1e6, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            "xid_errors": dict(self._xids.get(device.uuid, {})),
            "processes": self._processes(device),
            "activity": device.counter.activity if device.counter is not None else None,
            "activity_note": device.counter.refusal if device.counter is not None else OFF,
            **self._traffic(handle),
            **self._ecc(handle),
        }

    def _traffic(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        sent = self._calls.field(handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
        received = self._calls.field(handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)
        pcie = nvml.nvmlDeviceGetPcieThroughput  # NVML counts for 20 ms in each of these calls
        return {
            "pcie_transmit_bytes_per_second": self._calls.scaled(_KIB, pcie, handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
            "pcie_receive_bytes_per_second": self._calls.scaled(_KIB, pcie, handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
            "nvlink_transmit_bytes": None if sent is None else sent * _KIB,
            "nvlink_receive_bytes": None if received is None else received * _KIB,
        }

    def _ecc(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        count, since = nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_VOLATILE_ECC
        return {
            "ecc_corrected": self._calls.maybe(count, handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, since),
            "ecc_uncorrected": self._calls.maybe(count, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, since),
        }

    def _memory(self, handle: Any) -> Any:
        """Used memory as nvidia-smi shows it: without the driver's own, except with drivers before 510."""
        read = self._nvml.nvmlDeviceGetMemoryInfo
        memory = self._calls.maybe(read, handle, self._nvml.nvmlMemory_v2)
        return memory if memory is not None else self._calls.maybe(read, handle)

    def _used_by(self, device: _Device) -> dict[int, int | None]:
        """Memory used by each process that holds a context."""
        nvml = self._nvml
        memory: dict[int, int | None] = {}
        for function in (nvml.nvmlDeviceGetGraphicsRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses):
            for process in self._calls.maybe(function, device.handle) or ():
                memory[process.pid] = process.usedGpuMemory
        return memory

    def _processes(self, device: _Device) -> tuple[GpuProcess, ...]:
        memory = self._used_by(device)
        busy = self._busy(device) if memory else {}
        return tuple(
            GpuProcess(pid=pid, memory_bytes=used, utilization=busy.get(pid)) for pid, used in sorted(memory.items())
        )

    def _busy(self, device: _Device) -> dict[int, float]:
        """Share of the multiprocessors used by each process since the last reading; the driver keeps a few seconds."""
        since_us = self._sampled_us.get(device.uuid, 0)
        samples = self._calls.maybe(self._nvml.nvmlDeviceGetProcessUtilization, device.handle, since_us)
        latest: dict[int, tuple[int, float]] = {}
        for sample in samples or ():
            if sample.timeStamp >= latest.get(sample.pid, (0, 0.0))[0]:
                latest[sample.pid] = (sample.timeStamp, min(sample.smUtil, 100) / 100)
        if latest:
            self._sampled_us[device.uuid] = max(at for at, _ in latest.values())
        return {pid: ratio for pid, (_, ratio) in latest.items()}

    def _watch_xids(self) -> None:
        """Collects Xids, which are events; without support for events there are none."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            for device in (each for each in self._devices if each.handle is not None):
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(device.handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def _take_xids(self) -> None:
        nvml = self._nvml
        if self._events is None:
            return
        with contextlib.suppress(nvml.NVMLError):  # "timeout": no more events
            for _ in range(_MAX_EVENTS):
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                    counts = self._xids.setdefault(nvml_text(nvml.nvmlDeviceGetUUID(event.device)), {})
                    counts[int(event.eventData)] = counts.get(int(event.eventData), 0) + 1
