"""Finds a moment to call CUPTI for the first time, or to take it out: both calls wait for the GPU.

agent/native/cupti/device_drain.c does the waiting. This module adds what it needs to know about torch, and the messages
if there is no such moment.
"""

import sys
from typing import TYPE_CHECKING, Any, Dict, List

from kineto_agent.sources.cupti import collector_binding

if TYPE_CHECKING:
    from kineto_agent.sources.cupti.collector_binding import Collector

STAYS = (
    "stayed attached: %s, and detaching CUPTI would block every launch of the program until the GPU is idle; CUDA "
    "calls stay slightly slower until the next capture detaches it"
)
_CUDA_DEVICE = 1  # torch's number of this type
# torch numbers the streams of its pools in steps of 32: from 3 with normal priority, from 5 with the next higher one.
_POOL_NUMBERS = [first + 32 * i for first in (3, 5) for i in range(32)]


def await_moment(collector: "Collector", limit_ms: int) -> Dict[str, Any]:
    """Wait for a moment in which CUPTI's first call does not wait; returns metadata about it.

    limit_ms: of queued work; a loop that computes constantly has about 60 ms queued.

    Raises SourceError if there is none within 1.5 s.
    """
    drained = collector.drain(limit_ms, _streams_of_torch())
    if drained.outcome not in (collector_binding.SHORT, collector_binding.SOON, collector_binding.UNKNOWN):
        raise collector_binding.busy(drained.outcome, drained.queued_ns)
    return {"cupti_moment_ns": drained.waited_ns, "gpu_queued_ns": drained.queued_ns}


def _streams_of_torch() -> List[int]:
    """Handles of the streams in torch's pools; empty if torch has created none, or does not expose them.

    Looks streams up by number, which creates none: creating them takes 70 MiB of the device's memory.
    """
    torch: Any = sys.modules.get("torch")
    try:
        devices = torch.cuda.device_count() if torch is not None and torch.cuda.is_initialized() else 0
        streams = [
            torch.cuda.Stream(stream_id=number, device_index=device, device_type=_CUDA_DEVICE).cuda_stream
            for device in range(devices)
            for number in _POOL_NUMBERS
        ]
        return [stream for stream in streams if stream]
    except Exception:  # noqa: BLE001 - a torch that is built differently
        return []
