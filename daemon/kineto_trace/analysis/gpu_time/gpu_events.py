"""What the analyses of the GPU's time work on, the same for right figures and for HTA's."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.compat.hta.hta_frame import KIND, hta_frame
from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION, HTA_MEMORY, hta_types
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.view_api.view import Compat

NOTHING = -1

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GpuEvents:
    """GPU events (Unix ns). type: number into HTA_TYPES. track: dense number of (device, stream).

    launch: when the call that caused it began; NOTHING: it is not in the trace (HTA: and the file does not begin with
    an event). activity: it is a kernel, copy or fill (HTA has other GPU events). row: in Gpu, or in HtaFrame.
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


def gpu_events(context: Context, compat: Compat) -> GpuEvents:
    """In the order of their starts; HTA's: in the order of its rows."""
    return context.get(hta_events if compat is Compat.HTA else exact_events)


def exact_events(context: Context) -> GpuEvents:
    """All kernels, copies and fills; communication is told by the name, in all its versions."""
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


def hta_events(context: Context) -> GpuEvents:
    """All rows with a stream; devices are not told apart, only streams are."""
    frame = context.get(hta_frame)
    row = np.flatnonzero(frame.stream != NOTHING)
    link = frame.link[row]
    first = np.flatnonzero(frame.leads)
    if len(first):  # HTA's link of what has a correlation but no partner
        link = np.where((link < 0) & (frame.correlation[row] >= 0), first[0], link)
    types = context.get(hta_types)
    return GpuEvents(
        row=row,
        start=frame.start[row],
        end=frame.end[row],
        name=frame.name[row],
        device=frame.pid[row],
        stream=frame.stream[row],
        track=np.unique(frame.stream[row], return_inverse=True)[1].astype(np.int64),
        type=types[frame.name[row]],
        launch=np.where(link >= 0, frame.start[link], NOTHING),
        activity=frame.exact[row] & np.isin(frame.kind[row], [KIND[kind] for kind in (*GPU_TABLES, "other")]),
    )
