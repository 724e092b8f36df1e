"""GPU time by kernel type and by kernel, as HTA divides it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU, gpu_events
from kineto_trace.analysis.gpu_time.temporal_views import union_of
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.interval_sweep import Sweep
from kineto_trace.arrays.top_n import ByName, largest
from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION, HTA_MEMORY, HTA_TYPES
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view


def _all_ranks(partials: Sequence[tuple[int, dict[str, int]]]) -> Answer:
    """Rows of each rank, and if there are several those of all together."""
    return type_columns([*partials, *([(None, together(partials))] if len(partials) > 1 else [])])


def together(partials: Sequence[tuple[int, dict[str, int]]]) -> dict[str, int]:
    """The times (ns) of all ranks."""
    found: dict[str, int] = {}
    for _, times in partials:
        for name, time in times.items():
            found[name] = found.get(name, 0) + time
    return found


def type_columns(tables: Sequence[tuple[int | None, dict[str, int]]], digits: int | None = None) -> Answer:
    """The columns of the view. tables: ranks and the times (ns) of their types; digits: what shares are rounded to."""
    rows: list[tuple[int | None, str, float, float | None]] = []
    for rank, times in tables:
        total = sum(times.values())
        for name, time in sorted(times.items(), key=lambda item: (-item[1], item[0])):
            share = 100 * time / total if total else None
            if share is not None and digits is not None:
                share = float(np.round(share, digits))
            rows.append((rank, name, time / 1000, share))
    names = [column.name for column in kernel_type_breakdown.columns]
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)})


@view(
    "kernel_type_breakdown",
    columns(
        ("rank", "int", "", "rank of the process in its job; missing: all ranks together"),
        (
            "kernel_type",
            "text",
            "",
            "COMPUTATION, COMMUNICATION or MEMORY; types that ran at the same time: A overlapping B",
        ),
        ("sum_us", "float", "us", "time in which exactly these types ran"),
        ("share_pct", "float", "%", "share of the time in which any type ran"),
    ),
    reduce=_all_ranks,
    nothing=NO_GPU,
)
def kernel_type_breakdown(context: Context, *, include_memory: bool = True) -> dict[str, int]:
    """The GPU's busy time by the types of work that ran. Each moment counts once.

    Options:
    - include_memory: count copies and fills as a type.
    """
    events = context.get(gpu_events)
    changes, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for place, number in enumerate(kernel_types(include_memory)):
        ran = union_of(events, events.type == number)
        changes.append(np.repeat([1 << place, -(1 << place)], len(ran.start)))
        times += [ran.start, ran.end]
    change, time = np.concatenate(changes), np.concatenate(times)
    order = np.argsort(time, kind="stable")
    running = Sweep(np.cumsum(change[order])[:-1], time[order][:-1], time[order][1:])
    return {name: length for name, length in by_class(running).items() if length}


def kernel_types(include_memory: bool) -> tuple[int, ...]:
    """The types that count; the n-th has the value 2**n in a sweep."""
    return (HTA_COMPUTATION, HTA_COMMUNICATION, *((HTA_MEMORY,) if include_memory else ()))


def by_class(running: Sweep) -> dict[str, int]:
    """The length (ns) of each combination of types that appears."""
    lengths, types = running.lengths(), kernel_types(include_memory=True)
    found: dict[str, int] = {}
    for value in unique_values(running.running).tolist():
        if value > 0:
            name = " overlapping ".join(HTA_TYPES[number] for place, number in enumerate(types) if value & 1 << place)
            found[name] = found.get(name, 0) + int(lengths[running.running == value].sum())
    return found


@view(
    "kernel_breakdown",
    columns(
        ("kernel_type", "text", "", "COMPUTATION, COMMUNICATION or MEMORY"),
        ("name", "text", "", "name; others: everything that is not listed"),
        ("count", "int", "", "number of events; with compat=hta, number of names where several share a row"),
        ("sum_us", "float", "us", "sum of their durations"),
        ("max_us", "float", "us", "longest duration"),
        ("min_us", "float", "us", "shortest duration"),
        ("mean_us", "float", "us", "mean"),
        ("std_us", "float", "us", "sample standard deviation; 0 for one event"),
    ),
    nothing=NO_GPU,
)
def kernel_breakdown(
    context: Context,
    *,
    duration_ratio: float = 0.8,
    num_kernels: int = 10,
    include_memory: bool = True,
) -> Answer:
    """For each type of work the kernels that take most of the time, and all others as one row.

    Options:
    - num_kernels: the maximum number of kernels to list per type. If a type has more, kernels are listed only until
      they make up duration_ratio of its time.
    - duration_ratio: see num_kernels.
    - include_memory: include copies and fills.
    """
    events = context.get(gpu_events)
    names = context.trace.strings
    duration = (events.end - events.start) / 1000
    rows: list[dict[str, Any]] = []
    for number in kernel_types(include_memory):
        chosen = events.type == number
        group = events.name[chosen].astype(np.int64)
        table = largest(group, duration[chosen], names, ratio=duration_ratio, limit=num_kernels)
        rows += [{"kernel_type": HTA_TYPES[number], **row} for row in statistics_rows(table)]
    return kernel_columns(rows)


def kernel_columns(rows: Sequence[Mapping[str, Any]]) -> Answer:
    """The columns of the view kernel_breakdown."""
    columns_ = [column.name for column in kernel_breakdown.columns]
    return Answer({name: [row[name] for row in rows] for name in columns_})


def statistics_rows(table: ByName) -> list[dict[str, Any]]:
    """One dictionary per name, with the statistics in us."""
    return [
        {
            "name": name,
            "count": int(table.count[place]),
            **{f"{field}_us": float(getattr(table, field)[place]) for field in ("sum", "max", "min", "mean", "std")},
        }
        for place, name in enumerate(table.name)
    ]
