"""Who has the counters of a GPU: best effort, by the signs of other profilers in /proc. Blocking."""

import os
from pathlib import Path

from kinetod.counters.kernel_gpus import INTEL
from kinetod.counters.level_zero.stream_holders import stream_holder
from kinetod.processes.drm_gpus import PROC, SYS, drm_gpus
from kinetod.processes.profiler_signs import BY_PRODUCT, COUNTERS_USER, Holds
from kinetod.profilers.profiler_scan import ProfilingTool, scan

UNKNOWN = "another process"
_SAMPLES_GPUS = "Nsight Systems"  # with --gpu-metrics-devices, though it traces processes otherwise


def holder(pci_bus_id: str, proc: Path = PROC, sys: Path = SYS) -> str:
    """A name such as "Nsight Compute (process 1234)", or UNKNOWN, as of AMD's GPUs.

    pci_bus_id: as CUDA has it, 0000:01:00.0.
    """
    for gpu in drm_gpus(sys, proc):
        if gpu.pci_bus_id == pci_bus_id.lower():
            return (stream_holder(proc) if gpu.vendor == INTEL else "") or UNKNOWN
    minor = device_minor(pci_bus_id, proc)
    found = scan(proc, own=frozenset({os.getpid()})).profilers
    suspects = [tool for tool in found if _holds(tool) and (not tool.gpus or minor is None or minor in tool.gpus)]
    if not suspects:
        return UNKNOWN
    tool = max(suspects, key=_likelihood)
    return f"{tool.product} (process {tool.pid})" if tool.pid else tool.product


def _likelihood(tool: ProfilingTool) -> tuple[bool, bool, bool]:
    """For comparison. What a tool loads into the programs that it measures says less than the tool's own name."""
    sign = BY_PRODUCT[tool.product]
    return sign.holds is not Holds.PROCESS, sign is not COUNTERS_USER, bool(tool.gpus)


def device_minor(pci_bus_id: str, proc: Path = PROC) -> int | None:
    """N of /dev/nvidiaN, by the driver's word; None if it does not tell."""
    folder = proc / "driver/nvidia/gpus" / pci_bus_id.lower()
    try:
        lines = (folder / "information").read_text(errors="replace").splitlines()
        return next((int(line.partition(":")[2]) for line in lines if line.startswith("Device Minor")), None)
    except (OSError, ValueError):
        return None


def _holds(tool: ProfilingTool) -> bool:
    sign = BY_PRODUCT.get(tool.product)
    return sign is not None and (sign.holds in (Holds.COUNTERS, Holds.BOTH) or sign.product == _SAMPLES_GPUS)
