"""What limits each kernel and operator, by the measured use of memory and of the compute units, and what slows a GPU.

Theory of operation
    The larger of the two uses decides, if it is BOUND or more. If both are lower, the GPU waits: for data, for other
    instructions, or for blocks that are missing. This is the rule by which Nsight Compute detects latency ("throughput
    below 60 % of peak typically indicates latency issues"). A verdict needs all counters that could contradict it:
    memory-bound and compute-bound need the one that is high, latency-bound needs DRAM and all units that the work may
    use. These are the tensor pipe and the ordinary cores (FMA pipe or instructions). The latter do not matter for
    kernels that multiply on tensor cores (by name, or because they use a tensor pipe), and neither unit matters for
    copies and fills. Where the multiprocessors are busy for less than BOUND, there is too little work, whatever it
    uses.

    Work that is limited by a link (collectives, copies between host and GPU) has no verdict here.

    Bytes per second come from counters of bytes, else from DRAM's percentage of the peak bandwidth in this GPU's data
    sheet (kernel_traits/gpu_vendors.py). FLOP/s are the tensor pipe's percentage of the peak for the kernel's
    precision: this assumes the data sheet's clock; at a lower clock the true figure is lower.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from kineto_trace.analysis.counters.attribution import DeviceCounters
from kineto_trace.analysis.counters.hardware_counter_views import by_kernel, by_op, gpu_steps, notes
from kineto_trace.analysis.counters.sampled_counters import (
    DRAM,
    DRAM_BYTES,
    FMA,
    GPC_CLOCK,
    GPU_BUSY,
    INSTRUCTIONS,
    MEMORY_CLOCK,
    NO_COUNTERS,
    OCCUPANCY,
    PCIE,
    POWER,
    POWER_LIMIT,
    SM_BUSY,
    SM_CLOCK,
    TEMPERATURE,
    TENSOR,
    THROTTLED,
    SampledCounter,
    interval_means,
    left_out_note,
    sampled_counters,
    tracks_of,
)
from kineto_trace.analysis.kernels.precision_views import activity_precisions
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.arrays.row_groups import group as grouped
from kineto_trace.base.array_types import Floats, Ints
from kineto_trace.kernel_traits.gpu_vendors import GpuPeaks, GpuVendor, gpu_peaks
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.precisions import PRECISIONS, UNKNOWN, precision_name, uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, device_properties, gpu, gpu_vendor, owners
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

MEMORY_BOUND, COMPUTE_BOUND, LATENCY_BOUND = "memory-bound", "compute-bound", "latency-bound"
NOT_KNOWN = "not known"
VERDICTS = (NOT_KNOWN, MEMORY_BOUND, COMPUTE_BOUND, LATENCY_BOUND)
BOUND = 60.0  # % of peak
PIPE_USED = 5.0  # % of the tensor pipe: from here on, the kernel multiplies with it
MOSTLY = 0.5  # share of a group's time
_ON_DEVICE = re.compile(r"^(?!.*(?:PtoP|PeerToPeer)).*(?:DtoD|Device -> Device|DeviceToDevice)|^Memset", re.IGNORECASE)
_FP32, _TF32 = PRECISIONS.index("fp32"), PRECISIONS.index("tf32")
NAN = float("nan")
By = Literal["kernel", "op"]
NO_CLOCKS = "power and clocks were not sampled, though other counters were"
# As measured: tests/gpu/counters_proof.py.
OWN_POWER = (
    "sampling hardware counters itself draws power (32 W on an H200), so work at the power limit was about 1 % slower"
)
_TOGETHER = 1.5  # sample lengths: spans that begin this soon after the previous one are joined to it
_CLOCKS = frozenset((POWER, POWER_LIMIT, SM_CLOCK, GPC_CLOCK, MEMORY_CLOCK, TEMPERATURE, *THROTTLED))
_SAMPLED = frozenset((GPU_BUSY, SM_BUSY, DRAM, TENSOR, *DRAM_BYTES, *PCIE))  # one of them is in each set


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTraits:
    """What is known about a group of GPU activities apart from its counters.

    link: whether the speed of a link limits it.
    moves: copies and fills on the GPU, which compute nothing.
    multiplies: on tensor cores, by the names of its kernels.
    precision: a key of kernel_traits/precisions.py; None if unknown.
    """

    link: bool = False
    moves: bool = False
    multiplies: bool = False
    precision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitUse:
    """Percentages of peak; NaN if there is no value.

    cores: the larger one of the FMA pipe and instructions.
    """

    dram: float = NAN
    tensor: float = NAN
    cores: float = NAN
    sm_busy: float = NAN
    occupancy: float = NAN

    @property
    def compute(self) -> float:
        """Returns the highest use of the compute units; NaN if none is known."""
        return float(np.fmax(self.tensor, self.cores))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoofPoint:
    """One group on one GPU. Rates in bytes/s and FLOP/s; NaN if unknown.

    group: as in the grouping.
    verdict: one of VERDICTS.
    why: the numbers behind the verdict, or what is missing.
    """

    device: int
    group: int
    time_ns: int
    use: UnitUse
    dram_error: float
    traits: WorkTraits
    bytes_s: float
    peak_bytes_s: float
    flop_s: float
    peak_flop_s: float
    verdict: str
    why: str

    @property
    def intensity(self) -> float:
        """Returns FLOP per byte of DRAM; NaN if unknown."""
        return self.flop_s / self.bytes_s if self.bytes_s > 0 else NAN


def roofline_verdict(use: UnitUse, traits: WorkTraits) -> tuple[str, str]:
    """Returns the verdict and the numbers behind it."""
    if traits.link:
        return NOT_KNOWN, "it moves data over a link: see the view collective_counters"
    said = ", ".join(
        f"{name} {value:.3g} %"
        for name, value in (
            ("DRAM", use.dram),
            ("tensor pipe", use.tensor),
            ("ordinary cores", use.cores),
            ("SM busy", use.sm_busy),
        )
        if not np.isnan(value)
    )
    if not said:
        return NOT_KNOWN, "no counter of DRAM or of a compute unit has a value"
    if np.fmax(use.dram, use.compute) >= BOUND:
        return (MEMORY_BOUND if use.dram >= np.fmax(use.compute, BOUND) else COMPUTE_BOUND), f"{said} of peak"
    if np.isnan(use.dram):
        return NOT_KNOWN, f"{said}; DRAM has no value"
    if use.sm_busy < BOUND:
        return LATENCY_BOUND, f"{said}: too little work for the multiprocessors"
    if traits.moves or not np.isnan(use.cores) or use.tensor >= PIPE_USED or (traits.multiplies and use.tensor >= 0):
        if not traits.moves and np.isnan(use.tensor):
            return NOT_KNOWN, f"{said}; the tensor pipe has no value"
        return LATENCY_BOUND, f"{said} of peak, each below {BOUND:g} %"
    return NOT_KNOWN, f"{said}; the use of ordinary cores is unknown: sample it with kinetoctl trace --counters=tensor"


def kernel_roofline(context: Context) -> tuple[RoofPoint, ...]:
    """Returns the kernels, copies and fills by name on each GPU that has samples, those with the most time first."""
    return _points(context, context.get(by_kernel), context.get(gpu).name.astype(np.int64))


def op_roofline(context: Context) -> tuple[RoofPoint, ...]:
    """Returns the operators on each GPU that has samples. The last group is work without an operator."""
    name = context.get(owners)
    return _points(context, context.get(by_op), np.where(name >= 0, name, len(context.trace.strings)))


def _points(context: Context, devices: tuple[DeviceCounters, ...], number: Ints) -> tuple[RoofPoint, ...]:
    found = [point for device in devices for point in _of_device(context, device, number)]
    return tuple(sorted(found, key=lambda point: -point.time_ns))


def _of_device(context: Context, found: DeviceCounters, number: Ints) -> Iterator[RoofPoint]:
    item = context.get(device_properties).get(found.device, {})
    memory = item.get("totalGlobalMem")
    name = item.get("name")
    peaks = gpu_peaks(str(name) if name else None, memory if isinstance(memory, int) else None)
    traits = _traits(context, found.device, number)
    read, written = (found.of(label) for label in DRAM_BYTES)
    uses = {label: found.of(label) for label in (DRAM, TENSOR, FMA, INSTRUCTIONS, SM_BUSY, OCCUPANCY)}
    error = found.error_of(DRAM)
    for row, group in enumerate(found.group.tolist()):
        own, moved = traits[group], float(read[row] + written[row])
        dram = float(uses[DRAM][row])
        peak = peaks.memory * 1e9 if peaks else NAN
        if np.isnan(dram):
            dram = 100 * moved / peak
        use = UnitUse(
            dram=dram,
            tensor=float(uses[TENSOR][row]),
            cores=float(np.fmax(uses[FMA][row], uses[INSTRUCTIONS][row])),
            sm_busy=float(uses[SM_BUSY][row]),
            occupancy=float(uses[OCCUPANCY][row]),
        )
        own = _with_tf32(context, own, use)
        verdict, why = roofline_verdict(use, own)
        if verdict == NOT_KNOWN and not own.link and np.isnan(found.value[row]).all():
            why = str(found.why[row, 0]) if found.tracks else why
        most = _peak(peaks, own.precision)
        yield RoofPoint(
            device=found.device,
            group=group,
            time_ns=int(found.total_ns[row]),
            use=use,
            dram_error=float(error[row]),
            traits=own,
            bytes_s=moved if not np.isnan(moved) else dram / 100 * peak,
            peak_bytes_s=peak,
            flop_s=use.tensor / 100 * most if use.tensor >= 1 else NAN,
            peak_flop_s=most,
            verdict=verdict,
            why=why,
        )


def _with_tf32(context: Context, traits: WorkTraits, use: UnitUse) -> WorkTraits:
    """Counts fp32 as tf32 on NVIDIA's tensor cores."""
    nvidia = context.get(gpu_vendor) in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)
    if traits.precision != PRECISIONS[_FP32] or not use.tensor >= PIPE_USED or not nvidia:
        return traits
    return WorkTraits(link=traits.link, moves=traits.moves, multiplies=traits.multiplies, precision=PRECISIONS[_TF32])


