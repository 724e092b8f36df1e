"""NVIDIA's GPUs through NVML (nvidia-ml-py)."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kinetod.gpus.gpu_types import GpuProcess, GpuState, LibraryError, LibraryState
from kinetod.gpus.nvml_calls import GpuLost, NvmlCalls, said, text
from kinetod.gpus.nvml_gpm import OFF, GpmCounter

_KIB = 1024
_ALL_LINKS = 0xFFFFFFFF  # NVML: the sum over all NVLinks
_MAX_EVENTS = 1000  # Xids taken per reading


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
            version = text(nvml.nvmlSystemGetDriverVersion())
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
            uuid=text(nvml.nvmlDeviceGetUUID(handle)),
            name=text(nvml.nvmlDeviceGetName(handle)),
            pci_bus_id=text(pci.busId) if pci is not None else "",
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
                    counts = self._xids.setdefault(text(nvml.nvmlDeviceGetUUID(event.device)), {})
                    counts[int(event.eventData)] = counts.get(int(event.eventData), 0) + 1
