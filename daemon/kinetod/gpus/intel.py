"""Intel's GPUs through Level Zero's Sysman: memory, utilisation, power, temperatures, clocks and PCIe traffic.

The processes on a GPU come from the kernel (drm.py): Sysman reads the same files and needs the same rights. Engines,
energy and traffic are counters of the driver, so utilisation, power and rates cover the time between two readings of
this process; the first reading has none. On a GPU with several tiles, the whole device's engine groups count if there
are any, otherwise the busiest tile's.
"""

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import GpuState, LibraryError, LibraryState
from kinetod.gpus.level_zero import LIBRARY, LOST, Sysman, SysmanError

INSTALL = "Intel's Level Zero loader (libze_loader.so.1, package libze1 or level-zero) is not installed"
NO_DRIVER = "Level Zero found no GPU: is Intel's driver library libze_intel_gpu.so.1 installed (intel-level-zero-gpu)?"
_INTEL = 0x8086
_ALL_ENGINES, _COMPUTE_ENGINES = (0,), (1, 11, 12)  # groups: all; compute; 3D, render and compute; render
_GPU_SENSORS, _MEMORY_SENSORS = (1, 0), (2,)  # temperature sensors: GPU, all; memory
_GPU_CLOCK, _MEMORY_CLOCK = 0, 1
_IN_DEVICE = 1  # location of a memory module: not in the host
_MHZ = 1e6
_MICRO = 1e-6
_MILLI = 1e-3


@dataclass(slots=True)
class _Device:
    """One GPU. Handles of its components are kept; before: counters of the last reading, by name."""

    handle: ctypes.c_void_p
    index: int
    uuid: str
    name: str
    pci_bus_id: str
    memories: list[ctypes.c_void_p]
    engines: list[tuple[int, bool, ctypes.c_void_p]]  # group, whether it belongs to a single tile
    power: ctypes.c_void_p | None
    temperatures: list[tuple[int, ctypes.c_void_p]]
    clocks: list[tuple[int, ctypes.c_void_p]]
    before: dict[str, tuple[float, float]] = field(default_factory=dict)

    def rate(self, name: str, amount: float, time_us: float) -> float | None:
        """Growth of a counter per us of its own time stamp, since the last reading."""
        then = self.before.get(name)
        self.before[name] = (amount, time_us)
        if then is None or time_us <= then[1] or amount < then[0]:
            return None
        return (amount - then[0]) / (time_us - then[1])