def _peak(peaks: GpuPeaks | None, precision: str | None) -> float:
    return 1e12 * peaks.tflops.get(precision, NAN) if peaks and precision else NAN


def _traits(context: Context, device: int, number: Ints) -> dict[int, WorkTraits]:
    """Returns the traits of each group, by the kernels with most of its time."""
    activity, strings = context.get(gpu), context.trace.strings
    rows = np.flatnonzero((activity.device == device) & (number >= 0))
    took = np.maximum(activity.end - activity.start, 0)[rows].astype(np.float64)
    groups = grouped([number[rows]]) if len(rows) else None
    if groups is None:
        return {}
    local = matches(strings, _ON_DEVICE)[activity.name[rows]]
    copy = activity.kind[rows] != KERNEL
    flags = {
        "link": activity.communication[rows] | (copy & ~local),
        "moves": copy & local,
        "multiplies": context.get(uses_tensor_cores)[activity.name[rows]],
    }
    whole = np.bincount(groups.number, took, len(groups))
    mostly = {key: np.bincount(groups.number, took * flag, len(groups)) > MOSTLY * whole for key, flag in flags.items()}
    precision = context.get(activity_precisions)[rows] - UNKNOWN
    kinds = len(PRECISIONS) - UNKNOWN
    table = np.bincount(groups.number * kinds + precision, took, len(groups) * kinds).reshape(-1, kinds)
    most = table.argmax(axis=1) + UNKNOWN
    return {
        int(key): WorkTraits(
            **{name: bool(flag[place]) for name, flag in mostly.items()}, precision=precision_name(int(most[place]))
        )
        for place, key in enumerate(number[rows][groups.first].tolist())
    }


