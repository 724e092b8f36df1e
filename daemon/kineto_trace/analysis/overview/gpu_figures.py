"""How busy each GPU was, in figures and over time: utilization, estimated SM efficiency and estimated occupancy.

The definitions are those of the TensorBoard profiler plug-in. Utilization: the share of a span in which at least one
kernel ran. Estimated SM efficiency: the mean over a span of min(blocks per multiprocessor of all running kernels, 1).
Estimated occupancy: the mean of the kernels' estimates, weighted by how long each ran inside the span.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.kernels.precision_views import LaunchFigures, launch_figures, tensor_use
from kineto_trace.analysis.overview.step_breakdown import host_ranges
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import Floats, Ints
from kineto_trace.formats.chrome.counter_tracks import CounterTrack
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor, vendor_of_properties
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, Table
from kineto_trace.structure.activity_links import device_properties
from kineto_trace.structure.nesting import unrecorded

NAN = float("nan")
MEMORY = "[memory]"  # name of the allocator's records
CUDA, HIP = 1, 6  # cpu_instant_event.device_type
UTILIZATION, SM_EFFICIENCY = "GPU utilization (computed)", "SM efficiency (estimated)"
MAX_BUCKETS = 100
US = 1000  # ns


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """The figures of one GPU. Shares are 0 to 1, occupancy 0 to 100; NaN and None mean unknown."""

    device: int
    name: str | None
    memory_bytes: int | None
    compute_capability: str | None
    kernels: int
    kernel_ns: int
    utilization: float
    busy: float
    sm_efficiency: float
    occupancy: float
    tensor_cores: float
    peak_memory_bytes: int | None


class TimeCourse(NamedTuple):
    """A value for each of some ordered spans of time; Unix ns."""

    start: Ints
    end: Ints
    value: Floats

    def mean(self, low: int, high: int, missing: Union | None = None) -> float:
        """Returns the mean over [low, high), 0 outside of its spans and in `missing`; NaN for an empty span or no
        spans.
        """
        start = np.clip(self.start, low, max(low, high))
        end = np.clip(self.end, start, max(low, high))
        inside = end - start if missing is None else end - start - missing.within(start, end)
        if high <= low or not inside.any():
            return float("nan")
        return float((inside * self.value).sum() / (high - low))


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureBasis:
    """What the figures of GPUs are computed from.

    span: start and end of the measured steps; None without steps.
    times: returns start and end of the rows of a table, in the unit of `span`.
    kernel_rows, tensor_cores, properties: by GPU.
    efficiency: returns the SM efficiency over time for blocks per multiprocessor, starts and ends of kernels.
    """

    span: tuple[int, int] | None
    times: Callable[[Table], tuple[Ints, Ints]]
    kernel_rows: Mapping[int, Ints]
    launches: LaunchFigures
    efficiency: Callable[[Floats, Ints, Ints], TimeCourse]
    tensor_cores: Mapping[int, float]
    properties: Mapping[int, Mapping[str, Any]]
    missing: Union | None = None  # time that the source of GPU activities does not cover

    def recorded(self, busy: Union) -> Union:
        """Returns the part of the union that lies in time that is covered."""
        return busy if self.missing is None else difference(busy, self.missing)

    def recorded_share(self) -> float:
        """Returns how much (0 to 1) of the span is covered."""
        if self.span is None or self.missing is None or self.span[1] <= self.span[0]:
            return 1.0
        return 1 - busy_share(self.missing, *self.span)


def kernel_rows(context: Context) -> dict[int, Ints]:
    """The rows of the table `kernel` of each GPU, by start."""
    table = context.trace.table("kernel")
    device = table["device"].astype(np.int64)
    order = np.argsort(table["start"], kind="stable")
    numbers = unique_values(device).tolist()
    return {number: order if len(numbers) == 1 else order[device[order] == number] for number in numbers}


def peak_memory(context: Context) -> dict[int, int]:
    """Returns the maximum of bytes that PyTorch's allocator had handed out on each GPU, from recorded allocations."""
    return {device: peak for (kind, device), peak in context.get(peaks_of_devices).items() if kind in (CUDA, HIP)}


