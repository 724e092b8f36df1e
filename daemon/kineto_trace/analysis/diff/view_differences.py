"""Differences between the rows of any view in two traces, and which of them fail a check.

Theory of operation
    Rows that have the same keys are compared (COMPARED says which columns are keys). Sums over the recording are made
    comparable first: per step if both traces have whole steps, else per second. Other figures, such as means and
    shares, are compared as they are.

    A view with a row for each step shows how much its figures vary from step to step. They are compared as means over
    the whole steps, and each difference is judged by the noise, as in diff_views. The other views have one figure for
    the whole recording, so a difference cannot be told from noise: they have no verdict, and say so.

Also decides whether a diff is acceptable, that is, whether rows became slower beyond the noise and by more than a
limit:

regressions(diff_steps(before, after), 5)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from kineto_trace.analysis.diff.diff_views import NEW, NOISE, PER_SECOND, PER_STEP, SLOWER, UNKNOWN
from kineto_trace.analysis.diff.step_noise import ERROR_RATE, StepTimes, compared_steps, differences, window_s
from kineto_trace.base.array_types import Floats
from kineto_trace.base.quantities import format_duration, times
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.plot_shapes import Pairs
from kineto_trace.view_api.result import Result, ResultColumn, columns, make_result
from kineto_trace.view_api.result_data import ResultData

LONGER, SHORTER = "longer", "shorter"
STEP = "step"
DIFFERENCE = "_difference"  # suffix of the names of these results
RESOLUTION_US = 1.0  # the coarsest rounding of times in a trace
_SUFFIXES = {"us": "_us", "bytes": "_bytes", "%": "_pct"}
_UNIT = "unit"  # column of the views whose rows have different units
Key = tuple[Any, ...]
RELEVANT_PCT = 0.1  # of the step: smaller increases are not regressions
CHECKS = columns(
    ("compared", "text", "", "what was compared: steps, ops, kernels and so on"),
    ("row", "text", "", "row that the limit applies to; the name of the view stands for all rows"),
    ("outcome", "text", "", "passed, failed, or unknown: cannot be judged"),
    ("message", "text", "", "the figures, as text"),
)


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """How the rows of a view are compared.

    sums: figures that are sums over the recording.
    plain: other figures.
    """

    keys: tuple[str, ...]
    sums: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComparedSteps:
    """How the rows of a view with a row for each step are compared. figures: times (us) of a step."""

    keys: tuple[str, ...]
    figures: tuple[str, ...]


# Views whose rows are steps, parts of a program, or ranks. Moments and single events have no counterparts.
COMPARED: Mapping[str, ComparedRows | ComparedSteps] = {
    "step_phases": ComparedSteps(
        ("rank",), ("total_us", "loading_us", "forward_us", "backward_us", "optimizer_us", "other_us")
    ),
    "rank_steps": ComparedSteps(("rank",), ("step_us", "waiting_us")),
    "profiler_steps": ComparedSteps(("rank",), ("duration_us", "gpu_us")),
    "distributed_wait": ComparedSteps(("rank",), ("transfer_us", "synchronizing_us")),
    "distributed_overlap": ComparedSteps(
        ("rank",), ("computation_us", "overlapping_us", "communication_us", "other_us")
    ),
    "step_spread": ComparedSteps((), ("median_us", "min_us", "max_us")),
    "overview": ComparedRows(
        ("rank",), ("kernel_us", "kernels"), ("step_us", "utilization_pct", "sm_efficiency_pct", "occupancy_pct")
    ),
    "time_causes": ComparedRows(("rank", "device", "cause"), (), ("share_pct",)),
    "rank_time_causes": ComparedRows(("cause",), (), ("share_pct",)),
    "ranks": ComparedRows(
        ("rank",), (), ("step_us", "computation_us", "communication_us", "waiting_us", "waited_for_us")
    ),
    "rank_waits": ComparedRows(("rank", "waits_for"), ("wait_us", "collectives"), ("mean_wait_us",)),
    "stragglers": ComparedRows(("rank",), ("caused_us", "late_collectives"), ("mean_late_us",)),
    "collective_summary": ComparedRows(
        ("collective", "group_description", "dtype", "bytes"),
        ("total_us", "calls", "wait_us"),
        ("mean_us", "busbw_gb_s"),
    ),
    "distributed_ops": ComparedRows(("rank", "name"), ("total_us", "calls", "total_bytes"), ("avg_us",)),
    "kernels_by_op": ComparedRows(("rank", "name", "op", "grid", "block"), ("total_us", "calls"), ("mean_us",)),
    "kernel_breakdown": ComparedRows(("rank", "kernel_type", "name"), ("sum_us", "count"), ("mean_us",)),
    "kernel_type_breakdown": ComparedRows(("rank", "kernel_type"), ("sum_us",), ("share_pct",)),
    "gpu_annotations": ComparedRows(("rank", "name"), ("sum_us", "count"), ("mean_us",)),
    "gpu_summary": ComparedRows(("rank", "device"), ("kernel_us", "kernels"), ("utilization_pct", "peak_memory_bytes")),
    "temporal_breakdown": ComparedRows(("rank", "device"), ("idle_us", "compute_us", "non_compute_us"), ("idle_pct",)),
    "comm_comp_overlap": ComparedRows(("rank", "device"), ("communication_us", "overlapped_us"), ("overlap_pct",)),
    "kernel_precision": ComparedRows(("rank", "precision"), ("total_us", "calls"), ("share_pct",)),
    "operator_flops": ComparedRows(
        ("rank", "name", "input_shape", "precision"), ("device_us", "calls"), ("speed_tflop_s", "roof_pct")
    ),
    "flops_utilization": ComparedRows(("rank",), ("work_tflop",), ("speed_tflop_s", "utilization_pct")),
    "annotation_latency": ComparedRows(("rank", "name"), ("count",), ("p50_us", "p99_us")),
    "counter_summary": ComparedRows(("rank", "counter", "unit"), (), ("mean", "max")),
    "gpu_counters": ComparedRows(("rank", "device", "counter", "unit"), (), ("mean", "p95")),
    "kernel_counters": ComparedRows(("rank", "device", "name", "counter", "unit"), (), ("value",)),
    "roofline": ComparedRows(("rank", "device", "name"), ("time_us",), ("dram_pct", "tensor_pct")),
    "gpu_clocks": ComparedRows(("rank", "device"), (), ("power_w", "sm_clock_mhz", "steps_throttled_pct")),
    "tensor_core_use": ComparedRows(("rank", "figure"), (), ("used_pct",)),
    "idle_causes": ComparedRows(("rank", "device", "cause"), ("idle_us", "gaps"), ("window_pct",)),
    "idle_breakdown": ComparedRows(("rank", "device", "stream", "category"), ("idle_us", "count"), ("mean_us",)),
    "blocked_on_full_queue": ComparedRows(("rank", "device", "stream"), ("blocked_us",), ("blocked_pct",)),
    "queue_length_summary": ComparedRows(("rank", "device", "stream"), (), ("mean", "p50", "max")),
    "memory_bandwidth_summary": ComparedRows(("rank", "device", "kind"), ("count",), ("mean", "p50")),
    "launch_summary": ComparedRows(("rank",), ("launches", "cpu_us", "gpu_us"), ("mean_delay_us",)),
    "op_kernel_delay": ComparedRows(("rank", "op", "kernels"), ("count",), ("launch_delay_us",)),
    "graph_operators": ComparedRows(("rank", "operator", "path", "input_shape"), ("total_us", "launches"), ()),
    "critical_path_breakdown": ComparedRows(("rank", "bound_by"), (), ("share_pct",)),
    "hot_lines": ComparedRows(("rank", "function", "file", "part"), (), ("per_step_us", "share_pct")),
    "data_loading": ComparedRows(("rank", "what", "function"), (), ("per_step_us", "share_pct")),
    "threads": ComparedRows(("rank", "name"), ("cpu_us", "cpu_wait_us"), ("cpu_pct",)),
    "process_use": ComparedRows(("rank",), (), ("cpu_cores", "cpu_wait_cores", "throttled_pct")),
    "memory_statistics": ComparedRows(
        ("rank", "device", "operator"), ("allocation_bytes", "allocation_count", "calls"), ()
    ),
    "memory_peak": ComparedRows(("rank", "device", "operator"), (), ("held_bytes", "peak_bytes")),
    "memory_peak_blocks": ComparedRows(("rank", "device", "operator", "call_stack"), (), ("held_bytes", "blocks")),
}


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a rank was recorded.

    step_s: mean length of its whole steps in seconds; NaN if it has none.
    steps: their names.
    """

    window_s: float
    step_s: float
    steps: frozenset[str]