def activity_verdicts(context: Context) -> Ints:
    """Returns for each GPU activity the verdict on kernels of its name on its GPU: number into VERDICTS."""
    numbers = {verdict: float(place) for place, verdict in enumerate(VERDICTS)}
    found = _by_activity(context, {(point.device, point.group): numbers[point.verdict]
                                   for point in context.get(kernel_roofline)})  # fmt: skip
    return np.nan_to_num(found, nan=0.0).astype(np.int64)


def activity_use(context: Context) -> dict[str, Floats]:
    """Returns for each GPU activity the use by kernels of its name on its GPU, by the fields of UnitUse; NaN if
    unknown.
    """
    points = context.get(kernel_roofline)
    return {
        name: _by_activity(context, {(point.device, point.group): getattr(point.use, name) for point in points})
        for name in UnitUse.__slots__
    }


def _by_activity(context: Context, values: dict[tuple[int, int], float]) -> Floats:
    activity = context.get(gpu)
    found = np.full(len(activity), np.nan)
    for device in {device for device, _ in values}:
        of_name = np.full(len(context.trace.strings), np.nan)
        for (place, name), value in values.items():
            if place == device:
                of_name[name] = value
        own = activity.device == device
        found[own] = of_name[activity.name[own]]
    return found


@view(
    "roofline",
    columns(
        ("name", "text", "", "kernel, copy or fill; with by=op the operator, missing for work without one"),
        ("device", "int", "", "GPU index in the process"),
        ("time_us", "float", "us", "sum of the durations of its GPU activities"),
        ("share_pct", "float", "%", "share of the time of all activities of this GPU"),
        ("verdict", "text", "", "memory-bound, compute-bound, latency-bound or not known"),
        ("why", "text", "", "numbers behind the verdict, or what is missing for one"),
        ("dram_pct", "float", "%", "use of the memory, as a share of its peak"),
        ("dram_error_pct", "float", "%", "95 % interval of dram_pct, plus or minus, in points"),
        ("dram_gb_s", "float", "GB/s", "bytes read and written per second: counted, or else dram_pct of the peak"),
        ("peak_gb_s", "float", "GB/s", "peak memory bandwidth of this GPU, from its data sheet"),
        ("tensor_pct", "float", "%", "use of the tensor pipe, as a share of its peak"),
        ("cores_pct", "float", "%", "use of ordinary cores: FMA pipe or instructions, whichever is larger"),
        ("compute_pct", "float", "%", "the larger of tensor_pct and cores_pct"),
        ("sm_busy_pct", "float", "%", "share of the time in which a multiprocessor has work"),
        ("occupancy_pct", "float", "%", "warps on multiprocessors that have work, as a share of the maximum"),
        ("precision", "text", "", "precision of its computation, from the kernel's name or the operator's inputs"),
        (
            "speed_tflop_s",
            "float",
            "TFLOP/s",
            "rate that corresponds to tensor_pct in that precision, at the data sheet's clock",
        ),
        ("peak_tflop_s", "float", "TFLOP/s", "peak of this GPU in that precision, from its data sheet"),
        ("intensity_flop_byte", "float", "FLOP/byte", "speed_tflop_s divided by dram_gb_s"),
    ),
    nothing=NO_COUNTERS,
)
def roofline(context: Context, *, by: By = "kernel") -> Answer:
    """What limits each kernel or operator, as measured: memory, computing, or neither (latency).

    Counters are those of the views kernel_counters and op_counters. If DRAM or the compute units reach 60 % of their
    peak, the higher one decides; the threshold is that of Nsight Compute's rule for latency. If neither reaches it, the
    row is latency-bound. That verdict needs a value for DRAM. If multiprocessors have work for at least 60 % of the
    time, it also needs one for every unit that the work may use: the tensor pipe and, except for kernels that multiply
    on tensor cores, ordinary cores (kinetoctl trace --counters=tensor). Without these values, the verdict is "not
    known", as it is for collectives and copies between host and GPU, which are limited by a link (view
    collective_counters).

    Options:
    - by: kernel, or op for operators.
    """
    found = context.get(kernel_roofline if by == "kernel" else op_roofline)
    strings, total = context.trace.strings, dict[int, int]()
    for point in found:
        total[point.device] = total.get(point.device, 0) + point.time_ns
    rows = [
        {
            "name": strings[point.group] if point.group < len(strings) else None,
            "device": point.device,
            "time_us": point.time_ns / 1000,
            "share_pct": 100 * point.time_ns / total[point.device],
            "verdict": point.verdict,
            "why": point.why,
            "dram_pct": point.use.dram,
            "dram_error_pct": point.dram_error,
            "dram_gb_s": point.bytes_s / 1e9,
            "peak_gb_s": point.peak_bytes_s / 1e9,
            "tensor_pct": point.use.tensor,
            "cores_pct": point.use.cores,
            "compute_pct": point.use.compute,
            "sm_busy_pct": point.use.sm_busy,
            "occupancy_pct": point.use.occupancy,
            "precision": point.traits.precision,
            "speed_tflop_s": point.flop_s / 1e12,
            "peak_tflop_s": point.peak_flop_s / 1e12,
            "intensity_flop_byte": point.intensity,
        }
        for point in found
    ]
    told = notes(context)
    if rows and np.isnan([point.peak_bytes_s for point in found]).all():
        told.append("rates are missing: this version of kinetod does not know the peak rates of this GPU")
    return roofline.answer(rows, told)


