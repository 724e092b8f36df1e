"""Checks the GPUs' drivers.

NVIDIA's: its restriction of profiling, and the CUPTI versions of this host. AMD's and Intel's: whether each GPU on the
PCI bus has one, and whether programs can open its device files.
"""

import contextlib
import grp
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from kineto_agent.sources.cupti.known_versions import RELEASES
from kineto_agent.system import env
from kineto_trace.base.quantities import times

from kinetod.attach.attach_types import Finding, Status
from kinetod.attach.inspect import cupti_search
from kinetod.attach.inspect.process_inspection import PROC
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.processes.drm_gpus import INTEGRATED, SYS, VENDORS, drm_gpus
from kinetod.processes.identity import text_of

# Older drivers print the module's option, newer and open ones the driver's internal name.
_RESTRICTED = re.compile(r"^(?:NVreg_)?(?:RestrictProfilingToAdminUsers|RmProfilingAdminOnly):\s*(\d+)", re.MULTILINE)
_PATTERNS = (
    "usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.*",
    "usr/local/cuda*/targets/*/lib/libcupti.so.*",
    "usr/local/cuda*/lib64/libcupti.so.*",
    "opt/cuda*/extras/CUPTI/lib64/libcupti.so.*",
    "usr/lib/*-linux-gnu/libcupti.so.*",
    "usr/lib64/libcupti.so.*",
    "usr/lib*/python3*/*-packages/nvidia/*/lib/libcupti.so.*",
    "usr/local/lib/python3*/*-packages/nvidia/*/lib/libcupti.so.*",
)
_MAX_NAMED = 8
_PCI_VENDORS = {"0x1002": "amd", "0x8086": "intel"}
_CLASSES = ("0x03", "0x12")  # display controllers, processing accelerators
_PASSED_ON = ("vfio-pci", "pci-stub")  # to virtual machines
_ADVICE = {
    "amd": "load amdgpu (`modprobe amdgpu`; new GPUs need ROCm's amdgpu-dkms)",
    "intel": "load xe or i915 (`modprobe xe`; on an older kernel, new GPUs need its force_probe option)",
}
_OPEN_TO_ALL = stat.S_IROTH | stat.S_IWOTH


def check_devices(_question: CheckQuestion) -> Iterable[Finding]:
    """The findings about AMD's and Intel's GPUs."""
    return device_findings()


def device_findings(sys: Path = SYS, dev: Path = Path("/dev"), proc: Path = PROC) -> Iterator[Finding]:
    """dev: folder of the host's device files."""
    yield _drivers(sys)
    if (nodes := _nodes(sys, dev, proc)) is not None:
        yield nodes


def _drivers(sys: Path) -> Finding:
    name = "gpu_driver"
    bound: Counter[str] = Counter()
    without: list[tuple[str, str]] = []  # address, vendor
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        vendor = _PCI_VENDORS.get(text_of(device / "vendor").strip())
        if vendor is None or not text_of(device / "class").startswith(_CLASSES) or device.name.endswith(INTEGRATED):
            continue
        driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
        if driver in VENDORS or driver in _PASSED_ON:
            bound[driver] += 1
        else:
            without.append((device.name, vendor))
    told = [f"{count} with {driver}" for driver, count in sorted(bound.items())]
    if not without:
        return Finding(name, Status.OK, ", ".join(told) or "no AMD or Intel GPU on the PCI bus")
    told.append(f"{', '.join(address for address, _ in without)} without a GPU driver: not usable by programs")
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
        detail = f"missing: {', '.join(missing)}; programs here cannot use the GPU"
        return Finding(name, Status.NOTE, detail, "pass the devices to the container; on a host, let udev create them")
    groups = sorted({group for path in wanted if (group := _only_for(path))})
    if groups:
        detail = f"{times(len(wanted), 'device file')}, which only root and members of {', '.join(groups)} may open"
        return Finding(name, Status.OK, detail)
    return Finding(name, Status.OK, f"{times(len(wanted), 'device file')}, which anyone can open")


def _only_for(path: Path) -> str:
    """The group whose members may open the device; empty if everybody may."""
    status = path.stat()
    if status.st_mode & _OPEN_TO_ALL == _OPEN_TO_ALL:
        return ""
    with contextlib.suppress(KeyError):
        return f"the group {grp.getgrgid(status.st_gid).gr_name}"
    return f"the group {status.st_gid}"


def check_driver(_question: CheckQuestion) -> Iterable[Finding]:
    """The findings about NVIDIA's driver and CUPTI."""
    return driver_findings()


def driver_findings(proc: Path = PROC, root: Path = Path("/")) -> Iterator[Finding]:
    """root: root of the host's files."""
    yield _restriction(proc)
    yield _cupti(installed(root))


def _restriction(proc: Path) -> Finding:
    name = "gpu_counters"
    try:
        text = (proc / "driver/nvidia/params").read_text(errors="replace")
    except OSError:
        return Finding(name, Status.OK, "no NVIDIA driver that could restrict hardware counters")
    match = _RESTRICTED.search(text)
    if match is None:
        return Finding(name, Status.UNKNOWN, "the driver does not report whether it restricts hardware counters")
    if match[1] == "0":
        return Finding(name, Status.OK, "the driver allows every user to use hardware counters")
    detail = "the driver restricts hardware counters to administrators; traces do not need them"
    advice = "for other tools: `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d, and a reboot"
    return Finding(name, Status.NOTE, detail, advice)


def installed(root: Path = Path("/")) -> dict[str, int | None]:
    """The libcupti libraries of this host: path and version, if known. Each file once."""
    patterns = [*_PATTERNS, *(f"{path.lstrip('/')}/nvidia/*/lib/libcupti.so.*" for path in sys.path if path)]
    if explicit := os.environ.get(env.CUPTI_LIBRARY):
        patterns.insert(0, explicit.lstrip("/"))
    found: dict[str, int | None] = {}
    for pattern in patterns:
        for path in sorted(map(Path.resolve, root.glob(pattern))):
            if str(path) not in found and path.is_file():
                found[str(path)] = cupti_search.version_in_file(path)
    return found


def _cupti(found: dict[str, int | None]) -> Finding:
    name = "cupti"
    theirs = "programs have their own in their environments and containers (see `kinetoctl doctor PID`)"
    if not found:
        return Finding(name, Status.OK, f"no libcupti in the usual places on this host; {theirs}")
    known = [f"{path} (CUDA {RELEASES[version]})" for path, version in found.items() if version in RELEASES]
    unknown = [path for path, version in found.items() if version is not None and version not in RELEASES]
    untold = [path for path, version in found.items() if version is None]
    parts = [*known, *(f"{path} (unknown version {found[path]})" for path in unknown)]
    parts += [f"{path} (the file does not show its version)" for path in untold]
    detail = ", ".join(parts[:_MAX_NAMED]) + (f" and {len(parts) - _MAX_NAMED} more" if len(parts) > _MAX_NAMED else "")
    if unknown:
        advice = "recording GPU activities with an unknown version needs a newer kinetod"
        return Finding(name, Status.NOTE, f"{detail}; {theirs}", advice)
    return Finding(name, Status.OK, f"{detail}; {theirs}")
