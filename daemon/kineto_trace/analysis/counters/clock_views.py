"""The views of power, clocks, temperature and throttling of GPUs."""

from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.counters.hardware_counter_views import as_columns, gpu_steps
from kineto_trace.analysis.counters.sampled_counters import (
    DRAM,
    DRAM_BYTES,
    GPC_CLOCK,
    GPU_BUSY,
    MEMORY_CLOCK,
    NO_COUNTERS,
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
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu_vendor
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NO_CLOCKS = "power and clocks were not sampled, though other counters were"
# As measured: tests/gpu/counters_proof.py.
OWN_POWER = (
    "sampling hardware counters takes power itself (32 W on an H200), so that work at the power limit was some 1 % "
    "slower for it"
)
_TOGETHER = 1.5  # sample lengths: spans that begin this soon after the previous one are joined to it
_CLOCKS = frozenset((POWER, POWER_LIMIT, SM_CLOCK, GPC_CLOCK, MEMORY_CLOCK, TEMPERATURE, *THROTTLED))
_SAMPLED = frozenset((GPU_BUSY, SM_BUSY, DRAM, TENSOR, *DRAM_BYTES, *PCIE))  # one of them is in each set


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
        ("max_power_w", "float", "W", "largest sample of the power"),
        ("power_limit_w", "float", "W", "mean of the limit"),
        ("sm_clock_mhz", "float", "MHz", "mean clock of the multiprocessors"),
        ("max_sm_clock_mhz", "float", "MHz", "its largest sample"),
        ("memory_clock_mhz", "float", "MHz", "mean clock of the memory"),
        ("temperature_c", "float", "°C", "mean temperature"),
        ("max_temperature_c", "float", "°C", "its largest sample"),
        ("power_throttled_pct", "float", "%", "time of the trace in which its power limit held the clock down"),
        ("heat_throttled_pct", "float", "%", "time in which its temperature did"),
        ("hardware_throttled_pct", "float", "%", "time in which its hardware did, such as its power supply"),
        (
            "steps_throttled_pct",
            "float",
            "%",
            "time of the steps in which any of these did; without steps, of the trace",
        ),
        ("throttled_sm_clock_mhz", "float", "MHz", "mean clock of the multiprocessors in that time"),
    ),
    nothing=NO_COUNTERS,
)
def gpu_clocks(context: Context) -> Answer:
    """Power, clocks and temperature of each GPU, and how much of the time it was throttled.

    Reasons that were not sampled are missing, not zero. The view throttling has the spans.
    """
    tracks = context.get(sampled_counters)
    devices = sorted({track.device for track in tracks if track.label in _CLOCKS})
    rows = [_clock_row(context, device) for device in devices]
    told = left_out_note(context) if rows else [NO_CLOCKS] if tracks else []
    if any(slowed_by_sampling(context, device) for device in devices):
        told.append(OWN_POWER)
    return Answer(as_columns(gpu_clocks, rows), told)


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
        ("duration_us", "float", "us", "time until the end of the last sample"),
        ("sm_clock_mhz", "float", "MHz", "mean clock of the multiprocessors in it"),
        ("power_w", "float", "W", "mean power in it"),
        ("temperature_c", "float", "°C", "mean temperature in it"),
    ),
)
def throttling_spans(context: Context) -> Answer:
    """When GPUs were throttled, according to the samples: spans by reason, in order of time.

    A span may begin or end earlier or later by one sampling interval.
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
    return Answer(as_columns(throttling_spans, rows), _no_spans(context) if not rows else ())


def _no_spans(context: Context) -> list[str]:
    tracks = context.get(sampled_counters)
    if not tracks:
        return [NO_COUNTERS]
    found = [track for track in tracks if track.label in THROTTLED]
    told = ["no GPU was throttled"] if any(map(len, found)) else [] if found else [NO_CLOCKS]
    return [*left_out_note(context), *told]
