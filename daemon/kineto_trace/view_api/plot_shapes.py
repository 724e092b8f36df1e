"""Views with a shape that can be drawn, and their parts: by matplotlib in notebooks, as SVG on pages.

A view is listed here if one picture shows what its table says: values over time, parts of a whole, or the spread of
values. Names and types do not show which columns these are, so each view is listed. Units are those of the columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kineto_trace.base.array_types import Floats, Ints
from kineto_trace.view_api.cell_texts import bare_heading, cell
from kineto_trace.view_api.result_columns import scaled_unit
from kineto_trace.view_api.result_data import ResultColumn, ResultData

_GPU = ("rank", "device")
_STREAM = (*_GPU, "stream")
_STEP = ("rank", "step")
_SELF_TIMES = ("device_self_us", "host_self_us")
_STEP_PARTS = ("kernel_us", "memcpy_us", "memset_us", "communication_us", "runtime_us", "dataloader_us", "cpu_exec_us",
               "other_us", "unrecorded_us")  # fmt: skip
_PHASES = ("loading_us", "forward_us", "backward_us", "optimizer_us", "other_us")
_SHARES = tuple(name.replace("_us", "_pct") for name in _STEP_PARTS)  # of the mean step
# Columns that can replace the bars, besides each part alone.
_STATISTICS = ("calls", "mean_us", "max_us", "min_us")
_FURTHER: Mapping[str, tuple[str, ...]] = {
    "call_tree": ("device_total_us", "host_total_us", "calls"),
    "collective_summary": ("calls", "mean_us", "max_us", "wait_us", "busbw_gb_s"),
    "cuda_graphs": ("gpu_us", "span_us", "call_us", "launches", "kernels"),
    "data_loading": ("per_step_us", "share_pct", "idle_pct"),
    "gpu_annotations": ("count", "mean_us", "max_us", "min_us"),
    "hot_lines": ("per_step_us", "share_pct", "idle_pct"),
    "kernel_breakdown": ("count", "mean_us", "max_us", "min_us"),
    "kernels": (*_STATISTICS, "blocks_per_sm", "occupancy_pct"),
    "kernels_by_op": (*_STATISTICS, "registers", "shared_memory_bytes", "blocks_per_sm", "occupancy_pct"),
    "memory_peak": ("peak_bytes", "blocks"),
    "memory_statistics": ("size_increase_bytes", "allocation_bytes", "self_allocation_bytes", "allocation_count",
                          "self_allocation_count", "calls"),
    "modules": ("device_total_us", "host_total_us", "host_overhead_us", "backward_device_us", "backward_host_us",
                "occurrences", "operators"),
    "operators": ("device_total_us", "host_total_us", "host_exclusive_us", "calls"),
    "overview": ("step_us", "utilization_pct", "sm_efficiency_pct", "occupancy_pct", "kernel_us", "kernels"),
    "profiler_steps": ("gpu_us", "gpu_activities"),
    "python_samples": ("running", "waiting", "idle"),
    "rank_waits": ("mean_wait_us", "collectives"),
    "ranks": ("step_us", "step_p95_us", "step_max_us", "waiting_us", "waited_for_us"),
    "step_breakdown": ("total_us",),
    "step_phases": ("total_us",),
    "step_spread": ("min_us", "p95_us", "max_us", "spread_pct"),
    "threads": ("running", "waiting", "idle", "voluntary_switches", "involuntary_switches", "major_faults"),
}  # fmt: skip
REST = "rest"
OTHERS = "others"
_MS: Mapping[str, float] = {"ns": 1e-6, "us": 1e-3}
Values = Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over time, each of which holds until the next one. moment: ns or us. per: one line for each of these."""

    moment: str
    values: tuple[str, ...]
    per: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """One bar per row, made of these columns.

    label: columns that distinguish the rows.
    whole: the column with the length of the bar, if the parts may leave a remainder.
    of_job: with several ranks, only the rows that have this text in the last column of the label.
    """

    label: tuple[str, ...]
    values: tuple[str, ...]
    whole: str = ""
    of_job: str = ""


@dataclass(frozen=True, slots=True)
class NamedParts:
    """One bar per label, made of one row per part. part: the column with its name; value: with its length."""

    label: tuple[str, ...]
    part: str
    value: str


