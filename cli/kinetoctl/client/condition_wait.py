"""Conditions on what a GPU does, and waiting until one holds.

Theory of operation
    The daemon's samples of the host, one a second, are what `kinetoctl top` shows: NVML, and from Hopper on the shares
    by the hardware's counters, which hold no lock and cost the GPU nothing. A GPU counts if one of the selected
    processes uses it. The condition is met once one and the same GPU has met it in each sample for as long as was asked
    for; a sample without a value begins that time anew. Nothing is asked of the processes before.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kineto_trace.base.quantities import format_duration

from kinetoctl.errors import ConditionNotMet

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

SAMPLE_NS = 10**9
_PATIENCE = 5  # samples without the figure: the first one never has what is counted between two
# Figures of GpuSample (profiler.proto).
SHARES = (
    *("utilization", "memory_utilization", "graphics_active", "sm_active", "sm_occupancy", "tensor_active"),
    *("dram_active", "fp64_active", "fp32_active", "fp16_active"),
)
OTHERS = (
    *("power_watts", "temperature_celsius", "sm_clock_hertz", "memory_clock_hertz"),
    *("pcie_transmit_bytes_per_second", "pcie_receive_bytes_per_second"),
    *("nvlink_transmit_bytes_per_second", "nvlink_receive_bytes_per_second"),
)
FIGURES = (*SHARES, *OTHERS)
DEFAULT_LASTS_NS = 5 * 10**9


# Conditions on what a GPU does. Pure.
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCondition:
    """figure: one of FIGURES. limit: in the unit of its name, of a share from 0 to 1.

    lasts_ns: how long it has to hold.
    """

    figure: str
    below: bool
    limit: float
    lasts_ns: int = DEFAULT_LASTS_NS

    def holds(self, value: float) -> bool:
        """Whether a value is below the limit, or above it."""
        return value < self.limit if self.below else value > self.limit

    def shown(self, value: float) -> str:
        """A value as people read it."""
        return f"{100 * value:.3g} %" if self.figure in SHARES else f"{value:.6g}"

    def __str__(self) -> str:
        sign = "<" if self.below else ">"
        return f"{self.figure} {sign} {self.shown(self.limit)} for {format_duration(self.lasts_ns)}"


@dataclass(frozen=True, slots=True)
class Met:
    """The GPU that met it, and its last value."""

    gpu: int
    value: float


class ConditionWatch:
    """Judges samples, one after the other."""

    def __init__(self, condition: GpuCondition) -> None:
        self._condition = condition
        self._since_ns: dict[tuple[str, int], int] = {}  # by vendor and index
        self._without = 0  # samples in which no GPU of the processes had the figure
        self.last: dict[int, float] = {}  # by GPU

    def see(self, sample: "pb.HostSample") -> Met | None:
        """The GPU for which it has been met for long enough. Raises ConditionNotMet if it never can be."""
        condition, used = self._condition, _used(sample)
        own = [gpu for gpu in sample.gpus if (gpu.vendor, gpu.gpu.index) in used]
        having = [gpu for gpu in own if gpu.HasField(condition.figure)]
        self._without = 0 if having else self._without + 1
        if self._without >= _PATIENCE:
            raise ConditionNotMet(self._never(bool(own)))
        values = {(gpu.vendor, gpu.gpu.index): float(getattr(gpu, condition.figure)) for gpu in having}
        self.last = {gpu: value for (_, gpu), value in values.items()}
        now_ns, before = sample.time_ns, self._since_ns
        self._since_ns = {
            key: min(now_ns, before.get(key, now_ns)) for key, value in values.items() if condition.holds(value)
        }
        for key, since_ns in self._since_ns.items():
            if now_ns - since_ns >= condition.lasts_ns:
                return Met(key[1], values[key])
        return None

    def _never(self, uses_a_gpu: bool) -> str:
        if not uses_a_gpu:
            return f"--when {self._condition}: none of the processes is using a GPU"
        return f"--when {self._condition}: no GPU of the processes reports {self._condition.figure}"


def _used(sample: "pb.HostSample") -> set[tuple[str, int]]:
    return {(use.vendor, use.gpu) for each in sample.processes for use in each.gpus}


def wait_for(
    samples: Iterable["pb.HostSample"],
    condition: GpuCondition,
    within_ns: int | None,
    clock: Callable[[], float] = time.monotonic,
) -> Met | None:
    """The GPU that met the condition; None if no process is left.

    Raises ConditionNotMet, and whatever the samples raise.
    """
    watch, began = ConditionWatch(condition), clock()
    for sample in samples:
        if not sample.processes:
            return None
        if (met := watch.see(sample)) is not None:
            return met
        if within_ns is not None and clock() - began >= within_ns / 1e9:
            seen = ", ".join(f"GPU {gpu} {condition.shown(value)}" for gpu, value in watch.last.items())
            told = f"; last values: {seen}" if seen else ""
            raise ConditionNotMet(f"--when {condition}: not met within {format_duration(within_ns)}{told}")
    raise ConditionNotMet(f"--when {condition}: the daemon stopped sampling the GPUs before the condition was met")
