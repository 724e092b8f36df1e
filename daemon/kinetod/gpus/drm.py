"""AMD's and Intel's GPUs through the kernel's drivers alone: files in /sys and /proc, no vendor library.

Theory of operation
    Identity and processes always come from here: the files exist whenever the driver is loaded, and no vendor software
    has to be installed. Memory, power, temperatures and clocks come from here if the driver has files for them: amdgpu
    has nearly all, i915 and xe some. A vendor's library, if installed, adds its values (reader_process.py joins both by
    PCI address).

    Cumulative values (engine times) become a ratio between two readings of this process; the first reading has none. On
    Intel, the GPU's utilisation is the sum of its clients' use, without clients that may not be read.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import GpuProcess, GpuState, LibraryError, LibraryState
from kinetod.processes.drm_gpus import PROC, RENDER_NODE, SYS, DrmGpu, drm_gpus

NAME = "drm"
_VENDOR_NAMES = {"amd": "AMD", "intel": "Intel"}
_MICRO = 1e-6  # hwmon's watts and joules
_MILLI = 1e-3  # its degrees
_MEGA = 1e6
_RAS_COUNT = re.compile(r"^(ue|ce)\s*:?\s*(\d+)", re.MULTILINE)
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LOCAL = re.compile(r"(vram|local)\d*")  # memory regions in the GPU; others are in the host's memory
_WORKING = frozenset(("rcs", "ccs", "render", "compute", "gfx"))  # engines that run kernels, in all drivers' names
_MAX_FDINFO_BYTES = 1 << 14
# Frequencies in MHz below the PCI device: xe's of its first tile, and i915's below the DRM device.
INTEL_CLOCKS = ("tile0/gt0/freq0/act_freq", "drm/card*/gt/gt0/rps_act_freq_mhz", "drm/card*/gt_act_freq_mhz")


class Sensors:
    """The hardware monitor of a PCI device; the driver's own has the lowest number."""

    def __init__(self, folder: Path) -> None:
        self._folder = next(iter(sorted(folder.glob("hwmon/hwmon*"))), folder / "none")

    def path(self, name: str) -> Path:
        """The path of the file with this name, which may not exist."""
        return self._folder / name

    def labelled_path(self, kind: str, label: str) -> Path | None:
        """The file of the sensor of this kind with this label; None if there is none."""
        for path in sorted(self._folder.glob(f"{kind}*_label")):
            if text(path) == label:
                return self.path(path.name.removesuffix("_label") + "_input")
        return None

    def number(self, name: str, factor: float) -> float | None:
        """The value of a file; None if it does not exist."""
        return scaled(self.path(name), factor)

    def labelled(self, kind: str, label: str, factor: float) -> float | None:
        """The value of the sensor of this kind with this label; None if there is none."""
        path = self.labelled_path(kind, label)
        return None if path is None else scaled(path, factor)


def first(values: Iterable[float | None]) -> float | None:
    """The first value that is not None."""
    return next((each for each in values if each is not None), None)


def whole(path: Path) -> int | None:
    """The integer in a file; None if there is none."""
    content = text(path)
    return int(content) if content.isdecimal() else None


def scaled(path: Path, factor: float) -> float | None:
    """The number in a file, times a factor; None if there is none."""
    with contextlib.suppress(ValueError):
        return float(text(path)) * factor
    return None