class CheckOutcome(StrEnum):
    """What a check found. unknown: it cannot be judged, which does not pass."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison with a limit. row: what was compared. message: the figures, for people."""

    row: str
    outcome: CheckOutcome
    message: str


def extent(context: Context) -> Extent:
    """Returns how much of a rank was recorded."""
    chosen = context.get(compared_steps)
    length = float((chosen.end - chosen.start).mean()) / 1e9 if len(chosen) else float("nan")
    return Extent(window_s(context), length, frozenset(map(str, chosen.number.tolist())))


def view_differences(
    baseline: Result, other: Result, extents: tuple[Mapping[int, Extent], Mapping[int, Extent]]
) -> Result:
    """Compares the rows of one view in two traces. extents: of the ranks of the baseline and of the other trace.

    Raises ViewError for a view whose rows have no counterparts in another trace.
    """
    how = COMPARED.get(other.view)
    if how is None:
        raise ViewError(
            f"view {other.view} cannot be compared: its rows are moments, events or texts, which have no counterparts "
            "in another trace"
        )
    if isinstance(how, ComparedSteps):
        return _by_steps(baseline, other, how, extents)
    return _by_rows(baseline, other, how, extents)


def compared_pairs(result: ResultData) -> list[Pairs]:
    """Returns the figures to draw from a result of view_differences(): its first figures of one kind and unit.

    Rows are in the order of the first figure. Other results have none, nor do those whose rows have units of their own.
    """
    how = COMPARED.get(result.view.removesuffix(DIFFERENCE))
    if how is None or not result.view.endswith(DIFFERENCE) or _UNIT in how.keys:
        return []
    figures = how.figures if isinstance(how, ComparedSteps) else how.sums or how.plain
    known = {column.name: column for column in result.columns}
    found = []
    for name in figures:
        suffix = next((suffix for suffix in _SUFFIXES.values() if name.endswith(suffix)), "")
        bare = name.removesuffix(suffix)
        verdict = f"{bare}_verdict" if isinstance(how, ComparedSteps) else ""
        found.append(Pairs(how.keys, f"{bare}_baseline{suffix}", f"{bare}_other{suffix}", verdict=verdict))
    return [each for each in found if known[each.other].unit == known[found[0].other].unit]


