"""HTA's figures in the views of how the GPU's time divides.

These are temporal_breakdown, comm_comp_overlap, kernel_type_breakdown, kernel_breakdown, memory_bandwidth and
memory_bandwidth_summary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.bandwidth_views import (
    bandwidth_columns,
    memory_bandwidth,
    memory_bandwidth_summary,
    summary_columns,
)
from kineto_trace.analysis.gpu_time.copy_bandwidth import COPY_TABLES, Bandwidths, kinds_of, summed
from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU, GpuEvents
from kineto_trace.analysis.gpu_time.kernel_breakdown_views import (
    by_class,
    kernel_breakdown,
    kernel_columns,
    kernel_type_breakdown,
    kernel_types,
    statistics_rows,
    together,
    type_columns,
)
from kineto_trace.analysis.gpu_time.temporal_views import (
    comm_comp_overlap,
    overlap_columns,
    temporal_breakdown,
    temporal_columns,
    temporal_row,
)
from kineto_trace.arrays.interval_sweep import Merged, merge, sweep
from kineto_trace.arrays.top_n import as_hta
from kineto_trace.compat.hta.hta_frame import KINDS, hta_frame
from kineto_trace.compat.hta.hta_gpu_events import hta_events
from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION, HTA_MEMORY, HTA_TYPES
from kineto_trace.model.context import Context
from kineto_trace.structure.event_arguments import argument
from kineto_trace.view_api.view import Answer, Compat

_STATED = "memory bandwidth (GB/s)"

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def _merged(context: Context, events: GpuEvents, chosen: Flags) -> Merged:
    """The time in which any of the chosen events ran."""
    start = events.start[chosen]
    return merge(start, events.end[chosen], context.get(hta_frame).order(start))


@temporal_breakdown.variant(Compat.HTA)
def hta_temporal_breakdown(context: Context) -> Answer:
    """compat=hta: the figures of get_temporal_breakdown.

    There is one row for all devices together. cuda_sync events count as busy time, HTA's patterns tell the kernel
    types, percentages have two digits, and HTA's loading rules apply (last step dropped, whole microseconds).
    """
    events = context.get(hta_events)
    if not len(events):
        return temporal_columns([])
    ran = _merged(context, events, np.ones(len(events), np.bool_))
    compute = _merged(context, events, events.type == HTA_COMPUTATION).length()
    return temporal_columns([temporal_row(None, int(ran.end[-1] - ran.start[0]), ran.length(), compute, digits=2)])


@comm_comp_overlap.variant(Compat.HTA)
def hta_comm_comp_overlap(context: Context) -> Answer:
    """compat=hta: the figures of get_comm_comp_overlap.

    Kernel types follow HTA's patterns, which miss ncclDevKernel in the middle of a name and take all names that begin
    with hip. Without GPU events there is one row with zeros, as in HTA.
    """
    events = context.get(hta_events)
    communication = _merged(context, events, events.type == HTA_COMMUNICATION)
    computation = _merged(context, events, events.type == HTA_COMPUTATION)
    running = sweep([(1, communication), (2, computation)], one_by_one=False)
    length, both = communication.length(), int(running.lengths()[running.running == 3].sum())
    share = float(np.round(100 * both / length, 2)) if length else None
    return overlap_columns([[None, length / 1000, both / 1000, share]], () if len(events) else (NO_GPU,))


def _all_ranks(partials: Sequence[tuple[int, dict[str, int]]]) -> Answer:
    return type_columns([(None, together(partials))], digits=1)


@kernel_type_breakdown.variant(Compat.HTA, reduce=_all_ranks)
def hta_kernel_type_breakdown(context: Context, *, include_memory: bool = True) -> dict[str, int]:
    """compat=hta: the first table of get_gpu_kernel_breakdown.

    It has the sums over all ranks, types by HTA's patterns, and shares with one digit.
    """
    events = context.get(hta_events)
    merged = [_merged(context, events, events.type == number) for number in kernel_types(include_memory)]
    return by_class(sweep([(1 << place, each) for place, each in enumerate(merged)], one_by_one=True))


@kernel_breakdown.variant(Compat.HTA)
def hta_kernel_breakdown(
    context: Context, *, duration_ratio: float = 0.8, num_kernels: int = 10, include_memory: bool = True
) -> Answer:
    """compat=hta: the second table of get_gpu_kernel_breakdown.

    Rows are sorted by type and name. The quantile of running sums decides which kernels become one row, whose
    statistics are then those of the sums.
    """
    events = context.get(hta_events)
    duration = (events.end - events.start) / 1000
    rows: list[dict[str, Any]] = []
    for number in sorted(kernel_types(include_memory), key=lambda type_: HTA_TYPES[type_]):
        chosen = events.type == number
        group = events.name[chosen].astype(np.int64)
        table = as_hta(group, duration[chosen], context.trace.strings, ratio=duration_ratio, limit=num_kernels)
        found = [{"kernel_type": HTA_TYPES[number], **row} for row in statistics_rows(table)]
        rows += sorted(found, key=lambda row: str(row["name"]))
    return kernel_columns(rows)


@memory_bandwidth.variant(Compat.HTA)
def hta_memory_bandwidth(context: Context) -> Answer:
    """compat=hta: the figures of get_memory_bw_time_series: the bandwidth that the file states, over rounded times."""
    return bandwidth_columns(context.get(hta_bandwidths))


@memory_bandwidth_summary.variant(Compat.HTA)
def hta_memory_bandwidth_summary(context: Context) -> Answer:
    """compat=hta: the figures of get_memory_bw_summary."""
    return summary_columns(context.get(hta_bandwidths))


def hta_bandwidths(context: Context) -> Bandwidths:
    """The bandwidths as HTA sums them.

    It does not tell devices apart, takes the bandwidth that the file states, lets copies of 0 us last 1 us, and keeps
    what the sums of floats leave behind when nothing runs any more.
    """
    frame, events = context.get(hta_frame), context.get(hta_events)
    rows = np.flatnonzero(events.type == HTA_MEMORY)
    kinds, kind = kinds_of(context, events.name[rows])
    value = np.zeros(len(rows))
    for table_kind in COPY_TABLES:
        chosen = np.flatnonzero(frame.kind[events.row[rows]] == KINDS.index(table_kind))
        value[chosen] = _stated(context, table_kind)[frame.row[events.row[rows[chosen]]]]
    start, end = events.start[rows], events.end[rows]
    end = np.where(end == start, start + 1000, end)
    time = np.concatenate([start, end])
    order = np.argsort((time - frame.origin_ns).astype(np.float64), kind="quicksort")
    kind = np.tile(kind, 2)[order]
    order, kind = order[by_kind := np.argsort(kind, kind="stable")], kind[by_kind]
    device = np.full(len(order), -1, np.int64)
    found = summed(time[order], device, kind, kinds, np.concatenate([value, -value])[order], frame.origin_ns)
    return replace(found, by_device=False)


def _stated(context: Context, kind: str) -> Floats:
    """The bandwidths that the rows of a file state; of captures what the exporter would state."""
    table = context.trace.table(kind)
    computed: Floats = table["bytes"] / np.maximum(table["duration"], 1)
    if not table.origin:
        return computed
    stated: Floats = np.nan_to_num(argument(context, kind, _STATED))
    return stated
