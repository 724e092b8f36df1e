"""How the GPU's time divides: idle, computing, anything else; and how much communication hides behind computation."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU, GpuEvents, gpu_events
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Flags = npt.NDArray[np.bool_]
Row = list[float | None]


def union_of(events: GpuEvents, chosen: Flags) -> Union:
    """The time in which any of the chosen events ran."""
    return union(events.start[chosen], events.end[chosen])


def devices_of(events: GpuEvents) -> list[tuple[int, Flags]]:
    """Which events ran on each device."""
    return [(device, events.device == device) for device in unique_values(events.device).tolist()]


@view(
    "temporal_breakdown",
    columns(
        ("device", "int", "", "GPU index in the process; missing with compat=hta, which adds all GPUs up"),
        ("idle_us", "float", "us", "time in which no event ran"),
        ("compute_us", "float", "us", "time in which at least one computing kernel ran"),
        ("non_compute_us", "float", "us", "time in which only communication, copies and fills ran"),
        ("kernel_time_us", "float", "us", "from the first start to the last end: the sum of the three above"),
        ("idle_pct", "float", "%", "share of kernel_time_us"),
        ("compute_pct", "float", "%", "share of kernel_time_us"),
        ("non_compute_pct", "float", "%", "share of kernel_time_us"),
    ),
)
def temporal_breakdown(context: Context) -> Answer:
    """Idle, computing and other time of each GPU between its first and its last event.

    Computing time is the union of all kernels that do not communicate (by name: nccl, rccl). Idle time is the time
    outside the union of all kernels, copies and fills.
    """
    events = context.get(gpu_events)
    rows: list[Row] = []
    for device, chosen in devices_of(events):
        computing = chosen & (events.type == HTA_COMPUTATION)
        ran = union_of(events, chosen)
        whole = int(ran.end[-1] - ran.start[0])
        rows.append(temporal_row(device, whole, ran.length(), union_of(events, computing).length()))
    return temporal_columns(rows)


def temporal_row(device: int | None, whole: int, busy: int, compute: int, digits: int | None = None) -> Row:
    """One row of the view temporal_breakdown, from times in ns. digits: what shares are rounded to."""
    parts = [whole - busy, compute, busy - compute]
    shares = [100 * part / whole if whole else float("nan") for part in parts]
    if digits is not None:
        shares = [float(np.round(share, digits)) for share in shares]
    return [device, *(part / 1000 for part in (*parts, whole)), *shares]


def temporal_columns(rows: Sequence[Row]) -> Answer:
    """The columns of the view temporal_breakdown."""
    names = [column.name for column in temporal_breakdown.columns]
    notes = () if rows else (NO_GPU,)
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)}, notes)


@view(
    "comm_comp_overlap",
    columns(
        ("device", "int", "", "GPU index in the process; missing with compat=hta, which adds all GPUs up"),
        ("communication_us", "float", "us", "time in which at least one communication kernel ran"),
        ("overlapped_us", "float", "us", "part of it in which a computing kernel ran as well"),
        ("overlap_pct", "float", "%", "share of the communication time; missing without communication"),
    ),
)
def comm_comp_overlap(context: Context) -> Answer:
    """How much of the communication time of each GPU overlaps with computing kernels.

    Communication kernels are recognized by their names (nccl, rccl, in all versions).
    """
    events = context.get(gpu_events)
    rows: list[Row] = []
    for device, chosen in devices_of(events):
        communicating = chosen & (events.type == HTA_COMMUNICATION)
        computing = chosen & (events.type == HTA_COMPUTATION)
        communication = union_of(events, communicating)
        length, both = communication.length(), intersection(communication, union_of(events, computing)).length()
        rows.append([device, length / 1000, both / 1000, 100 * both / length if length else None])
    return overlap_columns(rows, () if rows else (NO_GPU,))


def overlap_columns(rows: Sequence[Row], notes: Sequence[str]) -> Answer:
    """The columns of the view comm_comp_overlap."""
    names = [column.name for column in comm_comp_overlap.columns]
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)}, notes)