def _by_rows(
    baseline: Result, other: Result, how: ComparedRows, extents: tuple[Mapping[int, Extent], Mapping[int, Extent]]
) -> Result:
    whole = all(side and all(each.steps for each in side.values()) for side in extents)
    per = PER_STEP if whole else PER_SECOND
    sides = [_keyed(result, how, _factor(side, per)) for result, side in zip((baseline, other), extents, strict=True)]
    figures = (*how.sums, *how.plain)
    keys = list(dict.fromkeys((*sides[1], *sides[0])))
    found: dict[str, tuple[list[float | None], list[float | None]]] = {}
    for at, name in enumerate(figures):
        nothing = 0.0 if name in how.sums else None  # a missing sum is 0; a missing mean is unknown
        first, second = ([side[key][at] if key in side else nothing for key in keys] for side in sides)
        found[name] = first, second
    order = _largest_first(*found[figures[0]])
    notes = [
        "differences are not judged: this view has a single figure for the whole recording, so its noise is unknown"
    ]
    if how.sums:
        notes.append(f"{', '.join(how.sums)}: per {per}, estimated from the lengths of the recordings")
    return _result(other, how.keys, keys, found, order, {}, notes)


def _factor(side: Mapping[int, Extent], per: str) -> float:
    """Returns the factor for a sum over the recording."""
    seconds = float(np.mean([each.window_s for each in side.values()])) if side else 0.0
    if seconds <= 0:
        return float("nan")
    return float(np.mean([each.step_s for each in side.values()])) / seconds if per == PER_STEP else 1 / seconds


