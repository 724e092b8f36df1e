"""How busy each GPU was, in figures and over time, and what it can do. Figures: utilization, SM efficiency, occupancy.

The definitions are those of the TensorBoard profiler plug-in. Utilization: the share of a span in which at least one
kernel ran. Estimated SM efficiency: the mean over a span of min(blocks per multiprocessor of all running kernels, 1).
Estimated occupancy: the mean of the kernels' estimates, weighted by how long each ran inside the span.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.host_time.moment_classes import optimizer_name
from kineto_trace.analysis.kernels.precision_views import LaunchFigures, launch_figures, tensor_use
from kineto_trace.analysis.overview.step_breakdown import host_ranges
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import Floats, Ints
from kineto_trace.formats.chrome.counter_tracks import CounterTrack
from kineto_trace.kernel_traits.gpu_vendors import WORDS, GpuVendor, VendorWords, vendor_of_properties
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, Table
from kineto_trace.structure.activity_links import device_properties, gpu_vendor
from kineto_trace.structure.nesting import unrecorded

NAN = float("nan")
MEMORY = "[memory]"  # name of the allocator's records
CUDA, HIP = 1, 6  # cpu_instant_event.device_type
UTILIZATION, SM_EFFICIENCY = "GPU utilization (computed)", "SM efficiency (estimated)"
MAX_BUCKETS = 100
US = 1000  # ns
TENSOR_CORES, BFLOAT16, FLOAT8, COMPILES = (7, 0), (8, 0), (8, 9), (7, 0)
FAST_DOUBLE = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))  # NVIDIA GPUs that compute float64 at half the speed of float32
HALF_SPEED, SLOW_DOUBLE = 2.0, 32.0  # times as long as float32; some other NVIDIA GPUs take 64 times
COMPILING_TORCH = (2, 0)
FULL = 0.8  # of the memory: above this no larger batch is advised
_TORCH = re.compile(r"torch\D{0,20}(\d{1,9})\.(\d{1,9})")


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


# What the GPUs of a trace can do, so that advice suits them.
# Theory of operation
# For NVIDIA, the compute capability decides: tensor cores multiply float16 from 7.0 on, bfloat16 and TF32 from 8.0
# on, float8 from 8.9 on; Triton, and so torch.compile, needs 7.0. AMD's numbers mean something else (gfx90a is 9.0),
# so advice is limited to what all Instinct GPUs can do. structure/activity_links.py finds the vendor; for others than
# NVIDIA and AMD, graphs are not advised. If a process has several GPUs, the least capable one counts. torch.compile
# also needs PyTorch 2; kinetod's own captures contain the version.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAbilities:
    """capability: of NVIDIA's GPUs; None if unknown.

    full: share of memory in use, if known.
    torch: major and minor version of PyTorch, if known.
    jax: whether the program uses JAX.
    optimizes: whether an optimizer of PyTorch was seen.
    """

    vendor: GpuVendor
    capability: tuple[int, int] | None
    full: float | None
    torch: tuple[int, int] | None = None
    jax: bool = False
    optimizes: bool = False

    @property
    def words(self) -> VendorWords:
        """Returns the vendor's terms."""
        return WORDS[self.vendor]

    @property
    def tensor_cores(self) -> bool:
        """Returns whether it has tensor cores (or AMD's matrix cores), and names of kernels show their use."""
        return self.vendor is GpuVendor.AMD or (self.capability is not None and self.capability >= TENSOR_CORES)

    @property
    def double_ratio(self) -> float:
        """Returns the ratio of float64 to float32 time, at least; 2 if unknown."""
        slow = (
            self.capability is not None and self.capability >= min(FAST_DOUBLE) and self.capability not in FAST_DOUBLE
        )
        return SLOW_DOUBLE if slow else HALF_SPEED

    def precision(self) -> str:
        """Returns which types of numbers to use for matrix products; "" if tensor cores are not known."""
        sizes = "; matrix sizes should be multiples of 8."
        if self.vendor in (GpuVendor.AMD, GpuVendor.INTEL):
            return "Use bfloat16 or float16 (torch.autocast)" + sizes
        if self.capability is None or self.capability < TENSOR_CORES:
            return ""
        if self.capability < BFLOAT16:
            return (
                "Use float16 (torch.autocast(dtype=torch.float16) with a GradScaler): the tensor cores of this GPU "
                f"(compute capability {_text(self.capability)}) support neither bfloat16 nor TF32" + sizes
            )
        advice = (
            "Use bfloat16 or float16 (torch.autocast), or TF32 for float32 (torch.set_float32_matmul_precision('high'))"
        )
        if self.capability >= FLOAT8:
            advice += ", or float8 for the largest products (torchao, Transformer Engine)"
        return advice + sizes

    def no_compiler(self) -> str:
        """Returns why torch.compile cannot be used; "" if nothing is known against it."""
        if self.capability is not None and self.capability < COMPILES:
            return (
                f"torch.compile needs compute capability {_text(COMPILES)}, but this GPU has {_text(self.capability)}"
            )
        if self.torch is not None and self.torch < COMPILING_TORCH:
            return f"torch.compile needs PyTorch {_text(COMPILING_TORCH)}, but this is {_text(self.torch)}"
        return ""

    def fusing(self) -> str:
        """Returns the advice for fewer kernels."""
        if self.jax:
            return "Put more of the step into one jax.jit: XLA fuses such operations within a compiled function."
        optimizers = "fused optimizers, " if self.optimizes else ""
        others = f"fused operators ({optimizers}F.scaled_dot_product_attention, fused norms and activations)"
        reason = self.no_compiler()
        return f"Use {others}: {reason}." if reason else f"torch.compile can fuse such kernels; otherwise use {others}."

    def fewer_launches(self) -> str:
        """Returns the advice for fewer launches."""
        if self.jax:
            return (
                "Give the GPU more work per launch: jax.jit around the whole step, several steps in one jax.lax.scan, "
                "and less Python between calls."
            )
        tools = [
            *([] if self.no_compiler() else ["torch.compile"]),
            *([self.words.graphs] if self.words.graphs else []),
        ]
        ways = [
            *([" or ".join(tools)] if tools else []),
            *([] if self.full is not None and self.full > FULL else ["a larger batch"]),
            *(["fused optimizers (fused=True)"] if self.optimizes else []),
            "fewer tiny operators and less Python between them",
        ]
        return f"Give the GPU more work per launch: {', '.join(ways)}."

    def shorter_pauses(self) -> str:
        """Returns the advice for shorter pauses between kernels that were launched ahead of time."""
        graphs = f", or {self.words.graphs}, in which kernels follow each other faster" if self.words.graphs else ""
        return f"Run fewer, longer kernels: fused operators, larger tensors{graphs}."


