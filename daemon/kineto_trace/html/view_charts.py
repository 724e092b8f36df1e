"""The chart of each view: those of the report, bars of the largest rows, lines over time, or none.

A chart shows what the table below it has: bars in the order of the view, lines per rank and place. A view that has no
shape has no chart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from kineto_trace.html.charts import Series, lines, stacked_bars
from kineto_trace.html.report import MAX_POINTS, SHOWN
from kineto_trace.view_api.plot_shapes import SHARES
from kineto_trace.view_api.result import Result

MAX_BARS = 20
MAX_CHARTS = 6
US_PER_MS = 1e3


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar for each row: the columns that name it, and the columns whose values are its pieces."""

    labels: tuple[str, ...]
    pieces: tuple[str, ...]
    unit: str = "ms"

    @property
    def scale(self) -> float:
        """What the values are divided by."""
        return {"ms": US_PER_MS, "MiB": 2.0**20}.get(self.unit, 1.0)


@dataclass(frozen=True, slots=True)
class Curves:
    """A line for each rank and place: the columns of the place, of the time in us or ns, and of the values."""

    places: tuple[str, ...]
    time: str
    values: tuple[str, ...]
    unit: str


# view -> its chart; those of the report that have one are drawn as there
SHAPES: dict[str, Bars | Curves] = {
    "rank_time_causes": Bars(("cause",), ("share_pct",), "%"),
    "rank_waits": Bars(("rank", "waits_for"), ("wait_us",)),
    "rank_what_if": Bars(("change",), ("saving_us",)),
    "findings": Bars(("title",), ("saving_pct",), "%"),
    "kernels": Bars(("name",), ("total_us",)),
    "kernels_by_op": Bars(("name",), ("total_us",)),
    "operators": Bars(("name",), ("device_self_us", "host_self_us")),
    "modules": Bars(("path",), ("device_self_us", "host_self_us")),
    "call_tree": Bars(("name",), ("device_self_us", "host_self_us")),
    "python_samples": Bars(("function", "line"), ("running_us",)),
    "hot_lines": Bars(("function", "line"), ("time_us",)),
    "threads": Bars(("name", "thread"), ("cpu_us", "cpu_wait_us")),
    "collective_summary": Bars(("collective", "bytes"), ("total_us", "wait_us")),
    "critical_path_breakdown": Bars(("bound_by",), ("time_us",)),
    "kernel_breakdown": Bars(("kernel_type", "name"), ("sum_us",)),
    "kernel_type_breakdown": Bars(("kernel_type",), ("sum_us",)),
    "temporal_breakdown": Bars(("rank", "device"), ("compute_us", "non_compute_us", "idle_us")),
    "step_phases": Bars(("step",), ("loading_us", "forward_us", "backward_us", "optimizer_us", "other_us")),
    "data_loading": Bars(("what", "function"), ("time_us",)),
    "idle_breakdown": Bars(("stream", "category"), ("idle_us",)),
    "gpu_annotations": Bars(("name",), ("sum_us",)),
    "cuda_graphs": Bars(("graph",), ("total_us",)),
    "distributed_overlap": Bars(("rank", "step"), ("computation_us", "overlapping_us", "communication_us", "other_us")),
    "distributed_wait": Bars(("rank", "step"), ("transfer_us", "synchronizing_us")),
    "overview": Bars(("rank",), SHARES, "%"),
    "tensor_core_use": Bars(("rank", "figure"), ("used_pct", "not_used_pct"), "%"),
    "memory_statistics": Bars(("operator",), ("self_size_increase_bytes",), "MiB"),
    "memory_peak": Bars(("operator",), ("held_bytes",), "MiB"),
    "step_spread": Bars(("step",), ("median_us",)),
    "queue_length": Curves(("device", "stream"), "time_us", ("queue_length",), "activities"),
    "memory_bandwidth": Curves(("device", "kind"), "time_us", ("bandwidth",), "GB/s"),
    "sm_efficiency": Curves(("device",), "start_ns", ("sm_efficiency_pct",), "%"),
    "thread_times": Curves(("name", "thread"), "start_us", ("cpu_pct", "cpu_wait_pct", "blocked_pct"), "%"),
    "profiler_steps": Bars(("step",), ("duration_us",)),
}
Values = dict[str, Any]


def chart(result: Result) -> Markup:
    """Draws a result; empty if it has no rows, or its view no shape."""
    if not len(result):
        return Markup("")
    shape = SHAPES.get(result.view)
    if isinstance(shape, Bars):
        return _bars(result.table.slice(0, MAX_BARS).to_pylist(), shape)
    if isinstance(shape, Curves):
        return _curves(result, shape)
    drawn: Callable[[Result], Markup] | None = SHOWN[result.view][2] if result.view in SHOWN else None
    return drawn(result) if drawn else Markup("")


def _bars(rows: Sequence[Values], shape: Bars) -> Markup:
    labels = [" ".join(_label(row[name]) for name in shape.labels) for row in rows]
    series = [
        Series(_title(name), [None if row[name] is None else row[name] / shape.scale for row in rows])
        for name in shape.pieces
    ]
    return stacked_bars(labels, series, shape.unit)


def _curves(result: Result, shape: Curves) -> Markup:
    """Draws a chart for each of the first places; of long ones, every n-th moment."""
    names = ("rank", *shape.places) if "rank" in result.table.column_names else shape.places
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, key in enumerate(zip(*(result.values(name) for name in names), strict=True)):
        groups.setdefault(key, []).append(row)
    table = result.table.select([shape.time, *shape.values])
    per_ms = 1e6 if shape.time.endswith("_ns") else US_PER_MS
    charts = Markup("")
    for key, rows in list(groups.items())[:MAX_CHARTS]:
        few = table.take(rows[:: max(1, len(rows) // MAX_POINTS)]).to_pydict()
        times = [(time - few[shape.time][0]) / per_ms for time in few[shape.time]]
        series = [Series(_title(name), few[name]) for name in shape.values]
        drawn = lines(times, series, unit=shape.unit, time_unit="ms")
        title = ", ".join(f"{name} {_label(value)}" for name, value in zip(names, key, strict=True))
        charts += Markup("<h4>{}</h4>").format(title) + drawn if drawn else ""
    return charts


def _label(value: Any) -> str:
    if isinstance(value, list):
        return str(value[-1]) if value else ""
    return "" if value is None else str(value)


def _title(name: str) -> str:
    for suffix in ("_us", "_pct", "_bytes"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")