# The views of power, clocks, temperature and throttling of GPUs.


class Throttling(NamedTuple):
    """Time (Unix ns) in which a GPU ran slower than it could. reason: power, heat or hardware."""

    reason: str
    spans: Union


def throttling(context: Context, device: int) -> tuple[Throttling, ...]:
    """Returns when a GPU was throttled in the trace's window, by reason, without reasons that were not sampled."""
    found, low, high = tracks_of(context, device), context.trace.window_start_ns, context.trace.window_end_ns
    return tuple(
        Throttling(label.removeprefix("Throttled by "), _spans(found[label], low, high))
        for label in THROTTLED
        if label in found
    )


def _spans(track: SampledCounter, low: int, high: int) -> Union:
    on = (track.value > 0) & (track.end > low) & (track.start < high)
    start, end = np.maximum(track.start[on], low), np.minimum(track.end[on], high)
    if not len(start):
        return union(start, end)
    apart = start[1:] - end[:-1] > (_TOGETHER - 1) * np.median(track.end - track.start)
    return Union(start[np.append(True, apart)], end[np.append(apart, True)])


def throttled(context: Context, device: int) -> Union:
    """Returns when a GPU was throttled for any reason."""
    found = [each.spans for each in throttling(context, device)]
    empty = np.empty(0, np.int64)
    return union(*(np.concatenate([empty, *(spans[side] for spans in found)]) for side in (0, 1)))