class IntelSysman:
    """Sysman. load: creates the library (default: the installed one)."""

    name = "sysman"

    def __init__(self, load: Callable[[], Sysman] = Sysman) -> None:
        self._load = load
        self._sysman: Any = None  # loaded once per process: it cannot be finalised
        self._devices: list[_Device] = []

    def open(self) -> str:
        """Loads libze_loader.so.1; returns the driver's version. Raises LibraryError."""
        try:
            if self._sysman is None:
                self._sysman = self._load()
            return self._find()
        except OSError as exc:
            missing = LIBRARY in str(exc) and "No such file" in str(exc)
            state = LibraryState.ABSENT if missing else LibraryState.FAILED
            raise LibraryError(state, INSTALL if missing else f"Level Zero: {clean(str(exc), 200)}") from exc
        except SysmanError as exc:
            raise LibraryError(LibraryState.ABSENT, f"{NO_DRIVER} ({exc})") from exc

    def _find(self) -> str:
        """Finds the devices; returns the driver's version. Raises SysmanError, LibraryError."""
        self._devices, version = [], ""
        for handle in self._sysman.devices():
            properties = self._sysman.read("zesDeviceGetProperties", handle, "zes_device_properties_t")
            if properties["core.vendorId"] == _INTEL:
                self._devices.append(self._device(handle, properties))
                version = version or _text(properties["driverVersion"])
        if not self._devices:
            raise LibraryError(LibraryState.ABSENT, NO_DRIVER)
        return "" if version.startswith("unk") else version  # "unknown", which the header spells "unkown"

    def _device(self, handle: ctypes.c_void_p, properties: dict[str, Any]) -> _Device:
        sysman = self._sysman
        pci = sysman.maybe("zesDevicePciGetProperties", handle, "zes_pci_properties_t")
        power = ctypes.c_void_p()
        with contextlib.suppress(SysmanError):
            sysman.call("zesDeviceGetCardPowerDomain", handle, ctypes.byref(power))
        if not power.value:
            domains = sysman.handles("zesDeviceEnumPowerDomains", handle)
            whole = [each for each in domains if not self._told(each, "Power", "power").get("onSubdevice")]
            power = (whole or [ctypes.c_void_p()])[0]
        return _Device(
            handle=handle,
            index=len(self._devices),
            uuid=properties["core.uuid"].hex(),
            name=_text(properties["core.name"]),
            pci_bus_id=_address(pci),
            memories=[
                each
                for each in sysman.handles("zesDeviceEnumMemoryModules", handle)
                if self._told(each, "Memory", "mem").get("location") == _IN_DEVICE
            ],
            engines=[
                (told["type"], bool(told["onSubdevice"]), each)
                for each in sysman.handles("zesDeviceEnumEngineGroups", handle)
                if (told := self._told(each, "Engine", "engine"))
            ],
            power=power if power.value else None,
            temperatures=self._typed("zesDeviceEnumTemperatureSensors", handle, "Temperature", "temp"),
            clocks=self._typed("zesDeviceEnumFrequencyDomains", handle, "Frequency", "freq"),
        )

    def _typed(
        self, enumerate_by: str, device: ctypes.c_void_p, component: str, short: str
    ) -> list[tuple[int, ctypes.c_void_p]]:
        handles = self._sysman.handles(enumerate_by, device)
        told = [(self._told(each, component, short), each) for each in handles]
        return [(int(properties["type"]), each) for properties, each in told if properties]

    def _told(self, handle: ctypes.c_void_p, component: str, short: str) -> dict[str, Any]:
        found: dict[str, Any] = self._sysman.maybe(f"zes{component}GetProperties", handle, f"zes_{short}_properties_t")
        return found

    def close(self) -> None:
        """Forgets the devices; the library cannot be unloaded."""
        self._devices = []

    def read(self) -> list[GpuState]:
        """The current state of every GPU. Raises LibraryError."""
        return [self._state(device) for device in self._devices]

    def read_processes(self) -> list[GpuState]:
        """Identity of each GPU, as the counter backends key it; its processes come from fdinfo."""
        return [GpuState(**_identity(device)) for device in self._devices]

    def _state(self, device: _Device) -> GpuState:
        identity = _identity(device)
        try:
            return GpuState(**identity, **self._values(device))
        except SysmanError as exc:
            if exc.code in LOST:
                return GpuState(**identity, works=False)
            raise LibraryError(LibraryState.FAILED, f"Sysman: {exc}") from exc

    def _values(self, device: _Device) -> dict[str, Any]:
        total, used = self._memory(device)
        return {
            "memory_total_bytes": total,
            "memory_used_bytes": used,
            "utilization": self._utilization(device),
            **self._power(device),
            "temperature_celsius": self._temperature(device, _GPU_SENSORS),
            "memory_temperature_celsius": self._temperature(device, _MEMORY_SENSORS),
            "sm_clock_hertz": self._clock(device, _GPU_CLOCK),
            "memory_clock_hertz": self._clock(device, _MEMORY_CLOCK),
            **self._traffic(device),
        }

    def _memory(self, device: _Device) -> tuple[int | None, int | None]:
        states = [self._sysman.maybe("zesMemoryGetState", each, "zes_mem_state_t") for each in device.memories]
        states = [each for each in states if each]
        if not states:
            return None, None
        total = sum(each["size"] for each in states)
        return total, max(total - sum(each["free"] for each in states), 0)

    def _utilization(self, device: _Device) -> float | None:
        """Utilisation of the group of compute engines; else of all engines; else of the busiest engine."""
        shares: dict[int, float] = {}
        for place, (_, _, handle) in enumerate(device.engines):
            stats = self._sysman.maybe("zesEngineGetActivity", handle, "zes_engine_stats_t")
            ratio = device.rate(f"engine{place}", stats["activeTime"], stats["timestamp"]) if stats else None
            if ratio is not None:
                shares[place] = min(ratio, 1.0)
        for groups in (_COMPUTE_ENGINES, _ALL_ENGINES):
            for tile in (False, True):
                found = [
                    shares[place]
                    for place, (group, on_tile, _) in enumerate(device.engines)
                    if place in shares and group in groups and on_tile is tile
                ]
                if found:
                    return max(found)
        return max(shares.values(), default=None)

    def _power(self, device: _Device) -> dict[str, Any]:
        if device.power is None:
            return {}
        energy = self._sysman.maybe("zesPowerGetEnergyCounter", device.power, "zes_power_energy_counter_t")
        limit = self._limit_watts(device.power)
        if not energy:
            return {"power_limit_watts": limit}
        return {
            "power_watts": device.rate("energy", energy["energy"], energy["timestamp"]),  # uJ per us
            "power_limit_watts": limit,
            "energy_joules": energy["energy"] * _MICRO,
        }

    def _limit_watts(self, power: ctypes.c_void_p) -> float | None:
        limit = self._sysman.maybe("zesPowerGetLimits", power, "zes_power_sustained_limit_t", None, None)
        return limit["power"] * _MILLI if limit and limit["enabled"] and limit["power"] > 0 else None

    def _temperature(self, device: _Device, wanted: tuple[int, ...]) -> float | None:
        for kind in wanted:
            for sensor, handle in device.temperatures:
                if sensor == kind:
                    value = ctypes.c_double()
                    with contextlib.suppress(SysmanError):
                        self._sysman.call("zesTemperatureGetState", handle, ctypes.byref(value))
                        return value.value
        return None

    def _clock(self, device: _Device, wanted: int) -> float | None:
        for domain, handle in device.clocks:
            if domain == wanted:
                state = self._sysman.maybe("zesFrequencyGetState", handle, "zes_freq_state_t")
                if state and state["actual"] >= 0:
                    return float(state["actual"]) * _MHZ
        return None

    def _traffic(self, device: _Device) -> dict[str, Any]:
        stats = self._sysman.maybe("zesDevicePciGetStats", device.handle, "zes_pci_stats_t")
        if not stats or not (stats["rxCounter"] or stats["txCounter"]):  # always 0 if there are no counters
            return {}
        found = {}
        for name, word in (("tx", "transmit"), ("rx", "receive")):
            rate = device.rate(name, stats[f"{name}Counter"], stats["timestamp"])
            found[f"pcie_{word}_bytes_per_second"] = None if rate is None else rate / _MICRO
        return found


def _identity(device: _Device) -> dict[str, Any]:
    return {
        "vendor": "intel",
        "index": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "pci_bus_id": device.pci_bus_id,
    }


def _address(pci: dict[str, Any]) -> str:
    if not pci:
        return ""
    domain, bus, device, function = (pci[f"address.{name}"] for name in ("domain", "bus", "device", "function"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def _text(value: bytes) -> str:
    return clean(value.partition(b"\0")[0].decode("utf-8", "replace").strip(), 128)