def peaks_of_devices(context: Context) -> dict[tuple[int, int], int]:
    """Returns the same for every (type, number) of a device, CPUs included, in the order of their first record."""
    trace = context.trace
    table = trace.table("cpu_instant_event")
    named = [number for number in unique_values(table["name"]).tolist() if trace.strings[number] == MEMORY]
    rows = np.flatnonzero(np.isin(table["name"], named) & (table["total_allocated"] >= 0))
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    if not len(rows):
        return {}
    found = group([table["device_type"][rows], table["device"][rows]])
    highest = np.zeros(len(found), np.int64)
    np.maximum.at(highest, found.number, table["total_allocated"][rows])
    first = rows[found.first]
    keys = zip(table["device_type"][first].tolist(), table["device"][first].tolist(), strict=True)
    return dict(zip(keys, highest.tolist(), strict=True))


def is_count(value: Any) -> bool:
    """Returns whether a value from a file is a plausible count."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def global_memory(properties: Mapping[str, Any]) -> int | None:
    """Returns the bytes of a GPU's memory; None if unknown."""
    found = properties.get("totalGlobalMem")
    return found if is_count(found) else None


def gpu_figures(context: Context) -> list[GpuFigures]:
    """Returns the figures of every GPU with any activity."""
    devices = {device for kind in GPU_TABLES for device in unique_values(context.trace.table(kind)["device"]).tolist()}
    ranges = context.get(host_ranges)
    basis = FigureBasis(
        span=ranges.measured().span() or ranges.span(),
        times=unix_times,
        kernel_rows=context.get(kernel_rows),
        launches=context.get(launch_figures),
        efficiency=sm_efficiency,
        tensor_cores=context.get(tensor_use).by_device,
        properties=context.get(device_properties),
        missing=unrecorded(context.trace, GPU_TABLES),
    )
    return [figures_of(context, device, basis) for device in sorted(devices)]


def unix_times(table: Table) -> tuple[Ints, Ints]:
    """Returns start and end of each row of a table, Unix ns."""
    return table["start"], table.end()


def figures_of(context: Context, device: int, basis: FigureBasis) -> GpuFigures:
    """Returns the figures of one GPU."""
    table, figures = context.trace.table("kernel"), basis.launches
    rows = basis.kernel_rows.get(device, np.zeros(0, np.int64))
    start, end = (side[rows] for side in basis.times(table))
    span = basis.span or (0, 0)
    properties = basis.properties.get(device, {})
    share = basis.recorded_share() or NAN
    of_nvidia = vendor_of_properties(properties) in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)  # others count otherwise
    major, minor = (properties.get(name) if of_nvidia else None for name in ("computeMajor", "computeMinor"))
    return GpuFigures(
        device=device,
        name=None if properties.get("name") is None else str(properties["name"]),
        memory_bytes=global_memory(properties),
        compute_capability=None if major is None or minor is None else f"{major}.{minor}",
        kernels=len(rows),
        kernel_ns=int(table["duration"][rows].sum()),
        utilization=busy_share(basis.recorded(union(start, end)), *span) / share if basis.span else 0.0,
        busy=busy_share(basis.recorded(_any_activity(context, device, basis)), *span) / share,
        sm_efficiency=basis.efficiency(figures.blocks_per_sm[rows], start, end).mean(*span, basis.missing) / share,
        occupancy=weighted_mean(figures.occupancy[rows], start, end, *span),
        tensor_cores=basis.tensor_cores.get(device, NAN),
        peak_memory_bytes=context.get(peak_memory).get(device),
    )


def _any_activity(context: Context, device: int, basis: FigureBasis) -> Union:
    tables = [context.trace.table(kind) for kind in GPU_TABLES]
    times = [basis.times(table.take(table["device"] == device)) for table in tables]
    return union(np.concatenate([start for start, _ in times]), np.concatenate([end for _, end in times]))