@dataclass(frozen=True, slots=True)
class Spread:
    """One box per row, by the quartiles in the columns min, p25, p50, p75 and max (view_api/text_columns.py)."""

    label: tuple[str, ...]
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Histogram:
    """The number of values by size."""

    value: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two bars per row, one per trace.

    verdict: the column that separates differences from noise, if there is one.
    depth: the column with the depth of a row, if the outermost row contains the others: it has no bars.
    """

    label: tuple[str, ...]
    baseline: str
    other: str
    verdict: str = ""
    depth: str = ""


_PER_STEP = Pairs(("name", "time"), "baseline_us", "other_us", verdict="verdict")


@dataclass(frozen=True, slots=True)
class Points:
    """One point per row at two percentages.

    kind: the column whose texts have a colour each.
    size: the column with the percentage shown as a point's area.
    """

    label: tuple[str, ...]
    across: str
    up: str
    kind: str
    size: str


Shape = Curve | Parts | NamedParts | Spread | Histogram | Pairs | Points
SHAPES: Mapping[str, Shape] = {
    "annotation_latency": Parts(("rank", "name"), ("p50_us",), whole="p99_us"),
    "call_tree": Parts(("rank", "name"), _SELF_TIMES),
    "collective_summary": Parts(("collective", "bytes"), ("total_us",)),
    "collectives": Histogram("duration_us"),
    "counter_curves": Curve("time_ns", ("value_pct",), (*_GPU, "counter")),
    "critical_path_breakdown": NamedParts(("rank",), "bound_by", "time_us"),
    "cuda_graphs": Parts(("rank", "graph"), ("total_us",)),
    "data_loading": Parts(("rank", "what", "function"), ("time_us",)),
    "diff_call_paths": _PER_STEP,
    "diff_event_names": Pairs(("name",), "total_baseline_us", "total_other_us"),
    "diff_kernel_names": _PER_STEP,
    "diff_modules": _PER_STEP,
    "diff_operators": _PER_STEP,
    "diff_python_functions": _PER_STEP,
    "diff_step_times": _PER_STEP,
    "diff_tree": Pairs(("path", "name"), "total_baseline_us", "total_other_us", depth="depth"),
    "diff_tree_operators": Pairs(("name",), "device_total_baseline_us", "device_total_other_us"),
    "distributed_overlap": Parts(_STEP, ("computation_us", "overlapping_us", "communication_us", "other_us")),
    "distributed_wait": Parts(_STEP, ("transfer_us", "synchronizing_us")),
    "findings": Parts(("title",), ("saving_pct",)),
    "flops_utilization": Parts(("rank",), ("utilization_pct",)),
    "gpu_annotations": Parts(("rank", "name"), ("sum_us",)),
    "gpu_utilization": Curve("start_ns", ("utilization_pct",), _GPU),
    "hot_lines": Parts(("rank", "function", "line"), ("time_us",)),
    "idle_breakdown": NamedParts(_STREAM, "category", "idle_us"),
    "idle_causes": NamedParts(_GPU, "cause", "window_pct"),
    "idle_gaps": Histogram("idle_us"),
    "kernel_breakdown": Parts(("rank", "kernel_type", "name"), ("sum_us",)),
    "kernel_precision": NamedParts(("rank",), "precision", "total_us"),
    "kernel_type_breakdown": NamedParts(("rank",), "kernel_type", "sum_us"),
    "kernels": Parts(("rank", "name"), ("total_us",)),
    "kernels_by_op": Parts(("rank", "name"), ("total_us",)),
    "memory_bandwidth": Curve("time_ns", ("bandwidth",), (*_GPU, "kind")),
    "memory_bandwidth_summary": Spread((*_GPU, "kind")),
    "memory_curve": Curve("time_ns", ("allocated_bytes", "reserved_bytes"), _GPU),
    "memory_peak": Parts((*_GPU, "operator"), ("held_bytes",)),
    "memory_statistics": Parts((*_GPU, "operator"), ("self_size_increase_bytes",)),
    "modules": Parts(("rank", "path"), _SELF_TIMES),
    "operator_flops": Parts(("rank", "name", "input_shape"), ("speed_tflop_s",), whole="roof_tflop_s"),
    "operators": Parts(("rank", "name"), _SELF_TIMES),
    "overview": Parts(("rank",), _SHARES),
    "profiler_steps": Parts(_STEP, ("duration_us",)),
    "python_samples": Parts(("rank", "function", "line"), ("running_us",)),
    "queue_length": Curve("time_ns", ("queue_length",), _STREAM),
    "queue_length_summary": Spread(_STREAM),
    "rank_time_causes": NamedParts((), "cause", "share_pct"),
    "rank_waits": Parts(("rank", "waits_for"), ("wait_us",)),
    "rank_what_if": Parts(("change",), ("saving_us",)),
    "ranks": Parts(("rank",), ("computation_us", "communication_us"), whole="step_us"),
    "roofline": Points(("rank", "device", "name"), "dram_pct", "compute_pct", "verdict", "share_pct"),
    "sm_efficiency": Curve("start_ns", ("sm_efficiency_pct",), _GPU),
    "step_breakdown": Parts(_STEP, _STEP_PARTS, of_job="average"),
    "step_phases": Parts(_STEP, _PHASES),
    "step_spread": Parts(("step",), ("median_us",)),
    "temporal_breakdown": Parts(_GPU, ("idle_us", "compute_us", "non_compute_us")),
    "tensor_core_use": Parts(("rank", "figure"), ("used_pct", "not_used_pct")),
    "thread_times": Curve("start_us", ("cpu_pct", "cpu_wait_pct", "blocked_pct"), ("rank", "name", "thread")),
    "threads": Parts(("rank", "name", "thread"), ("cpu_us", "cpu_wait_us")),
    "time_causes": NamedParts(_GPU, "cause", "share_pct"),
}


def bar_columns(view: str) -> tuple[str, ...]:
    """Returns the columns of a view that can replace the bars of its chart."""
    shape = SHAPES.get(view)
    return (*shape.values, *_FURTHER.get(view, ())) if isinstance(shape, Parts) else ()


def with_bars_of(shape: Parts, column: str) -> Parts:
    """Returns the shape with this column's values as its bars."""
    return replace(shape, values=(column,), whole="")