def gpu_abilities(context: Context) -> GpuAbilities:
    """Returns the abilities of the GPUs that worked in the trace."""
    properties, peaks = context.get(device_properties), context.get(peak_memory)
    used = set(context.trace.table("kernel")["device"].tolist()) or set(properties)
    known = [properties[number] for number in sorted(used) if number in properties]
    vendor = context.get(gpu_vendor)
    nvidia = vendor in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)
    capabilities = [found for found in map(_capability, known) if found is not None]
    shares = [
        peaks[number] / memory
        for number in used & set(peaks) & set(properties)
        if (memory := global_memory(properties[number]))
    ]
    return GpuAbilities(
        vendor=vendor,
        capability=min(capabilities) if capabilities and nvidia else None,
        full=max(shares) if shares else None,
        torch=_torch_version(context.trace.target.framework),
        jax=context.trace.target.framework.startswith("jax"),
        optimizes=bool(optimizer_name(context)),
    )


def _capability(properties: Mapping[str, Any]) -> tuple[int, int] | None:
    major: Any = properties.get("computeMajor")
    minor: Any = properties.get("computeMinor", 0)
    return (major, minor) if is_count(major) and is_count(minor) else None


def _torch_version(framework: str) -> tuple[int, int] | None:
    match = _TORCH.search(framework)
    return (int(match[1]), int(match[2])) if match else None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