def text(path: Path) -> str:
    """The content of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


# Finds the processes on each AMD or Intel GPU from the kernel: memory and engine time of every open device file. Theory
# of operation Each open descriptor of a render node is a client of its driver, which shows in /proc/PID/fdinfo what the
# client has on the GPU (the kernel's Documentation/gpu/drm-usage-stats.rst): "drm-pdev" names the GPU, "drm- client-id"
# the client, which several descriptors and processes may share after a fork, "drm-resident-vram0" and the like its
# memory in the GPU, "drm-engine-…" (ns) or "drm-cycles-…" of "drm-total-cycles-…" how long its engines worked for it.
# ROCm's runtime works through /dev/kfd, whose driver has a folder for each process that opened it
# (/sys/class/kfd/kfd/proc/PID): "vram_<id>" is its memory on the GPU with that id, queues/*/gpuid the queues there.
# Runtimes open every GPU that they can see. So a process holds a GPU if it has memory, a queue or engine time there,
# not because it has the file open. A process that may not be read has none.
@dataclass(slots=True)
class GpuClient:
    """The use of a GPU by one client. busy: by engine, the time that it worked; of: the time that it could have worked.

    Both only grow and have the same unit. `of` is None where the driver counts ns of real time.
    """

    memory_bytes: int | None = None
    busy: dict[str, int] = field(default_factory=dict)
    of: dict[str, int] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)  # number of engines of that kind, if there are several

    @property
    def holds(self) -> bool:
        """Whether the client has anything on the GPU."""
        return bool(self.memory_bytes) or any(self.busy.values())


@dataclass(slots=True)
class DeviceUse:
    """The use of one GPU by one process. clients: by the driver's client number."""

    clients: dict[int, GpuClient] = field(default_factory=dict)
    kfd_bytes: int | None = None  # through ROCm; None: it does not use ROCm
    kfd_queues: int = 0

    @property
    def holds(self) -> bool:
        """Whether the process has anything on the GPU."""
        return bool(self.kfd_bytes or self.kfd_queues) or any(client.holds for client in self.clients.values())

    @property
    def memory_bytes(self) -> int | None:
        """Its memory in the GPU; None if no driver reports it. ROCm's memory is not always included in the clients'."""
        known = [each.memory_bytes for each in self.clients.values() if each.memory_bytes is not None]
        drm = sum(known) if known else None
        if self.kfd_bytes is None or drm is None:
            return drm if self.kfd_bytes is None else self.kfd_bytes
        return max(drm, self.kfd_bytes)


Uses = Mapping[str, Mapping[int, DeviceUse]]  # by the GPU's PCI address, then by pid


def read(gpus: tuple[DrmGpu, ...], proc: Path = PROC, sys: Path = SYS) -> Uses:
    """The current users of these GPUs, by PCI address and pid; only processes that hold something there."""
    found: dict[str, dict[int, DeviceUse]] = {gpu.pci_bus_id: {} for gpu in gpus}
    for pid in _pids(proc):
        for address, number, client in _clients(proc / str(pid)):
            if address in found:
                found[address].setdefault(pid, DeviceUse()).clients[number] = client
    for pid, address, memory, queues in _kfd(gpus, sys):
        use = found[address].setdefault(pid, DeviceUse())
        use.kfd_bytes, use.kfd_queues = memory, queues
    return {address: {pid: use for pid, use in uses.items() if use.holds} for address, uses in found.items()}


def _pids(proc: Path) -> list[int]:
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal())


def _clients(folder: Path) -> Iterator[tuple[str, int, GpuClient]]:
    """Yields the clients among a process's descriptors: GPU, client number, use."""
    try:
        with os.scandir(folder / "fd") as entries:
            descriptors = list(entries)
    except OSError:
        return
    for descriptor in descriptors:
        try:
            # Not Path.readlink: creating Paths for all descriptors of a host takes longer than reading them.
            if not os.readlink(descriptor.path).startswith(RENDER_NODE):  # noqa: PTH115
                continue
            with (folder / "fdinfo" / descriptor.name).open(encoding="utf-8", errors="replace") as file:
                values = _values(file.read(_MAX_FDINFO_BYTES))
        except OSError:
            continue
        number = values.get("drm-client-id", "")
        if "drm-pdev" in values and number.isdecimal():
            yield values["drm-pdev"], int(number), client_of(values)


def _values(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs if key.startswith("drm-")}


def client_of(values: Mapping[str, str]) -> GpuClient:
    """Interprets a client's values: the lines of its descriptor that begin with "drm-"."""
    client = GpuClient()
    resident, older = 0, 0
    known = False
    for key, value in values.items():
        words = value.split()
        if not words or not words[0].isdecimal():
            continue
        amount = int(words[0]) * _UNITS.get(words[1] if len(words) > 1 else "", 1)
        kind, _, name = key.removeprefix("drm-").partition("-")
        if kind in ("resident", "memory") and _LOCAL.fullmatch(name):
            known = True
            resident += amount if kind == "resident" else 0
            older += amount if kind == "memory" else 0
        elif kind == "engine" and name.startswith("capacity-"):
            client.capacity[name.removeprefix("capacity-")] = amount
        elif kind == "total" and name.startswith("cycles-"):
            client.of[name.removeprefix("cycles-")] = amount
        elif kind in ("engine", "cycles"):
            client.busy[name] = amount
    client.memory_bytes = max(resident, older) if known else None  # amdgpu reports the same value under both names
    return client


