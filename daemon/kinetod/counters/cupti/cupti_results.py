"""What CUPTI's results mean for somebody who wants counters: one seam, from numbers to codes and advice.

The numbers are CUptiResult of cupti_result.h, CUDA 12.8 to 13.5.
"""

from pathlib import Path

from kinetod.counters.cupti.native_sampling import (
    CUPTI,
    DISABLED,
    DRIVER,
    LOADING,
    UNSUPPORTED,
    NativeFailure,
    SampledGpu,
)
from kinetod.counters.interface import CounterCode, CounterError

INVALID_METRIC_NAME = 17
HARDWARE_BUSY = 26
NOT_SUPPORTED = 27
INSUFFICIENT_PRIVILEGES = 35
VIRTUAL_INSUFFICIENT_PRIVILEGES = 40
UNKNOWN = 999
UNAVAILABLE = {
    15: "CUPTI does not find libnvperf_host.so and libnvperf_target.so, which lie beside it in its package",
    NOT_SUPPORTED: "CUPTI cannot sample the counters of this GPU",
    33: "this is a virtual GPU, whose counters are not to be had",
    38: "CUPTI cannot sample the counters of a GPU of this generation",
    41: "confidential computing is on, under which the driver gives no counters",
    42: "NVIDIA's mining GPUs have no counters to read",
    43: "MIG is on: counters of units that instances share would be wrong",
    44: "SLI is on, under which the driver gives no counters",
    45: "the Windows Subsystem for Linux gives no counters",
    46: "this libcupti does not know the chip; install a newer one (pip install nvidia-cuda-cupti)",
}
_CUDA_NO_DEVICE = 100
_OLD_CHIPS = ("GV", "TU")


def translated(failure: NativeFailure, gpu: str = "", proc: Path = Path("/proc")) -> CounterError:
    """The error for a failed call; HARDWARE_BUSY without the holder, which the caller may find out."""
    of = f"GPU {gpu}: " if gpu else ""
    if failure.kind == LOADING:
        reason = f"{of}no counters: {failure}; install the driver, and CUPTI (pip install nvidia-cuda-cupti)"
        return CounterError(CounterCode.UNAVAILABLE, reason)
    if failure.kind == DRIVER:
        what = "the driver sees no GPU" if failure.result == _CUDA_NO_DEVICE else f"the driver does not work: {failure}"
        return CounterError(CounterCode.UNAVAILABLE, f"{of}{what}; nvidia-smi must list the GPU for this user")
    if failure.kind != CUPTI:
        return CounterError(CounterCode.FAILED, f"{of}{failure}")
    if failure.result == HARDWARE_BUSY:
        return CounterError(CounterCode.BUSY, f"{of}another process has its counters")
    if failure.result in (INSUFFICIENT_PRIVILEGES, VIRTUAL_INSUFFICIENT_PRIVILEGES):
        return CounterError(CounterCode.NOT_PERMITTED, f"{of}{rights_problem(proc)}")
    if failure.result == INVALID_METRIC_NAME:
        return CounterError(
            CounterCode.INVALID_METRIC, f"{of}it has no such metric; `kinetoctl counters list --metrics` has all"
        )
    if failure.result in UNAVAILABLE:
        return CounterError(CounterCode.UNAVAILABLE, f"{of}{UNAVAILABLE[failure.result]}")
    return CounterError(CounterCode.FAILED, f"{of}{failure}")


def rights_problem(proc: Path = Path("/proc")) -> str:
    """Why the driver refuses, with the way out."""
    restricted = "RmProfilingAdminOnly: 1" in _params(proc)
    why = " (RmProfilingAdminOnly: 1 in /proc/driver/nvidia/params)" if restricted else ""
    return (
        f"the driver gives counters to administrators only{why}; enable the drop-in of kinetod-counters.service that "
        "adds CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    )


def _params(proc: Path) -> str:
    try:
        return (proc / "driver/nvidia/params").read_text(errors="replace")
    except OSError:
        return ""


def problem_of_gpu(gpu: SampledGpu, proc: Path = Path("/proc")) -> tuple[CounterCode, str] | None:
    """Why this GPU cannot be measured, as far as is known without trying."""
    if " MIG " in f" {gpu.name} ":
        return CounterCode.UNAVAILABLE, UNAVAILABLE[43]
    if not gpu.chip:
        return CounterCode.UNAVAILABLE, UNAVAILABLE[46]
    if gpu.chip.startswith(_OLD_CHIPS) or gpu.architecture == UNSUPPORTED:
        return CounterCode.UNAVAILABLE, f"{gpu.chip} is too old: Ampere and later can be sampled without end"
    for level, result in (
        (gpu.sli, 44), (gpu.vgpu, 33), (gpu.confidential_compute, 41), (gpu.mining, 42), (gpu.wsl, 45),
    ):  # fmt: skip
        if level in (UNSUPPORTED, DISABLED):
            off = "; the host's administrator can enable profiling of it" if level == DISABLED else ""
            return CounterCode.UNAVAILABLE, UNAVAILABLE[result] + off
    if gpu.supported == UNSUPPORTED:
        return CounterCode.UNAVAILABLE, UNAVAILABLE[NOT_SUPPORTED]
    if gpu.availability in (INSUFFICIENT_PRIVILEGES, VIRTUAL_INSUFFICIENT_PRIVILEGES):
        return CounterCode.NOT_PERMITTED, rights_problem(proc)
    return None