def _keyed(result: Result, how: ComparedRows, factor: float) -> dict[Key, list[float | None]]:
    """Returns the figures of each key: sums of all its rows, and other figures if the key has one row only."""
    found: dict[Key, list[float | None]] = {}
    columns = [result.values(name) for name in (*how.sums, *how.plain)]
    for key, *values in zip(_keys(result, how.keys), *columns, strict=True):
        scaled = [
            None if value is None else float(value) * (factor if at < len(how.sums) else 1.0)
            for at, value in enumerate(values)
        ]
        before = found.get(key)
        if before is None:
            found[key] = scaled
        else:
            count = len(how.sums)
            together = [_sum(*pair) for pair in zip(before[:count], scaled[:count], strict=True)]
            found[key] = [*together, *(None for _ in how.plain)]
    return found


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def _keys(result: Result, names: Sequence[str]) -> list[Key]:
    columns = [[tuple(value) if isinstance(value, list) else value for value in result.values(name)] for name in names]
    return list(zip(*columns, strict=True)) if columns else [()] * len(result)


def _by_steps(
    baseline: Result, other: Result, how: ComparedSteps, extents: tuple[Mapping[int, Extent], Mapping[int, Extent]]
) -> Result:
    sides = [_samples(result, how, side) for result, side in zip((baseline, other), extents, strict=True)]
    keys = [key for key in sides[1] if key in sides[0]]
    found: dict[str, tuple[list[float | None], list[float | None]]] = {}
    verdicts: dict[str, list[str]] = {}
    for at, name in enumerate(how.figures):
        first, second = ([side[key][at] for key in keys] for side in sides)
        found[name] = [_mean(values) for values in first], [_mean(values) for values in second]
        verdicts[name] = _verdicts(first, second, ERROR_RATE / len(how.figures))
    order = _largest_first(*found[how.figures[0]])
    notes = [
        "means over the complete steps of each rank; a difference is called longer or shorter only if it exceeds the "
        "noise between steps"
    ]
    alone = len(sides[0].keys() ^ sides[1].keys())
    if alone:
        notes.append(f"{times(alone, 'row')} not compared: only one of the traces has complete steps")
    return _result(other, how.keys, keys, found, order, verdicts, notes)


def _samples(result: Result, how: ComparedSteps, side: Mapping[int, Extent]) -> dict[Key, list[Floats]]:
    """Returns the values of each key and figure over the whole steps; NaN if missing."""
    found: dict[Key, list[list[float]]] = {}
    ranks = result.values("rank") if "rank" in how.keys else [None] * len(result)
    everywhere = frozenset.intersection(*(each.steps for each in side.values())) if side else frozenset()
    columns = [result.values(name) for name in how.figures]
    for key, rank, step, *values in zip(
        _keys(result, how.keys), ranks, map(str, result.values(STEP)), *columns, strict=True
    ):
        whole = side[rank].steps if rank in side else everywhere
        if step in whole:
            of_key = found.setdefault(key, [[] for _ in how.figures])
            for samples, value in zip(of_key, values, strict=True):
                samples.append(float("nan") if value is None else float(value))
    return {key: [np.array(samples) for samples in of_key] for key, of_key in found.items()}


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) and np.isfinite(values).all() else None


