"""Waits until a GPU of the processes that are to be traced does what was asked for.

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

from kineto_protos.units import format_duration

from kinetoctl.client.gpu_condition import GpuCondition
from kinetoctl.errors import ConditionNotMet

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

SAMPLE_NS = 10**9
_PATIENCE = 5  # samples without the figure: the first one never has what is counted between two


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
            return f"--when {self._condition}: none of the processes uses a GPU"
        return f"--when {self._condition}: no GPU of the processes has {self._condition.figure}"


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
            told = f"; it was last: {seen}" if seen else ""
            raise ConditionNotMet(f"--when {condition}: not met within {format_duration(within_ns)}{told}")
    raise ConditionNotMet(f"--when {condition}: the daemon ended its samples of the GPUs before it was met")
