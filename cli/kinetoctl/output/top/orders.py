"""The orders in which processes are shown."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


def gpu_memory(sample: "pb.ProcessSample") -> int:
    """Bytes on all GPUs."""
    return sum(use.memory_bytes for use in sample.gpus)


def gpu_share(sample: "pb.ProcessSample") -> float:
    """GPUs that it keeps busy."""
    return sum(use.utilization for use in sample.gpus)


# What --sort names: the key, and whether the largest comes first.
ORDERS: "dict[str, tuple[Callable[[pb.ProcessSample], tuple[object, ...]], bool]]" = {
    "gpu": (lambda each: (gpu_share(each), gpu_memory(each), each.cpu), True),
    "gpu-memory": (lambda each: (gpu_memory(each),), True),
    "cpu": (lambda each: (each.cpu,), True),
    "memory": (lambda each: (each.memory_bytes,), True),
    "pid": (lambda each: (each.process.pid,), False),
    "rank": (lambda each: (not each.process.HasField("rank"), each.process.rank, each.process.pid), False),
    "user": (lambda each: (each.process.user, each.process.pid), False),
    "job": (lambda each: (each.process.job_id == "", each.process.job_id, each.process.rank), False),
}


def ordered(processes: "Sequence[pb.ProcessSample]", order: str, *, reverse: bool = False) -> "list[pb.ProcessSample]":
    """The processes by one of ORDERS; those that are equal stay by pid."""
    key, largest_first = ORDERS[order]
    return sorted(processes, key=key, reverse=largest_first is not reverse)