def slowed_by_sampling(context: Context, device: int) -> bool:
    """Returns whether an NVIDIA GPU was sampled while its power limit held its clock down."""
    by_power = any(each.reason == "power" and each.spans.length() for each in throttling(context, device))
    nvidia = context.get(gpu_vendor) in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)
    return by_power and nvidia and not _SAMPLED.isdisjoint(tracks_of(context, device))


def sm_clock(context: Context, device: int) -> SampledCounter | None:
    """Returns the samples of a GPU's multiprocessor clock; None if there are none."""
    found = tracks_of(context, device)
    return found.get(SM_CLOCK) or found.get(GPC_CLOCK)


def mean_in(track: SampledCounter | None, spans: Union) -> float:
    """Returns the mean of a counter over these spans; NaN if it has no sample there or does not exist."""
    if track is None or not len(spans.start):
        return float("nan")
    return float(interval_means(track, spans.start, spans.end, np.zeros(len(spans.start), np.int64), 1).mean[0])


def step_times(context: Context, device: int) -> Union:
    """Returns the time of the steps on a GPU; without steps, the window of the trace."""
    found, trace = gpu_steps(context, device), context.trace
    if not len(found.number):
        return union(np.array([trace.window_start_ns]), np.array([trace.window_end_ns]))
    return union(found.start, found.end)


@view(
    "gpu_clocks",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("power_w", "float", "W", "mean power"),
        ("max_power_w", "float", "W", "largest power sample"),
        ("power_limit_w", "float", "W", "mean power limit"),
        ("sm_clock_mhz", "float", "MHz", "mean clock of the multiprocessors"),
        ("max_sm_clock_mhz", "float", "MHz", "largest sample of that clock"),
        ("memory_clock_mhz", "float", "MHz", "mean clock of the memory"),
        ("temperature_c", "float", "°C", "mean temperature"),
        ("max_temperature_c", "float", "°C", "largest temperature sample"),
        ("power_throttled_pct", "float", "%", "share of the trace in which the power limit held the clock down"),
        ("heat_throttled_pct", "float", "%", "share of the trace in which the temperature held the clock down"),
        (
            "hardware_throttled_pct",
            "float",
            "%",
            "share of the trace in which the hardware (such as the power supply) held the clock down",
        ),
        (
            "steps_throttled_pct",
            "float",
            "%",
            "share of the step time in which any of these held the clock down; without steps, of the trace",
        ),
        ("throttled_sm_clock_mhz", "float", "MHz", "mean clock of the multiprocessors while it was held down"),
    ),
    nothing=NO_COUNTERS,
)
def gpu_clocks(context: Context) -> Answer:
    """Power, clocks and temperature of each GPU, and how much of the time it was throttled.

    Reasons that were not sampled are missing, not zero. The view throttling lists the spans.
    """
    tracks = context.get(sampled_counters)
    devices = sorted({track.device for track in tracks if track.label in _CLOCKS})
    rows = [_clock_row(context, device) for device in devices]
    told = left_out_note(context) if rows else [NO_CLOCKS] if tracks else []
    if any(slowed_by_sampling(context, device) for device in devices):
        told.append(OWN_POWER)
    return gpu_clocks.answer(rows, told)