def _verdicts(first: Sequence[Floats], second: Sequence[Floats], error_rate: float) -> list[str]:
    """Returns a verdict for each row. Rows with equally many steps are judged together; the error rate holds for all
    rows.
    """
    found = [UNKNOWN] * len(first)
    sizes: dict[tuple[int, int], list[int]] = {}
    for at, (one, two) in enumerate(zip(first, second, strict=True)):
        if min(len(one), len(two)) > 1 and np.isfinite(one).all() and np.isfinite(two).all():
            sizes.setdefault((len(one), len(two)), []).append(at)
    for rows in sizes.values():
        before, after = (_times([side[at] for at in rows]) for side in (first, second))
        judged = differences(before, after, error_rate / len(sizes))
        for place, at in enumerate(rows):
            longer = judged.other[place] > judged.baseline[place]
            found[at] = (LONGER if longer else SHORTER) if judged.changed[place] else NOISE
    return found


def _times(rows: Sequence[Floats]) -> StepTimes:
    us = np.stack(rows)
    return StepTimes(us, (us > 0).astype(np.float64), RESOLUTION_US)


def _largest_first(first: Sequence[float | None], second: Sequence[float | None]) -> list[int]:
    """Returns the places of the rows, largest difference first; rows that lack a value come last."""
    apart = [_delta(*pair) for pair in zip(first, second, strict=True)]
    return sorted(range(len(apart)), key=lambda at: (apart[at] is None, -abs(apart[at] or 0.0)))


def _delta(baseline: float | None, other: float | None) -> float | None:
    return None if baseline is None or other is None else other - baseline


def _result(
    of: Result,
    names: Sequence[str],
    keys: Sequence[Key],
    found: Mapping[str, tuple[list[float | None], list[float | None]]],
    order: Sequence[int],
    verdicts: Mapping[str, list[str]],
    notes: Sequence[str],
) -> Result:
    known = {column.name: column for column in of.columns}
    schema = [known[name] for name in names]
    values: dict[str, list[Any]] = {
        name: [list(keys[at][place]) if isinstance(keys[at][place], tuple) else keys[at][place] for at in order]
        for place, name in enumerate(names)
    }
    for name, (first, second) in found.items():
        own = known[name]
        if name in verdicts:
            label = _named(own, "verdict", "")
            schema.append(ResultColumn(label, "text", "", f"{LONGER}, {SHORTER}, {NOISE}, or {UNKNOWN}: {own.meaning}"))
            values[label] = [verdicts[name][at] for at in order]
        for word, meaning, side in (
            ("other", f"{own.meaning}, this trace", second),
            ("baseline", f"{own.meaning}, baseline", first),
            ("delta", "this trace minus baseline", [_delta(*pair) for pair in zip(first, second, strict=True)]),
        ):
            label = _named(own, word, _SUFFIXES.get(own.unit, ""))
            schema.append(ResultColumn(label, "float", own.unit, meaning))
            values[label] = [side[at] for at in order]
    return make_result(f"{of.view}{DIFFERENCE}", schema, values, notes)


def _named(column: ResultColumn, word: str, suffix: str) -> str:
    return f"{column.name.removesuffix(_SUFFIXES.get(column.unit, ''))}_{word}{suffix}"


