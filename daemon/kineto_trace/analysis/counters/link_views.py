"""The view of what collectives make of NVLink and PCIe."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.counters.attribution import DeviceCounters, Grouping, attribute
from kineto_trace.analysis.counters.hardware_counter_views import as_columns, notes
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS, NVLINK, PCIE, sampled_counters
from kineto_trace.collectives.nccl import Collectives, bus_factor, collectives
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NO_LINKS = "the counters of NVLink and PCIe were not sampled: kinetoctl trace --counters=interconnect"
_LABELS = {"nvlink_received_gb_s": NVLINK[0], "nvlink_sent_gb_s": NVLINK[1], "pcie_read_gb_s": PCIE[0],
           "pcie_write_gb_s": PCIE[1]}  # fmt: skip

Floats = npt.NDArray[np.float64]


@view(
    "collective_counters",
    columns(
        ("collective", "text", "", "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, …"),
        ("process_group", "text", "", "name of the process group"),
        ("group_size", "int", "", "number of ranks in the group"),
        ("bytes", "int", "bytes", "size of the larger of the rank's two buffers (nccl-tests' size)"),
        ("device", "int", "", "GPU index in the process"),
        ("calls", "int", "", "number of kernels"),
        ("time_us", "float", "us", "sum of their durations, waiting for other ranks included"),
        ("busbw_gb_s", "float", "GB/s", "bus bandwidth of that time (nccl-tests); missing: the size is not known"),
        ("nvlink_received_gb_s", "float", "GB/s", "received over NVLink while they ran"),
        ("nvlink_sent_gb_s", "float", "GB/s", "sent over NVLink while they ran"),
        ("nvlink_pct", "float", "%", "nvlink_sent_gb_s by busbw_gb_s"),
        ("pcie_read_gb_s", "float", "GB/s", "read over PCIe while they ran, by whatever work"),
        ("pcie_write_gb_s", "float", "GB/s", "written over PCIe while they ran, by whatever work"),
        ("why", "text", "", "why values are missing"),
    ),
    nothing=NO_COUNTERS,
)
def collective_counters(context: Context) -> Answer:
    """What collectives of one rank move over NVLink and PCIe, beside their bus bandwidth, by kind and size.

    Values are found as in the view kernel_counters, but only collectives count as work: other kernels use NVLink as
    little as none. A ring sends about as many bytes over NVLink as the bus bandwidth says (nvlink_pct near 100); an
    all_reduce inside the switch (NVLS) about half; with less the way leads over PCIe or the network, or ranks wait.
    """
    found, told = context.get(collectives), notes(context)
    sampled = {track.label for track in context.get(sampled_counters)}
    if sampled and not sampled & {*NVLINK, *PCIE}:
        told.append(NO_LINKS)
    rows = [] if NO_LINKS in told or not sampled else _rows(context, found)
    if not rows and not told:
        told.append("the trace has no collectives on a GPU that has samples")
    return Answer(as_columns(collective_counters, rows), told)


def _rows(context: Context, found: Collectives) -> list[dict[str, Any]]:
    number = np.full(len(context.get(gpu)), -1, np.int64)
    number[found.place] = found.description
    names = [described.collective for described in found.descriptions]
    return [
        _row(context, found, number, device, row)
        for device in attribute(context, Grouping(number, names))
        for row in range(len(device.group))
    ]


def _row(
    context: Context, found: Collectives, number: npt.NDArray[np.int64], device: DeviceCounters, row: int
) -> dict[str, Any]:
    group = int(device.group[row])
    described, activity = found.descriptions[group], context.get(gpu)
    calls = int(np.count_nonzero((number == group) & (activity.device == device.device)))
    factor = bus_factor(described.collective, described.size) if described.size else float("nan")
    moved = float("nan") if described.bytes is None else described.bytes * calls * factor
    bus = moved / float(device.total_ns[row])  # bytes per ns are GB/s
    rates = {name: float(device.of(label)[row]) / 1e9 for name, label in _LABELS.items()}
    missing = [str(device.why[row, at]) for at, track in enumerate(device.tracks) if track.label in _LABELS.values()]
    return {
        "collective": described.collective,
        "process_group": described.group,
        "group_size": described.size,
        "bytes": described.bytes,
        "device": device.device,
        "calls": calls,
        "time_us": int(device.total_ns[row]) / 1000,
        "busbw_gb_s": bus,
        **rates,
        "nvlink_pct": 100 * rates["nvlink_sent_gb_s"] / bus if bus > 0 else None,
        "why": next(filter(None, missing), None),
    }
