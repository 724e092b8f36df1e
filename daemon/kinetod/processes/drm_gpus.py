"""Lists AMD's and Intel's GPUs from the kernel's drivers, and numbers them. Needs no vendor library.

Theory of operation
    Each GPU has a render node, /dev/dri/renderD<N>, and a folder in /sys/class/drm with the same name, which links to
    the PCI device and its driver. The numbers that people and programs use (`--gpu`, `ps`, metrics) are positions among
    all GPUs of the host, so that none is used twice: NVIDIA's come first, then AMD's, then Intel's, each in the order
    of their PCI addresses. An integrated GPU (Intel's is always at bus 0, device 2) counts only on a host that has no
    other GPU: desktops draw on it.

    NVIDIA's render nodes are left out; its GPUs have device files of their own.
"""

import functools
import time
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
PROC = Path("/proc")
VENDORS = {"amdgpu": "amd", "i915": "intel", "xe": "intel"}  # by driver
RENDER_NODE = "/dev/dri/renderD"
KEEP_S = 10.0  # a host's GPUs hardly change
_DRI = "/dev/dri/"
INTEGRATED = ":00:02.0"  # end of an integrated GPU's address


@dataclass(frozen=True, slots=True, kw_only=True)
class DrmGpu:
    """One GPU. number: its position among all GPUs of the host."""

    vendor: str  # "amd", "intel"
    driver: str  # "amdgpu", "i915", "xe"
    number: int
    pci_bus_id: str  # "0000:c1:00.0"
    render: str  # "renderD128", in /dev/dri
    folder: Path  # of the PCI device, in /sys


def drm_gpus(sys: Path = SYS, proc: Path = PROC) -> tuple[DrmGpu, ...]:
    """Every GPU at this moment, by vendor and PCI address."""
    found: list[tuple[str, str, str, str, Path]] = []
    for node in (sys / "class/drm").glob("renderD*"):
        try:
            folder = (node / "device").resolve(strict=True)
            driver = (folder / "driver").resolve(strict=True).name
        except OSError:
            continue
        if driver in VENDORS and ":" in folder.name:
            found.append((VENDORS[driver], folder.name, driver, node.name, folder))
    nvidia = len(nvidia_gpus(proc))
    if len(found) > 1 or nvidia:
        found = [each for each in found if not (each[0] == "intel" and each[1].endswith(INTEGRATED))]
    return tuple(
        DrmGpu(vendor=vendor, driver=driver, number=number, pci_bus_id=address, render=render, folder=folder)
        for number, (vendor, address, driver, render, folder) in enumerate(sorted(found), nvidia)
    )


def nvidia_gpus(proc: Path = PROC) -> tuple[str, ...]:
    """The PCI addresses of NVIDIA's GPUs according to its kernel driver."""
    return tuple(sorted(path.name for path in (proc / "driver/nvidia/gpus").glob("*")))


def numbers_by_node() -> dict[str, int]:
    """The number of each GPU of this host by its device file, "/dev/dri/renderD128"; up to KEEP_S old."""
    return _numbers_by_node(int(time.monotonic() / KEEP_S))


@functools.lru_cache(maxsize=1)
def _numbers_by_node(_when: int) -> dict[str, int]:
    return {f"{_DRI}{gpu.render}": gpu.number for gpu in drm_gpus()}