def numbers(result: ResultData, name: str) -> Values:
    """Returns the values of a column; NaN for missing ones."""
    found: Values = result.table[name].cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return found


def column_of(result: ResultData, name: str) -> ResultColumn:
    """Returns the column with this name."""
    return next(column for column in result.columns if column.name == name)


def title_of(result: ResultData, name: str) -> str:
    """Returns the title of a column in a picture."""
    return bare_heading(column_of(result, name))


def labels(result: ResultData, names: Sequence[str]) -> list[str]:
    """Returns labels that distinguish the rows, without columns that have one value in all rows."""
    if not names:
        return [""] * len(result)
    columns = {name: result.values(name) for name in names if name in result.table.column_names}
    telling = {name: values for name, values in columns.items() if len(set(map(str, values))) > 1} or columns
    shown = {name: column_of(result, name) for name in telling}
    rows = [", ".join(_said(shown[name], value) for name, value in zip(telling, row, strict=True))
            for row in zip(*telling.values(), strict=True)]  # fmt: skip
    if "complete" not in result.table.column_names:
        return rows
    whole = result.values("complete")
    return [row if complete or complete is None else f"{row} (part)" for row, complete in zip(rows, whole, strict=True)]


def _said(column: ResultColumn, value: Any) -> str:
    if column.type in ("ints", "texts"):
        return str(value[-1]) if value else ""
    if column.type == "text" and column.name not in ("step", "device"):
        return "" if value is None else str(value)
    return f"{column.name.replace('_', ' ')} {cell(value, column)}" if column.unit != "bytes" else cell(value, column)


def groups(result: ResultData, names: Sequence[str]) -> dict[str, Ints]:
    """Returns the rows of each label."""
    found: dict[str, list[int]] = {}
    for row, label in enumerate(labels(result, names)):
        found.setdefault(label, []).append(row)
    return {label: np.array(rows, np.int64) for label, rows in found.items()}


def scale(result: ResultData, names: Sequence[str]) -> tuple[float, str]:
    """Returns a factor and the resulting unit: the one that fits the largest value of these columns."""
    largest = max(np.nanmax(np.abs(numbers(result, name)), initial=0) for name in names)
    factor, unit = scaled_unit(column_of(result, names[0]).unit, float(largest))
    return factor, unit or "count"


def moments(result: ResultData, name: str) -> Values:
    """Returns times in ms since the first one."""
    times = numbers(result, name)
    return (times - np.nanmin(times)) * _MS[column_of(result, name).unit]


def drawn_rows(result: ResultData, shape: Parts) -> Ints:
    """Returns the places of the rows that have a bar: all of them, or those of a job of several ranks."""
    everything = np.arange(len(result))
    if not shape.of_job or len(set(result.values("rank"))) < 2:
        return everything
    last = result.values(shape.label[-1])
    chosen = np.array([row for row in everything.tolist() if last[row] == shape.of_job], np.int64)
    return chosen if len(chosen) else everything


def parts(result: ResultData, shape: Parts, rows: Ints) -> dict[str, Values]:
    """Returns the lengths of the parts of these rows' bars, by the title of the part; NaN for missing ones."""
    found = {title_of(result, name): numbers(result, name)[rows] for name in shape.values}
    if not shape.whole:
        return found
    left = numbers(result, shape.whole)[rows] - np.sum([np.nan_to_num(each) for each in found.values()], axis=0)
    return {**found, REST: np.maximum(left, 0)}


def rows_with_pairs(result: ResultData, shape: Pairs) -> list[int]:
    """Returns the places of the rows that have bars: all of them, or those inside of the outermost one if any are."""
    everything = list(range(len(result)))
    if not shape.depth:
        return everything
    depths = result.values(shape.depth)
    return [row for row in everything if depths[row] > min(depths)] or everything


def named_parts(result: ResultData, shape: NamedParts, bars: Sequence[Ints]) -> dict[str, Values]:
    """Returns the lengths of the parts of these bars, by the name of the part; 0 if a bar does not have it."""
    lengths, names = np.nan_to_num(numbers(result, shape.value)), [str(name) for name in result.values(shape.part)]
    found = {name: np.zeros(len(bars)) for name in dict.fromkeys(names)}
    for place, rows in enumerate(bars):
        for row in rows.tolist():
            found[names[row]][place] += lengths[row]
    return found
