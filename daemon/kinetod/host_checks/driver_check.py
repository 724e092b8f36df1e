"""The NVIDIA driver's restriction of profiling, and the CUPTI versions of this host."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kineto_agent.sources.cupti.known_versions import RELEASES
from kineto_agent.system import env

from kinetod.attach.attach_types import Finding, Status
from kinetod.attach.inspect import cupti_search
from kinetod.attach.inspect.process_inspection import PROC
from kinetod.host_checks.check_protocol import CheckQuestion

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


def check(_question: CheckQuestion) -> Iterable[Finding]:
    """The findings about NVIDIA's driver and CUPTI."""
    return findings()


def findings(proc: Path = PROC, root: Path = Path("/")) -> Iterator[Finding]:
    """root: root of the host's files."""
    yield _restriction(proc)
    yield _cupti(installed(root))


def _restriction(proc: Path) -> Finding:
    name = "gpu_counters"
    try:
        text = (proc / "driver/nvidia/params").read_text(errors="replace")
    except OSError:
        return Finding(name, Status.OK, "no NVIDIA driver, which could restrict them")
    match = _RESTRICTED.search(text)
    if match is None:
        return Finding(name, Status.UNKNOWN, "the driver does not say whether it restricts them")
    if match[1] == "0":
        return Finding(name, Status.OK, "the driver lets every user use hardware counters")
    detail = "the driver restricts hardware counters to administrators; traces need none"
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
    theirs = "programs have their own in their environments and containers: see `kinetoctl doctor PID`"
    if not found:
        return Finding(name, Status.OK, f"none in this host's usual places; {theirs}")
    known = [f"{path} (CUDA {RELEASES[version]})" for path, version in found.items() if version in RELEASES]
    unknown = [path for path, version in found.items() if version is not None and version not in RELEASES]
    untold = [path for path, version in found.items() if version is None]
    parts = [*known, *(f"{path} (unknown version {found[path]})" for path in unknown)]
    parts += [f"{path} (the file does not tell its version)" for path in untold]
    detail = ", ".join(parts[:_MAX_NAMED]) + (f" and {len(parts) - _MAX_NAMED} more" if len(parts) > _MAX_NAMED else "")
    if unknown:
        advice = "GPU activities by the unknown ones need a newer kinetod"
        return Finding(name, Status.NOTE, f"{detail}; {theirs}", advice)
    return Finding(name, Status.OK, f"{detail}; {theirs}")
