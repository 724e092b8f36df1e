"""How the GPU's time divides: idle, computing, anything else; and how much communication hides behind computation."""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import GpuEvents, gpu_events
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.compat.hta.hta_frame import hta_frame
from kineto_trace.compat.hta.hta_intervals import Merged, merge, sweep
from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

NO_GPU = "there are no GPU events in the trace"

Flags = npt.NDArray[np.bool_]


def union_of(events: GpuEvents, chosen: Flags) -> Union:
    """The time in which any of the chosen events ran."""
    return union(events.start[chosen], events.end[chosen])


def merged_as_hta(context: Context, events: GpuEvents, chosen: Flags) -> Merged:
    """The same by HTA."""
    start = events.start[chosen]
    return merge(start, events.end[chosen], context.get(hta_frame).order(start))


def devices_of(events: GpuEvents, compat: Compat) -> list[tuple[int | None, Flags]]:
    """Which events are looked at together: those of a device; by HTA all."""
    if compat is Compat.HTA:
        return [(None, np.ones(len(events), np.bool_))] if len(events) else []
    return [(device, events.device == device) for device in np.unique(events.device).tolist()]


@view(
    "temporal_breakdown",
    columns(
        ("device", "int", "", "GPU as the process numbers it; missing: all together (HTA)"),
        ("idle_us", "float", "us", "no event ran"),
        ("compute_us", "float", "us", "at least one computing kernel ran"),
        ("non_compute_us", "float", "us", "only communication, copies and fills ran"),
        ("kernel_time_us", "float", "us", "from the first start to the last end: the sum of these"),
        ("idle_pct", "float", "%", "of kernel_time"),
        ("compute_pct", "float", "%", "of kernel_time"),
        ("non_compute_pct", "float", "%", "of kernel_time"),
    ),
    compat=(Compat.HTA,),
)
def temporal_breakdown(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """Idle, computing and other time of each GPU between its first and its last event.

    Computing time is the union of all kernels that are no communication (by name: nccl, rccl); idle time is what the
    union of all kernels, copies and fills leaves.

    HTA's figures (get_temporal_breakdown): of all devices together; cuda_sync events count as busy, kernel types are
    told by HTA's patterns, percentages have two digits, and its loading rules hold (last step dropped, whole us).
    """
    events = gpu_events(context, compat)
    rows: list[list[float | None]] = []
    for device, chosen in devices_of(events, compat):
        computing = chosen & (events.type == HTA_COMPUTATION)
        if compat is Compat.HTA:
            merged = merged_as_hta(context, events, chosen)
            whole, busy = int(merged.end[-1] - merged.start[0]), merged.length()
            compute = merged_as_hta(context, events, computing).length()
        else:
            ran = union_of(events, chosen)
            whole, busy, compute = int(ran.end[-1] - ran.start[0]), ran.length(), union_of(events, computing).length()
        parts = [whole - busy, compute, busy - compute]
        shares = [100 * part / whole if whole else float("nan") for part in parts]
        if compat is Compat.HTA:
            shares = [float(np.round(share, 2)) for share in shares]
        rows.append([device, *(part / 1000 for part in (*parts, whole)), *shares])
    names = [column.name for column in temporal_breakdown.columns]
    notes = () if rows else (NO_GPU,)
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)}, notes)


@view(
    "comm_comp_overlap",
    columns(
        ("device", "int", "", "GPU as the process numbers it; missing: all together (HTA)"),
        ("communication_us", "float", "us", "at least one communication kernel ran"),
        ("overlapped_us", "float", "us", "of that, a computing kernel ran too"),
        ("overlap_pct", "float", "%", "of the communication time; missing without communication"),
    ),
    compat=(Compat.HTA,),
)
def comm_comp_overlap(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """How much of the time of communication kernels computing kernels run as well, for each GPU.

    Communication is told by the kernel's name (nccl, rccl, in all their versions).

    HTA's figures (get_comm_comp_overlap): by its patterns, which miss ncclDevKernel in the middle of a name and take
    all names that begin with hip. Without GPU events there is one row, as there, with nothing in it.
    """
    events = gpu_events(context, compat)
    rows: list[list[float | None]] = []
    for device, chosen in devices_of(events, compat):
        communicating = chosen & (events.type == HTA_COMMUNICATION)
        computing = chosen & (events.type == HTA_COMPUTATION)
        if compat is Compat.HTA:
            length, both = _hta_overlap(context, events, communicating, computing)
        else:
            communication = union_of(events, communicating)
            length, both = communication.length(), intersection(communication, union_of(events, computing)).length()
        share = 100 * both / length if length else None
        if share is not None and compat is Compat.HTA:
            share = float(np.round(share, 2))
        rows.append([device, length / 1000, both / 1000, share])
    notes = () if rows else (NO_GPU,)
    if compat is Compat.HTA and not rows:
        rows.append([None, 0.0, 0.0, None])
    names = [column.name for column in comm_comp_overlap.columns]
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)}, notes)


def _hta_overlap(context: Context, events: GpuEvents, communicating: Flags, computing: Flags) -> tuple[int, int]:
    communication = merged_as_hta(context, events, communicating)
    computation = merged_as_hta(context, events, computing)
    running = sweep([(1, communication), (2, computation)], one_by_one=False)
    return communication.length(), int(running.lengths()[running.running == 3].sum())
