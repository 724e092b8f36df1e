"""Power, clocks, temperature and throttling of AMD's and Intel's GPUs, by the files of their kernel drivers.

amdgpu has files for all but the reasons for lower clocks; xe and i915 have those, and mostly no power but an energy
counter, whose growth is the power. Which files there are is looked up once. A GPU whose folder is gone has fallen off
the bus.
"""

from collections.abc import Sequence
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.power.interface import (
    BY_HARDWARE,
    BY_HEAT,
    BY_POWER,
    MEMORY_CLOCK,
    POWER,
    POWER_LIMIT,
    SM_CLOCK,
    TEMPERATURE,
    PowerMetric,
)
from kinetod.gpus.driver_files import INTEL_CLOCKS, Sensors, scaled, text
from kinetod.processes.drm_gpus import PROC, SYS, DrmGpu, drm_gpus

_MICRO = 1e-6  # hwmon's watts and joules
_MILLI = 1e-3  # its degrees
_MEGA = 1e6
# Below the PCI device: xe's of its first tile, and i915's below the DRM device.
_REASON_FOLDERS = ("tile0/gt0/freq0/throttle/reason_", "drm/card*/gt/gt0/throttle_reason_")
_REASONS = {
    BY_POWER: ("pl1", "pl2", "pl4"),
    BY_HEAT: ("thermal", "ratl", "vr_thermalert"),
    BY_HARDWARE: ("prochot", "vr_tdc"),
}


class DrmPower:
    """One GPU by its kernel driver. Raises CounterError if there is none at this PCI address."""

    def __init__(self, pci_bus_id: str, *, sys: Path = SYS, proc: Path = PROC) -> None:
        gpu = next((each for each in drm_gpus(sys, proc) if each.pci_bus_id == pci_bus_id), None)
        if gpu is None:
            raise CounterError(CounterCode.UNAVAILABLE, f"there is no GPU of AMD or Intel at {pci_bus_id}")
        self._gpu = gpu
        self.backend = gpu.driver
        self.library_version = clean(text(proc / "sys/kernel/osrelease"), 128)
        self.index = gpu.number
        self.chip = clean(text(gpu.folder / "product_name") or text(gpu.folder / "device"), 128)
        self._files = _amd_files(gpu) if gpu.vendor == "amd" else _intel_files(gpu)
        self._flags = _reason_files(gpu.folder) if gpu.vendor == "intel" else {}
        self.metrics = (
            *(metric for metric, _, _ in self._files),
            *(PowerMetric(name=paths[0].name, label=label, unit="") for label, paths in self._flags.items()),
        )
        if not self.metrics:
            reason = f"the GPU at {pci_bus_id}: {gpu.driver} has no files of its power, clocks or temperature"
            raise CounterError(CounterCode.UNAVAILABLE, reason)

    def read(self, whole: bool = True) -> Sequence[float | None]:  # none of them is costly
        """The metrics' values now. Raises CounterError if the GPU is gone."""
        values = [scaled(path, factor) for _, path, factor in self._files]
        values += [_flag(paths) for paths in self._flags.values()]
        if all(each is None for each in values) and not self._gpu.folder.exists():
            raise CounterError(CounterCode.FAILED, f"the GPU at {self._gpu.pci_bus_id} has fallen off the bus")
        return values


_File = tuple[PowerMetric, Path, float]


def _amd_files(gpu: DrmGpu) -> list[_File]:
    sensors = Sensors(gpu.folder)
    found = [
        _first(POWER, "W", _MICRO, [sensors.path(name) for name in ("power1_average", "power1_input")]),
        _first(POWER_LIMIT, "W", _MICRO, [sensors.path("power1_cap")]),
        _first(SM_CLOCK, "Hz", 1, [sensors.labelled_path("freq", "sclk")]),
        _first(MEMORY_CLOCK, "Hz", 1, [sensors.labelled_path("freq", "mclk")]),
        _first(TEMPERATURE, "°C", _MILLI, [sensors.labelled_path("temp", label) for label in ("junction", "edge")]),
    ]
    return [each for each in found if each is not None]


def _intel_files(gpu: DrmGpu) -> list[_File]:
    sensors = Sensors(gpu.folder)
    clocks = [path for pattern in INTEL_CLOCKS for path in sorted(gpu.folder.glob(pattern))]
    found = [
        _first(POWER, "W", _MICRO, [sensors.path("power1_input")])
        or _first(POWER, "W", _MICRO, [sensors.path("energy1_input")], counter=True),
        _first(POWER_LIMIT, "W", _MICRO, [sensors.path(name) for name in ("power1_max", "power1_cap")]),
        _first(SM_CLOCK, "Hz", _MEGA, clocks),
        _first(TEMPERATURE, "°C", _MILLI, [sensors.labelled_path("temp", "pkg"), sensors.path("temp1_input")]),
    ]
    return [each for each in found if each is not None]


def _first(
    label: str, unit: str, factor: float, paths: Sequence[Path | None], *, counter: bool = False
) -> _File | None:
    """The first of these files that has a number."""
    for path in paths:
        if path is not None and scaled(path, factor) is not None:
            return PowerMetric(name=path.name, label=label, unit=unit, counter=counter), path, factor
    return None


def _reason_files(folder: Path) -> dict[str, list[Path]]:
    found = {
        label: [
            path
            for pattern in _REASON_FOLDERS
            for name in names
            for path in sorted(folder.glob(pattern + name))
            if scaled(path, 1) is not None
        ]
        for label, names in _REASONS.items()
    }
    return {label: paths for label, paths in found.items() if paths}


def _flag(paths: Sequence[Path]) -> float | None:
    """1 if one of these files says so; None if none can be read."""
    values = [value for path in paths if (value := scaled(path, 1)) is not None]
    return float(any(values)) if values else None