def regressions(result: Result, limit_pct: float, *, only: str = "") -> list[Check]:
    """Returns a check for each row that is slower by more than the limit, one for what cannot be judged, or one passed.

    Rows fail whose difference is beyond the noise, at least limit_pct of the baseline, and at least RELEVANT_PCT of the
    step. only: check the row of this name alone, whatever its share.

    A row checked alone cannot be judged if its difference is within the noise but its interval reaches the limit: a
    regression of that size would go unnoticed. With several rows, the message counts those with such an interval.
    """
    rows = [row for row in result.rows() if not only or row["name"] == only]
    unknown = [row for row in rows if row["verdict"] == UNKNOWN]
    found = [
        Check(_name(row), CheckOutcome.FAILED, change_text(row)) for row in rows if _slower(row, limit_pct, bool(only))
    ]
    if unknown or not rows:
        why = "; ".join(result.notes) or "nothing comparable was recorded"
        return [*found, Check(only or result.view, CheckOutcome.UNKNOWN, f"{len(unknown)} of {len(rows)} rows: {why}")]
    if found:
        return found
    if only:
        return [_judged(row, limit_pct) for row in rows]
    told = f"none of {len(rows)} rows is slower by {limit_pct:g} % or more beyond the noise"
    hidden = sum(_relevant(row, limit_pct) and _hides(row, limit_pct) for row in rows)
    if hidden:
        told += f"; in {hidden} of them, the noise would hide such a slowdown: record more steps"
    return [Check(result.view, CheckOutcome.PASSED, told)]


def _judged(row: Mapping[str, Any], limit_pct: float) -> Check:
    """Returns the outcome for a row that is not slower beyond the noise by the limit."""
    if _hides(row, limit_pct):
        told = f"{change_text(row)}; cannot be judged: the noise would hide a regression of {limit_pct:g} %"
        return Check(_name(row), CheckOutcome.UNKNOWN, f"{told}; record more steps")
    return Check(_name(row), CheckOutcome.PASSED, change_text(row))


def checks_result(checks: Mapping[str, Sequence[Check]]) -> Result:
    """Returns the checks of each comparison as rows."""
    every = [(name, check) for name, found in checks.items() for check in found]
    values = {
        "compared": [name for name, _ in every],
        "row": [check.row for _, check in every],
        "outcome": [str(check.outcome) for _, check in every],
        "message": [check.message for _, check in every],
    }
    return make_result("diff_checks", CHECKS, values)


def change_text(row: Mapping[str, Any]) -> str:
    """Returns a line of text on how a row changed, with its interval."""
    text = f"{format_duration(1000 * row['baseline_us'])} → {format_duration(1000 * row['other_us'])} per {row['per']}"
    if row["delta_pct"] is not None:
        text += f", {row['delta_pct']:+.1f} %"
        if row["delta_low_us"] is not None:
            low, high = (100 * row[f"delta_{end}_us"] / row["baseline_us"] for end in ("low", "high"))
            text += f" (interval {low:+.1f} % to {high:+.1f} %)"
    return f"{text}: {row['verdict']}"


def _slower(row: Mapping[str, Any], limit_pct: float, planned: bool) -> bool:
    if row["verdict"] not in (SLOWER, NEW):
        return False
    grown = row["delta_pct"] is None or row["delta_pct"] >= limit_pct
    return grown and (planned or (row["step_delta_pct"] or 0) >= RELEVANT_PCT)


def _hides(row: Mapping[str, Any], limit_pct: float) -> bool:
    """Returns whether the noise may hide a regression of this size."""
    high, base = row["delta_high_us"], row["baseline_us"]
    if row["verdict"] != NOISE or high is None or not base:
        return False
    reach = high - row["delta_us"]  # half of the interval
    return bool(100 * min(high, reach) / base >= limit_pct)


def _relevant(row: Mapping[str, Any], limit_pct: float) -> bool:
    """Returns whether a regression of this size would matter to the step."""
    if not row["step_delta_pct"] or not row["delta_us"]:
        return False
    step_us = 100 * row["delta_us"] / row["step_delta_pct"]
    return bool(limit_pct * row["baseline_us"] / step_us >= RELEVANT_PCT)


def _name(row: Mapping[str, Any]) -> str:
    return str(row["name"]) if row["time"] == "step" else f"{row['name']} ({row['time']} time)"