def _clock_row(context: Context, device: int) -> dict[str, Any]:
    trace, found = context.trace, tracks_of(context, device)
    window = Union(np.array([trace.window_start_ns]), np.array([trace.window_end_ns]))
    length = max(window.length(), 1)
    shares = {each.reason: 100 * each.spans.length() / length for each in throttling(context, device)}
    slow, steps = throttled(context, device), step_times(context, device)

    def most(track: SampledCounter | None) -> float:
        return float(track.value.max(initial=-np.inf)) if track is not None and len(track) else float("nan")

    clock = sm_clock(context, device)
    return {
        "device": device,
        "power_w": mean_in(found.get(POWER), window),
        "max_power_w": most(found.get(POWER)),
        "power_limit_w": mean_in(found.get(POWER_LIMIT), window),
        "sm_clock_mhz": mean_in(clock, window) / 1e6,
        "max_sm_clock_mhz": most(clock) / 1e6,
        "memory_clock_mhz": mean_in(found.get(MEMORY_CLOCK), window) / 1e6,
        "temperature_c": mean_in(found.get(TEMPERATURE), window),
        "max_temperature_c": most(found.get(TEMPERATURE)),
        "power_throttled_pct": shares.get("power"),
        "heat_throttled_pct": shares.get("heat"),
        "hardware_throttled_pct": shares.get("hardware"),
        "steps_throttled_pct": 100 * intersection(slow, steps).length() / max(steps.length(), 1) if shares else None,
        "throttled_sm_clock_mhz": mean_in(clock, slow) / 1e6,
    }


@view(
    "throttling",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("reason", "text", "", "power, heat or hardware"),
        ("start_ns", "int", "ns", "Unix time of the first sample"),
        ("duration_us", "float", "us", "time from then until the end of the last sample"),
        ("sm_clock_mhz", "float", "MHz", "mean clock of the multiprocessors in the span"),
        ("power_w", "float", "W", "mean power in the span"),
        ("temperature_c", "float", "°C", "mean temperature in the span"),
    ),
)
def throttling_spans(context: Context) -> Answer:
    """When GPUs were throttled, according to the samples: spans by reason, in order of time.

    The actual span may begin and end up to one sampling interval earlier or later.
    """
    rows = []
    for device in sorted({track.device for track in context.get(sampled_counters)}):
        found = tracks_of(context, device)
        for each in throttling(context, device):
            for start, end in zip(each.spans.start.tolist(), each.spans.end.tolist(), strict=True):
                span = Union(np.array([start]), np.array([end]))
                rows.append(
                    {
                        "device": device,
                        "reason": each.reason,
                        "start_ns": start,
                        "duration_us": (end - start) / 1000,
                        "sm_clock_mhz": mean_in(sm_clock(context, device), span) / 1e6,
                        "power_w": mean_in(found.get(POWER), span),
                        "temperature_c": mean_in(found.get(TEMPERATURE), span),
                    }
                )
    rows.sort(key=lambda row: row["start_ns"])
    return throttling_spans.answer(rows, _no_spans(context) if not rows else ())


def _no_spans(context: Context) -> list[str]:
    tracks = context.get(sampled_counters)
    if not tracks:
        return [NO_COUNTERS]
    found = [track for track in tracks if track.label in THROTTLED]
    told = ["no GPU was throttled"] if any(map(len, found)) else [] if found else [NO_CLOCKS]
    return [*left_out_note(context), *told]
