"""The events that the analyses of the GPU's time work on."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION, HTA_MEMORY
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.view_api.view import Answer

NOTHING = -1
NO_GPU = "the trace has no GPU activity"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GpuEvents:
    """GPU events (Unix ns). type: number into HTA_TYPES. track: dense number of (device, stream).

    launch: start of the call that caused it; NOTHING if that is not in the trace (for HTA, only if the file does not
    begin with an event). activity: whether it is a kernel, copy or fill (HTA has other GPU events). row: in Gpu, or in
    HtaFrame.
    """

    row: Ints
    start: Ints
    end: Ints
    name: npt.NDArray[np.int32]
    device: Ints
    stream: Ints
    track: Ints
    type: npt.NDArray[np.uint8]
    launch: Ints
    activity: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.start)


def gpu_events(context: Context) -> GpuEvents:
    """All kernels, copies and fills by start. Communication is told by the name, in all its versions."""
    work, called = context.get(gpu), context.get(calls)
    type_ = np.where(work.communication, HTA_COMMUNICATION, HTA_COMPUTATION)
    launch = called.start[work.call] if len(called) else work.call
    return GpuEvents(
        row=np.arange(len(work)),
        start=work.start,
        end=work.end,
        name=work.name,
        device=work.device,
        stream=work.stream,
        track=work.track,
        type=np.where(work.kind == KERNEL, type_, HTA_MEMORY).astype(np.uint8),
        launch=np.where(work.call >= 0, launch, NOTHING),
        activity=np.ones(len(work), np.bool_),
    )


def unknown_without_gpu(context: Context, answer: Answer, names: Collection[str], note: str = NO_GPU) -> Answer:
    """Returns the answer; if the trace has no GPU activity, these columns are missing, not 0, and a note says so."""
    if len(context.get(gpu)):
        return answer
    values = {name: [None] * len(column) if name in names else column for name, column in answer.values.items()}
    return Answer(values, [*(known for known in answer.notes if known != note), note])
