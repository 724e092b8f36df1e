"""AMD's and Intel's GPUs by the kernel's drivers alone: files in /sys and /proc, no vendor's library.

Theory of operation
    Identity and processes always come from here: the files are there whenever the driver is, and nothing of a vendor
    has to be installed. Memory, power, temperatures and clocks come from here as far as the driver has files for them:
    amdgpu has for nearly all, i915 and xe for some. A vendor's library, where there is one, adds what it knows
    (reader_process.py joins both by the PCI address).

    What only grows (engine times) becomes a ratio between two readings of this process; the first has none. The GPU's
    own utilisation on Intel is the sum of what its clients used, which leaves out those that may not be read.
"""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kinetod.base.safe_text import clean
from kinetod.gpus import drm_clients
from kinetod.gpus.driver_files import INTEL_CLOCKS, Sensors, first, scaled, text, whole
from kinetod.gpus.drm_clients import GpuClient, Uses
from kinetod.gpus.gpu_types import GpuProcess, GpuState, LibraryError, LibraryState
from kinetod.processes.drm_gpus import PROC, SYS, DrmGpu, drm_gpus

NAME = "drm"
_VENDOR_NAMES = {"amd": "AMD", "intel": "Intel"}
_MICRO = 1e-6  # hwmon's watts and joules
_MILLI = 1e-3  # its degrees
_MEGA = 1e6
_RAS_COUNT = re.compile(r"^(ue|ce)\s*:?\s*(\d+)", re.MULTILINE)


class DrmGpus:
    """The kernel's drivers as one library."""

    name = NAME

    def __init__(self, proc: Path = PROC, sys: Path = SYS, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._proc = proc
        self._sys = sys
        self._clock_ns = clock_ns
        self._before: tuple[int, Uses] | None = None  # when, and what was used until then

    def open(self) -> str:
        """The kernel's release, since its drivers have no version of their own. Raises LibraryError without a GPU."""
        gpus = drm_gpus(self._sys, self._proc)
        if not gpus:
            raise LibraryError(LibraryState.ABSENT, "no GPU of AMD or Intel has a driver on this host")
        drivers = sorted({gpu.driver for gpu in gpus})
        return clean(f"{', '.join(drivers)} of Linux {text(self._proc / 'sys/kernel/osrelease')}", 128)

    def close(self) -> None:
        """Forgets the last reading."""
        self._before = None

    def read(self) -> list[GpuState]:
        """Every GPU now."""
        gpus = drm_gpus(self._sys, self._proc)
        now_ns, uses = self._clock_ns(), drm_clients.read(gpus, self._proc, self._sys)
        busy = self._busy(now_ns, uses)
        self._before = (now_ns, uses)
        return [self._state(gpu, uses, busy) for gpu in gpus]

    def read_processes(self) -> list[GpuState]:
        """Every GPU with its processes, without what they use."""
        gpus = drm_gpus(self._sys, self._proc)
        uses = drm_clients.read(gpus, self._proc, self._sys)
        return [
            _identity(gpu, processes=tuple(GpuProcess(pid=pid) for pid in sorted(uses[gpu.pci_bus_id]))) for gpu in gpus
        ]

    def _busy(self, now_ns: int, uses: Uses) -> Mapping[str, Mapping[int, float]]:
        """How busy each process kept each GPU since the last reading; processes that were not there then are left out.

        A client that several processes share counts for the first of them.
        """
        if self._before is None:
            return {}
        before_ns, before = self._before
        found: dict[str, dict[int, float]] = {}
        for address, processes in uses.items():
            known: dict[int, GpuClient] = {}
            for use in before.get(address, {}).values():
                known |= use.clients
            for pid in sorted(processes):
                shared = {number: each for number, each in processes[pid].clients.items() if number in known}
                ratios = [
                    drm_clients.busy_ratio(known.pop(number), client, now_ns - before_ns)
                    for number, client in shared.items()
                    if client.busy
                ]
                if ratios:
                    found.setdefault(address, {})[pid] = min(sum(ratios), 1.0)
        return found

    def _state(self, gpu: DrmGpu, uses: Uses, busy: Mapping[str, Mapping[int, float]]) -> GpuState:
        ratios = busy.get(gpu.pci_bus_id, {})
        processes = tuple(
            GpuProcess(pid=pid, memory_bytes=use.memory_bytes, utilization=ratios.get(pid))
            for pid, use in sorted(uses[gpu.pci_bus_id].items())
        )
        values = _amd_values(gpu.folder) if gpu.vendor == "amd" else _intel_values(gpu.folder)
        if gpu.vendor == "intel" and ratios:
            values["utilization"] = min(sum(ratios.values()), 1.0)
        return _identity(gpu, processes=processes, **values)


def _identity(gpu: DrmGpu, **values: Any) -> GpuState:
    named = text(gpu.folder / "product_name")
    unknown = f"{_VENDOR_NAMES[gpu.vendor]} GPU {text(gpu.folder / 'device').removeprefix('0x')}"
    serial = text(gpu.folder / "unique_id")
    return GpuState(
        vendor=gpu.vendor,
        index=gpu.number,
        uuid=clean(serial or gpu.pci_bus_id, 128),
        name=clean(named or unknown, 128),
        pci_bus_id=gpu.pci_bus_id,
        device=gpu.render,
        **values,
    )


def _amd_values(folder: Path) -> dict[str, Any]:
    sensors = Sensors(folder)
    corrected, uncorrected = _ras_counts(folder)
    return {
        "memory_total_bytes": whole(folder / "mem_info_vram_total"),
        "memory_used_bytes": whole(folder / "mem_info_vram_used"),
        "utilization": scaled(folder / "gpu_busy_percent", 0.01),
        "memory_utilization": scaled(folder / "mem_busy_percent", 0.01),
        "power_watts": first(sensors.number(name, _MICRO) for name in ("power1_average", "power1_input")),
        "power_limit_watts": sensors.number("power1_cap", _MICRO),
        "temperature_celsius": first(sensors.labelled("temp", label, _MILLI) for label in ("junction", "edge")),
        "memory_temperature_celsius": sensors.labelled("temp", "mem", _MILLI),
        "sm_clock_hertz": sensors.labelled("freq", "sclk", 1),
        "memory_clock_hertz": sensors.labelled("freq", "mclk", 1),
        "ecc_corrected": corrected,
        "ecc_uncorrected": uncorrected,
    }


def _intel_values(folder: Path) -> dict[str, Any]:
    sensors = Sensors(folder)
    clocks = (scaled(path, _MEGA) for pattern in INTEL_CLOCKS for path in sorted(folder.glob(pattern)))
    return {
        "power_watts": sensors.number("power1_input", _MICRO),
        "power_limit_watts": first(sensors.number(name, _MICRO) for name in ("power1_max", "power1_cap")),
        "energy_joules": sensors.number("energy1_input", _MICRO),
        "temperature_celsius": first([sensors.labelled("temp", "pkg", _MILLI), sensors.number("temp1_input", _MILLI)]),
        "memory_temperature_celsius": sensors.labelled("temp", "vram", _MILLI),
        "sm_clock_hertz": first(clocks),
    }


def _ras_counts(folder: Path) -> tuple[int | None, int | None]:
    """Corrected and uncorrected errors of the memory."""
    counts = dict(_RAS_COUNT.findall(text(folder / "ras/umc_err_count")))
    corrected, uncorrected = (int(counts[key]) if key in counts else None for key in ("ce", "ue"))
    return corrected, uncorrected
