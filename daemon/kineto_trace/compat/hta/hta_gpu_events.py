"""HTA's GPU events in the form of the exact ones."""

import numpy as np

from kineto_trace.analysis.gpu_time.gpu_events import NOTHING, GpuEvents
from kineto_trace.compat.hta.hta_frame import KIND, hta_frame
from kineto_trace.kernel_traits.kernel_types import hta_types
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES


def hta_events(context: Context) -> GpuEvents:
    """All rows with a stream, in the order of HTA's rows. Streams are told apart, devices are not."""
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