def busy_ratio(before: GpuClient, now: GpuClient, elapsed_ns: int) -> float:
    """The share of time, 0 to 1, in which the busiest kind of kernel-running engine worked for a client."""
    shares = [0.0]
    for name in _WORKING & now.busy.keys() & before.busy.keys():
        worked = now.busy[name] - before.busy[name]
        possible = now.of[name] - before.of.get(name, 0) if name in now.of else elapsed_ns
        possible *= max(now.capacity.get(name, 1), 1)
        if worked > 0 and possible > 0:
            shares.append(min(worked / possible, 1.0))
    return max(shares)


def _kfd(gpus: tuple[DrmGpu, ...], sys: Path) -> Iterator[tuple[int, str, int | None, int]]:
    """Yields the use by ROCm's processes: pid, GPU, bytes in it (None: not reported), queues."""
    processes = sys / "class/kfd/kfd/proc"
    ids = _kfd_ids(gpus, sys)
    for pid in [entry.name for entry in processes.glob("*") if entry.name.isdecimal()] if ids else ():
        queues = [text(path) for path in (processes / pid / "queues").glob("*/gpuid")]
        for number, address in ids.items():
            memory = text(processes / pid / f"vram_{number}")
            yield int(pid), address, int(memory) if memory.isdecimal() else None, queues.count(number)


def _kfd_ids(gpus: tuple[DrmGpu, ...], sys: Path) -> dict[str, str]:
    """Maps KFD's number of each GPU to its PCI address."""
    by_minor = {gpu.render.removeprefix("renderD"): gpu.pci_bus_id for gpu in gpus if gpu.vendor == "amd"}
    found = {}
    for node in (sys / "class/kfd/kfd/topology/nodes").glob("*") if by_minor else ():
        properties = dict(line.split(maxsplit=1) for line in text(node / "properties").splitlines() if " " in line)
        address, number = by_minor.get(properties.get("drm_render_minor", "")), text(node / "gpu_id")
        if address and number not in ("", "0"):  # 0: a CPU
            found[number] = address
    return found


class DrmGpus:
    """The kernel's drivers in the form of a vendor library."""

    name = NAME

    def __init__(self, proc: Path = PROC, sys: Path = SYS, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._proc = proc
        self._sys = sys
        self._clock_ns = clock_ns
        self._before: tuple[int, Uses] | None = None  # time and use at the last reading

    def open(self) -> str:
        """Returns the kernel's release, since its drivers have no version of their own. Raises LibraryError without a
        GPU.
        """
        gpus = drm_gpus(self._sys, self._proc)
        if not gpus:
            raise LibraryError(LibraryState.ABSENT, "no AMD or Intel GPU on this host has a driver")
        drivers = sorted({gpu.driver for gpu in gpus})
        return clean(f"{', '.join(drivers)} of Linux {text(self._proc / 'sys/kernel/osrelease')}", 128)

    def close(self) -> None:
        """Forgets the last reading."""
        self._before = None

    def read(self) -> list[GpuState]:
        """The current state of every GPU."""
        gpus = drm_gpus(self._sys, self._proc)
        now_ns, uses = self._clock_ns(), read(gpus, self._proc, self._sys)
        busy = self._busy(now_ns, uses)
        self._before = (now_ns, uses)
        return [self._state(gpu, uses, busy) for gpu in gpus]

    def read_processes(self) -> list[GpuState]:
        """Every GPU with its processes, without their use."""
        gpus = drm_gpus(self._sys, self._proc)
        uses = read(gpus, self._proc, self._sys)
        return [
            _identity(gpu, processes=tuple(GpuProcess(pid=pid) for pid in sorted(uses[gpu.pci_bus_id]))) for gpu in gpus
        ]

    def _busy(self, now_ns: int, uses: Uses) -> Mapping[str, Mapping[int, float]]:
        """How busy each process kept each GPU since the last reading; processes that are new since then are left out.

        A client shared by several processes counts for the first of them.
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
                    busy_ratio(known.pop(number), client, now_ns - before_ns)
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
