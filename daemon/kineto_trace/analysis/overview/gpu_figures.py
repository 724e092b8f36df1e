"""The figures of each GPU: what it is, how busy it was, and how much memory the allocator gave out on it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.kernels.launch_occupancy import LaunchFigures, launch_figures
from kineto_trace.analysis.kernels.tensor_core_use import tensor_use
from kineto_trace.analysis.overview.gpu_utilization import Course, busy_share, sm_efficiency, weighted_mean
from kineto_trace.analysis.overview.step_breakdown import host_ranges
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor, vendor_of_properties
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, Table
from kineto_trace.structure.gpu_devices import device_properties
from kineto_trace.structure.recorded_time import unrecorded

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NAN = float("nan")
MEMORY = "[memory]"  # name of the allocator's records
CUDA, HIP = 1, 6  # cpu_instant_event.device_type


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


def kernel_rows(context: Context) -> dict[int, Ints]:
    """The rows of the table `kernel` of each GPU, by start."""
    table = context.trace.table("kernel")
    device = table["device"].astype(np.int64)
    order = np.argsort(table["start"], kind="stable")
    numbers = unique_values(device).tolist()
    return {number: order if len(numbers) == 1 else order[device[order] == number] for number in numbers}


def peak_memory(context: Context) -> dict[int, int]:
    """Returns the most bytes that PyTorch's allocator had handed out on each GPU, from recorded allocations."""
    return {device: peak for (kind, device), peak in context.get(peaks_of_devices).items() if kind in (CUDA, HIP)}


def peaks_of_devices(context: Context) -> dict[tuple[int, int], int]:
    """The same of every (type, number) of a device, CPUs too, in the order of their first record."""
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
    """Tells whether a value from a file is a plausible count."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def global_memory(properties: Mapping[str, Any]) -> int | None:
    """Returns the bytes of a GPU's memory; None if unknown."""
    found = properties.get("totalGlobalMem")
    return found if is_count(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What the figures of GPUs are computed from.

    span: start and end of the measured steps; None: there are no steps. times: returns start and end of the rows of a
    table, in the unit of `span`. kernel_rows, tensor_cores, properties: by GPU. efficiency: returns the SM efficiency
    over time for blocks per multiprocessor, starts and ends of kernels.
    """

    span: tuple[int, int] | None
    times: Callable[[Table], tuple[Ints, Ints]]
    kernel_rows: Mapping[int, Ints]
    launches: LaunchFigures
    efficiency: Callable[[Floats, Ints, Ints], Course]
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


def gpu_figures(context: Context) -> list[GpuFigures]:
    """Returns the figures of every GPU with any activity."""
    devices = {device for kind in GPU_TABLES for device in unique_values(context.trace.table(kind)["device"]).tolist()}
    ranges = context.get(host_ranges)
    basis = Basis(
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


def figures_of(context: Context, device: int, basis: Basis) -> GpuFigures:
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


def _any_activity(context: Context, device: int, basis: Basis) -> Union:
    tables = [context.trace.table(kind) for kind in GPU_TABLES]
    times = [basis.times(table.take(table["device"] == device)) for table in tables]
    return union(np.concatenate([start for start, _ in times]), np.concatenate([end for _, end in times]))
