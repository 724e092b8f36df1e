"""What Level Zero's results mean for somebody who wants counters: one seam, from numbers to codes and advice.

The numbers are ze_result_t of ze_api.h. Intel's driver answers ERROR_UNKNOWN to every open of a stream that the kernel
refuses, whether another process has one (EBUSY) or this one may not (EACCES). So the rights are looked at beforehand,
where the kernel looks: a sysctl, and this process's capabilities.
"""

from collections.abc import Iterable
from pathlib import Path

from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.level_zero.stream_holders import stream_holder
from kinetod.counters.level_zero.tools_library import LevelZeroFailure
from kinetod.gpus.level_zero import LOST
from kinetod.processes.drm_gpus import PROC

NOT_PERMITTED = 0x70010000
NOT_AVAILABLE = 0x70010001
DEPENDENCY_UNAVAILABLE = 0x70020000
UNSUPPORTED_VERSION, UNSUPPORTED_FEATURE = 0x78000002, 0x78000003
IN_USE = 0x78000006
UNKNOWN = 0x7FFFFFFE
# 1: only for CAP_PERFMON or CAP_SYS_ADMIN (perfmon_capable in the kernel).
RESTRICTIONS = {"i915": "sys/dev/i915/perf_stream_paranoid", "xe": "sys/dev/xe/observation_paranoid"}
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
INSTALL = (
    "install Intel's driver libze_intel_gpu.so.1 and its libraries libigdmd.so.1 (metrics discovery) and libigdml.so.1 "
    "(metrics library), and let kinetod-counters' user open /dev/dri/renderD* (group render)"
)


def translated(failure: LevelZeroFailure, gpu: str = "", proc: Path = PROC) -> CounterError:
    """The error for a failed call. A GPU that somebody else measures is BUSY without the holder."""
    of = f"GPU {gpu}: " if gpu else ""
    if failure.code in LOST:
        return CounterError(
            CounterCode.UNAVAILABLE, f"{of}the driver has lost the GPU ({failure}); the kernel's log has more"
        )
    if failure.code == NOT_PERMITTED:
        return CounterError(CounterCode.NOT_PERMITTED, f"{of}{rights_problem(RESTRICTIONS, proc) or _advice()}")
    if failure.function == "zetMetricStreamerOpen":
        if failure.code == IN_USE:
            reason = "the driver did not close an earlier stream of kinetod-counters, which must be started anew"
            return CounterError(CounterCode.FAILED, of + reason)
        if failure.code == NOT_AVAILABLE or (failure.code == UNKNOWN and stream_holder(proc)):
            return CounterError(CounterCode.BUSY, f"{of}another process has its counters")
        if failure.code == UNKNOWN:
            reason = (
                "the driver cannot open its counters and does not tell why; if another process has them, end it: "
                "sudo ls -l /proc/*/fd shows it with a file i915_perf or xe_oa"
            )
            return CounterError(CounterCode.FAILED, f"{of}{reason}")
    if failure.code in (DEPENDENCY_UNAVAILABLE, UNSUPPORTED_FEATURE, UNSUPPORTED_VERSION):
        return CounterError(CounterCode.UNAVAILABLE, f"{of}the driver gives no metrics ({failure}): {INSTALL}")
    return CounterError(CounterCode.FAILED, f"{of}{failure}")


def not_started(failure: LevelZeroFailure, proc: Path = PROC) -> CounterError:
    """The error if zeInit fails with metrics on, as it does with older drivers where they cannot be had."""
    if reason := rights_problem(RESTRICTIONS, proc):
        return CounterError(CounterCode.NOT_PERMITTED, reason)
    return CounterError(CounterCode.UNAVAILABLE, f"Level Zero does not start with metrics on ({failure}): {INSTALL}")


def rights_problem(drivers: Iterable[str], proc: Path = PROC) -> str:
    """Why the kernel refuses, with the way out; empty if it does not. drivers: "i915" or "xe", or both."""
    restricted = [RESTRICTIONS[each] for each in drivers if _text(proc / RESTRICTIONS[each]).strip() not in ("", "0")]
    if not restricted or _may_anyway(proc):
        return ""
    return (
        f"the kernel gives counters to administrators only (/proc/{restricted[0]} is not 0); {_advice(restricted[0])}"
    )


def _advice(file: str = RESTRICTIONS["i915"]) -> str:
    setting = file.removeprefix("sys/").replace("/", ".")
    return (
        f"enable the drop-in of kinetod-counters.service that adds CAP_PERFMON, or set sysctl {setting}=0 for everybody"
    )


def _may_anyway(proc: Path) -> bool:
    for line in _text(proc / "self/status").splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.partition(":")[2], 16)
            return bool(effective >> _CAP_PERFMON & 1 or effective >> _CAP_SYS_ADMIN & 1)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
