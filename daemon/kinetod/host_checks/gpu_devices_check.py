"""AMD's and Intel's GPUs on the PCI bus: whether each has a driver, and whether programs can open its device files."""

import contextlib
import grp
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from kinetod.attach.attach_types import Finding, Status
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.processes.drm_gpus import INTEGRATED, PROC, SYS, VENDORS, drm_gpus

_PCI_VENDORS = {"0x1002": "amd", "0x8086": "intel"}
_CLASSES = ("0x03", "0x12")  # display controllers, processing accelerators
_PASSED_ON = ("vfio-pci", "pci-stub")  # to virtual machines
_ADVICE = {
    "amd": "load amdgpu (`modprobe amdgpu`; new GPUs need the amdgpu-dkms of ROCm)",
    "intel": "load xe or i915 (`modprobe xe`; an older kernel needs its option force_probe for new GPUs)",
}
_OPEN_TO_ALL = stat.S_IROTH | stat.S_IWOTH


def check(_question: CheckQuestion) -> Iterable[Finding]:
    """The findings about AMD's and Intel's GPUs."""
    return findings()


def findings(sys: Path = SYS, dev: Path = Path("/dev"), proc: Path = PROC) -> Iterator[Finding]:
    """dev: folder of the host's device files."""
    yield _drivers(sys)
    if (nodes := _nodes(sys, dev, proc)) is not None:
        yield nodes


def _drivers(sys: Path) -> Finding:
    name = "gpu_driver"
    bound: Counter[str] = Counter()
    without: list[tuple[str, str]] = []  # address, vendor
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        vendor = _PCI_VENDORS.get(_text(device / "vendor"))
        if vendor is None or not _text(device / "class").startswith(_CLASSES) or device.name.endswith(INTEGRATED):
            continue
        driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
        if driver in VENDORS or driver in _PASSED_ON:
            bound[driver] += 1
        else:
            without.append((device.name, vendor))
    told = [f"{count} with {driver}" for driver, count in sorted(bound.items())]
    if not without:
        return Finding(name, Status.OK, ", ".join(told) or "no GPU of AMD or Intel on the PCI bus")
    told.append(f"{', '.join(address for address, _ in without)} without a driver for GPUs: programs cannot use them")
    advice = "; ".join(_ADVICE[vendor] for vendor in sorted({vendor for _, vendor in without}))
    return Finding(name, Status.NOTE, "; ".join(told), advice)


def _nodes(sys: Path, dev: Path, proc: Path) -> Finding | None:
    """Whether programs can open the device files; None if there is no such GPU."""
    gpus = drm_gpus(sys, proc)
    if not gpus:
        return None
    wanted = [dev / "dri" / gpu.render for gpu in gpus]
    if any(gpu.vendor == "amd" for gpu in gpus):
        wanted.append(dev / "kfd")
    missing = [str(path) for path in wanted if not path.exists()]
    name = "gpu_nodes"
    if missing:
        detail = f"{', '.join(missing)} is missing: programs here cannot use the GPU"
        return Finding(name, Status.NOTE, detail, "give the container these devices, or let udev make them on a host")
    groups = sorted({group for path in wanted if (group := _only_for(path))})
    if groups:
        detail = f"{len(wanted)} device files, which only root and members of {', '.join(groups)} may open"
        return Finding(name, Status.OK, detail)
    return Finding(name, Status.OK, f"{len(wanted)} device files, which everybody may open")


def _only_for(path: Path) -> str:
    """The group whose members may open the device; empty if everybody may."""
    status = path.stat()
    if status.st_mode & _OPEN_TO_ALL == _OPEN_TO_ALL:
        return ""
    with contextlib.suppress(KeyError):
        return f"the group {grp.getgrgid(status.st_gid).gr_name}"
    return f"the group {status.st_gid}"


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