def gpu_tracks(context: Context, start_ns: int, end_ns: int) -> list[CounterTrack]:
    """Returns the tracks of each GPU that ran kernels between these times (Unix ns); empty if none did.

    SM efficiency has a track if launch shapes and the GPU's properties are known; it is 0 between kernels. Utilization
    is missing where the GPU's source did not record.
    """
    start, end = (times.clip(start_ns, end_ns) for times in unix_times(context.trace.table("kernel")))
    blocks, missing = context.get(launch_figures).blocks_per_sm, unrecorded(context.trace, GPU_TABLES)
    found = []
    for device, rows in context.get(kernel_rows).items():
        busy = union(start[rows], end[rows])
        found.append(_track(device, UTILIZATION, utilization_course(busy, start_ns, end_ns, missing=missing)))
        efficiency = sm_efficiency(blocks[rows], start[rows], end[rows])
        if len(efficiency.start):
            found.append(_track(device, SM_EFFICIENCY, _without_gaps(efficiency)))
    return found


def _without_gaps(course: TimeCourse) -> TimeCourse:
    """Returns the course with 0 after each span that is not followed by another one at once."""
    last = np.flatnonzero(np.append(course.start[1:] != course.end[:-1], True))
    return TimeCourse(
        np.insert(course.start, last + 1, course.end[last]),
        np.insert(course.end, last + 1, np.append(course.start[1:], course.end[-1:])[last]),
        np.insert(course.value, last + 1, 0.0),
    )


def _track(device: int, name: str, course: TimeCourse) -> CounterTrack:
    known = np.isfinite(course.value)
    return CounterTrack(device=device, name=name, time=course.start[known], value=100 * course.value[known])


def busy_share(busy: Union, low: int, high: int) -> float:
    """Returns the share of [low, high) that the union covers; NaN for an empty span."""
    if high <= low:
        return float("nan")
    return int(busy.within(np.array([low]), np.array([high]))[0]) / (high - low)


def weighted_mean(value: Floats, start: Ints, end: Ints, low: int, high: int) -> float:
    """Returns the mean of the kernels' values, weighted by their time in [low, high); NaN if none has a value there."""
    weight = (np.minimum(end, high) - np.maximum(start, low)).clip(0)
    known = value >= 0  # excludes NaN
    total = int(weight[known].sum())
    return float((weight[known] * value[known]).sum() / total) if total else float("nan")


def sm_efficiency(blocks_per_sm: Floats, start: Ints, end: Ints) -> TimeCourse:
    """Returns min(sum of `blocks per SM` of the running kernels, 1) over time, where any such kernel runs.

    Kernels whose value is unknown or not positive do not count.
    """
    known = blocks_per_sm > 0
    start, end, value = start[known], end[known], blocks_per_sm[known]
    time = np.concatenate([start, end])
    order = np.argsort(time, kind="stable")  # starts before ends of the same time
    time = time[order]
    running = np.cumsum(np.repeat([1, -1], len(start))[order])
    total = np.cumsum(np.concatenate([value, -value])[order])
    lasting = np.flatnonzero((np.diff(time) > 0) & (running[:-1] > 0))
    return TimeCourse(time[lasting], time[lasting + 1], np.minimum(total[lasting], 1.0))


def utilization_course(busy: Union, low: int, high: int, us: int = US, missing: Union | None = None) -> TimeCourse:
    """Returns the busy share of each bucket of [low, high). us: how many units of these make a microsecond.

    Buckets are 1, 10, 100, … µs long, the shortest of these that gives at most 100 buckets; the last one takes the
    remainder. Only the time of a bucket outside of `missing` counts; NaN if there is none.
    """
    length = us
    while (high - low) / length > MAX_BUCKETS:
        length *= 10
    count = max((high - low) // length, 1)
    start = low + np.arange(count, dtype=np.int64) * length
    end = np.append(start[1:], max(high, low))
    if missing is None or not len(missing.start):
        return TimeCourse(start, end, busy.within(start, end) / np.maximum(end - start, 1))
    known = end - start - missing.within(start, end)
    share = np.full(count, np.nan)
    np.divide(difference(busy, missing).within(start, end), known, out=share, where=known > 0)
    return TimeCourse(start, end, share)
