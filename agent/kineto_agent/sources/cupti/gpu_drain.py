"""Whether CUPTI may be called at this moment, or taken out: its first call and its last one wait for the GPU.

agent/native/cupti/device_drain.c finds the moment. Here is what it needs to know of torch, and what is said where there
is none.
"""

import sys
from typing import TYPE_CHECKING, Any, Dict, List

from kineto_agent.sources.cupti import collector_binding
from kineto_agent.sources.interface import SourceError

if TYPE_CHECKING:
    from kineto_agent.sources.cupti.collector_binding import Collector

LIMIT_MS = 300  # of queued work; a loop that computes all the time has some 60 ms ahead
STAYS = (
    "stayed attached: %s, and detaching CUPTI would hold every launch of the program until the GPU is idle; CUDA calls "
    "stay slightly slower until the next capture detaches"
)
_LEFT_ALONE = (
    "CUPTI is left alone: %s, and CUPTI's first call would hold every launch of the program until the GPU is idle. "
    "Trace again once the GPU's work has ended; --activities python_function shows what the program waits for"
)
_CUDA_DEVICE = 1  # torch's number of this type
# torch numbers the streams of its pools in steps of 32, from 3 on those of normal priority, from 5 on the next higher.
_POOL_NUMBERS = [first + 32 * i for first in (3, 5) for i in range(32)]


def await_moment(collector: "Collector") -> Dict[str, Any]:
    """Wait for a moment in which CUPTI's first call does not wait; returns metadata about it.

    Raises SourceError if there is none within 1.5 s.
    """
    drained = collector.drain(LIMIT_MS, _streams_of_torch())
    if drained.outcome in (collector_binding.DOES_NOT_DRAIN, collector_binding.CAPTURING):
        raise SourceError("GPU_DOES_NOT_DRAIN", _LEFT_ALONE % why_busy(drained.outcome, drained.queued_ns))
    return {"cupti_moment_ns": drained.waited_ns, "gpu_queued_ns": drained.queued_ns}


def why_busy(outcome: int, queued_ns: int) -> str:
    """What keeps CUPTI from being called. outcome: kc_drain_outcome."""
    if outcome == collector_binding.CAPTURING:
        return "the program captures CUDA graphs all the time, so it cannot be told whether the GPU's work ends soon"
    return "the GPU has worked for %.1f s without a break" % (queued_ns / 1e9)


def _streams_of_torch() -> List[int]:
    """Handles of the streams in torch's pools; empty where torch has made none, or does not say.

    By number, which makes no stream: making them takes 70 MiB of the device's memory.
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
