"""Which views have a shape that can be drawn, and what is drawn of each.

A view is here if one picture says what its table says: values over time, parts of a whole, or how values spread. Which
columns these are follows from no name or type, so each view is listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over time, each of which holds until the next one. moment: Unix ns. per: one line for each of these."""

    moment: str
    values: tuple[str, ...]
    per: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """One bar per row, made of these columns. label: what tells the rows apart."""

    label: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NamedParts:
    """One bar per label, made of one row per part. part: the column with its name; value: with its length."""

    label: tuple[str, ...]
    part: str
    value: str


@dataclass(frozen=True, slots=True)
class Spread:
    """One box per row, by the quartiles in the columns min, p25, p50, p75 and max (view_api/value_statistics.py)."""

    label: tuple[str, ...]
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values of this size occur."""

    value: str


Shape = Curve | Parts | NamedParts | Spread | Histogram
_GPU = ("rank", "device")
_STREAM = (*_GPU, "stream")
_STEP = ("rank", "step")
# of the mean step
SHARES = (
    "kernel_pct",
    "memcpy_pct",
    "memset_pct",
    "communication_pct",
    "runtime_pct",
    "dataloader_pct",
    "cpu_exec_pct",
    "other_pct",
    "unrecorded_pct",
)

SHAPES: Mapping[str, Shape] = {
    "collectives": Histogram("duration_us"),
    "critical_path_breakdown": NamedParts(("rank",), "bound_by", "time_us"),
    "distributed_overlap": Parts(_STEP, ("computation_us", "overlapping_us", "communication_us", "other_us")),
    "gpu_utilization": Curve("start_ns", ("utilization_pct",), _GPU),
    "idle_breakdown": NamedParts(_STREAM, "category", "idle_us"),
    "idle_causes": NamedParts(_GPU, "cause", "window_pct"),
    "idle_gaps": Histogram("idle_us"),
    "kernel_type_breakdown": NamedParts(("rank",), "kernel_type", "sum_us"),
    "kernels": Parts(("rank", "name"), ("total_us",)),
    "memory_bandwidth": Curve("time_ns", ("bandwidth",), (*_GPU, "kind")),
    "memory_bandwidth_summary": Spread((*_GPU, "kind")),
    "memory_curve": Curve("time_ns", ("allocated_bytes", "reserved_bytes"), _GPU),
    "overview": Parts(("rank",), SHARES),
    "profiler_steps": Histogram("duration_us"),
    "queue_length": Curve("time_ns", ("queue_length",), _STREAM),
    "queue_length_summary": Spread(_STREAM),
    "sm_efficiency": Curve("start_ns", ("sm_efficiency_pct",), _GPU),
    "step_breakdown": Parts(
        _STEP,
        (
            "kernel_us",
            "memcpy_us",
            "memset_us",
            "communication_us",
            "runtime_us",
            "dataloader_us",
            "cpu_exec_us",
            "other_us",
            "unrecorded_us",
        ),
    ),
    "step_phases": Parts(_STEP, ("loading_us", "forward_us", "backward_us", "optimizer_us", "other_us")),
    "temporal_breakdown": Parts(_GPU, ("idle_us", "compute_us", "non_compute_us")),
    "tensor_core_use": Parts(("rank", "figure"), ("used_pct", "not_used_pct")),
    "time_causes": NamedParts(_GPU, "cause", "share_pct"),
}
