"""Which processes use which AMD or Intel GPU, by the kernel: memory and engine time of every open device file.

Theory of operation
    Each open descriptor of a render node is a client of its driver, which tells in /proc/PID/fdinfo what the client has
    on the GPU (the kernel's Documentation/gpu/drm-usage-stats.rst): "drm-pdev" names the GPU, "drm-client-id" the
    client, which several descriptors and processes may share after a fork, "drm-resident-vram0" and the like its memory
    in the GPU, "drm-engine-…" (ns) or "drm-cycles-…" of "drm-total-cycles-…" how long its engines worked for it.

    ROCm's runtime works through /dev/kfd, whose driver has a folder for each process that opened it
    (/sys/class/kfd/kfd/proc/PID): "vram_<id>" is its memory on the GPU with that id, queues/*/gpuid the queues there.

    Runtimes open every GPU that they can see. So a process holds a GPU if it has memory, a queue or engine time there,
    not because it has the file open. A process that may not be read has none.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kinetod.processes.drm_gpus import PROC, RENDER_NODE, SYS, DrmGpu

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LOCAL = re.compile(r"(vram|local)\d*")  # regions in the GPU; others lie in the host's memory
_WORKING = frozenset(("rcs", "ccs", "render", "compute", "gfx"))  # engines that run kernels, by all drivers' names
_MAX_FDINFO_BYTES = 1 << 14


@dataclass(slots=True)
class GpuClient:
    """What one client has on a GPU. busy: by engine, the time that it worked; of: how much that could have been.

    Both only grow, and have the same unit. `of` is None where the driver counts ns of real time.
    """

    memory_bytes: int | None = None
    busy: dict[str, int] = field(default_factory=dict)
    of: dict[str, int] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)  # number of engines of that kind, where there are several

    @property
    def holds(self) -> bool:
        """Whether it has anything on the GPU."""
        return bool(self.memory_bytes) or any(self.busy.values())


@dataclass(slots=True)
class DeviceUse:
    """What one process has on one GPU. clients: by the driver's number of the client."""

    clients: dict[int, GpuClient] = field(default_factory=dict)
    kfd_bytes: int | None = None  # through ROCm; None: it does not use that
    kfd_queues: int = 0

    @property
    def holds(self) -> bool:
        """Whether the process has anything on the GPU."""
        return bool(self.kfd_bytes or self.kfd_queues) or any(client.holds for client in self.clients.values())

    @property
    def memory_bytes(self) -> int | None:
        """Its memory in the GPU; None where no driver tells. ROCm's memory is not always among that of the clients."""
        known = [each.memory_bytes for each in self.clients.values() if each.memory_bytes is not None]
        drm = sum(known) if known else None
        if self.kfd_bytes is None or drm is None:
            return drm if self.kfd_bytes is None else self.kfd_bytes
        return max(drm, self.kfd_bytes)


Uses = Mapping[str, Mapping[int, DeviceUse]]  # by the GPU's PCI address, by pid


def read(gpus: tuple[DrmGpu, ...], proc: Path = PROC, sys: Path = SYS) -> Uses:
    """Who uses these GPUs now, by the GPU's PCI address and pid; only processes that hold something there."""
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
    """The clients among the descriptors of a process: GPU, number, what it has."""
    try:
        with os.scandir(folder / "fd") as entries:
            descriptors = list(entries)
    except OSError:
        return
    for descriptor in descriptors:
        try:
            # Not Path.readlink: making Paths for all descriptors of a host takes longer than reading them.
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
    """What a client's values mean: those of its descriptor that begin with "drm-"."""
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
    client.memory_bytes = max(resident, older) if known else None  # amdgpu tells the same by both names
    return client


def busy_ratio(before: GpuClient, now: GpuClient, elapsed_ns: int) -> float:
    """The share of time, 0 to 1, in which the busiest kind of engine that runs kernels worked for a client."""
    shares = [0.0]
    for name in _WORKING & now.busy.keys() & before.busy.keys():
        worked = now.busy[name] - before.busy[name]
        possible = now.of[name] - before.of.get(name, 0) if name in now.of else elapsed_ns
        possible *= max(now.capacity.get(name, 1), 1)
        if worked > 0 and possible > 0:
            shares.append(min(worked / possible, 1.0))
    return max(shares)


def _kfd(gpus: tuple[DrmGpu, ...], sys: Path) -> Iterator[tuple[int, str, int | None, int]]:
    """What ROCm's processes have: pid, GPU, bytes in it (None: the kernel does not tell), queues."""
    processes = sys / "class/kfd/kfd/proc"
    ids = _kfd_ids(gpus, sys)
    for pid in [entry.name for entry in processes.glob("*") if entry.name.isdecimal()] if ids else ():
        queues = [_text(path) for path in (processes / pid / "queues").glob("*/gpuid")]
        for number, address in ids.items():
            memory = _text(processes / pid / f"vram_{number}")
            yield int(pid), address, int(memory) if memory.isdecimal() else None, queues.count(number)


def _kfd_ids(gpus: tuple[DrmGpu, ...], sys: Path) -> dict[str, str]:
    """The PCI address of each GPU by the number that KFD gives to it."""
    by_minor = {gpu.render.removeprefix("renderD"): gpu.pci_bus_id for gpu in gpus if gpu.vendor == "amd"}
    found = {}
    for node in (sys / "class/kfd/kfd/topology/nodes").glob("*") if by_minor else ():
        properties = dict(line.split(maxsplit=1) for line in _text(node / "properties").splitlines() if " " in line)
        address, number = by_minor.get(properties.get("drm_render_minor", "")), _text(node / "gpu_id")
        if address and number not in ("", "0"):  # 0: a CPU
            found[number] = address
    return found


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
