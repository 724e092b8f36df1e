"""GPU time by kernel type and by kernel, as HTA divides it."""

from typing import Any

import numpy as np

from kineto_trace.analysis.gpu_time.gpu_events import gpu_events
from kineto_trace.analysis.gpu_time.temporal_views import merged_as_hta, union_of
from kineto_trace.arrays.top_n import ByName, as_hta, largest
from kineto_trace.compat.hta.hta_intervals import Merged, Sweep, sweep
from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION, HTA_MEMORY, HTA_TYPES
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

_TYPES = (HTA_COMPUTATION, HTA_COMMUNICATION, HTA_MEMORY)  # the n-th has the value 2**n in a sweep


def _all_ranks(partials: list[tuple[int, dict[str, int]]], *, compat: Compat = Compat.NONE) -> Answer:
    """Rows of each rank, and if there are several those of all together; HTA has only these."""
    together: dict[str, int] = {}
    for _, times in partials:
        for name, time in times.items():
            together[name] = together.get(name, 0) + time
    tables: list[tuple[int | None, dict[str, int]]] = [(None, together)]
    if compat is not Compat.HTA:
        tables = [*partials, *(tables if len(partials) > 1 else [])]
    rows: list[tuple[int | None, str, float, float | None]] = []
    for rank, times in tables:
        total = sum(times.values())
        for name, time in sorted(times.items(), key=lambda item: (-item[1], item[0])):
            share = 100 * time / total if total else None
            if share is not None and compat is Compat.HTA:
                share = float(np.round(share, 1))
            rows.append((rank, name, time / 1000, share))
    names = [column.name for column in kernel_type_breakdown.columns]
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)})


@view(
    "kernel_type_breakdown",
    columns(
        ("rank", "int", "", "rank of the process in its job; missing: all ranks together"),
        ("kernel_type", "text", "", "COMPUTATION, COMMUNICATION, MEMORY, or those that ran at once: A overlapping B"),
        ("sum_us", "float", "us", "time in which exactly these types ran"),
        ("share_pct", "float", "%", "of the time in which any type ran"),
    ),
    compat=(Compat.HTA,),
    reduce=_all_ranks,
)
def kernel_type_breakdown(
    context: Context, *, include_memory: bool = True, compat: Compat = Compat.NONE
) -> dict[str, int]:
    """The GPU's busy time by the types of work that ran, each moment counted once.

    Options: include_memory: copies and fills count (else they are no type).

    HTA's figures (the first table of get_gpu_kernel_breakdown): sums over all ranks, types by its patterns, shares
    with one digit.
    """
    events = gpu_events(context, compat)
    types = _TYPES if include_memory else _TYPES[:2]
    sets = []
    for place, number in enumerate(types):
        chosen = events.type == number
        if compat is Compat.HTA:
            merged = merged_as_hta(context, events, chosen)
        else:
            ran = union_of(events, chosen)
            merged = Merged(ran.start, ran.end)
        sets.append((1 << place, merged))
    return _by_class(sweep(sets, one_by_one=compat is Compat.HTA), compat)


def _by_class(running: Sweep, compat: Compat) -> dict[str, int]:
    """The length (ns) of each combination of types."""
    lengths = running.lengths()
    found: dict[str, int] = {}
    for value in np.unique(running.running).tolist():
        if value <= 0:
            continue
        name = " overlapping ".join(HTA_TYPES[number] for place, number in enumerate(_TYPES) if value & 1 << place)
        length = int(lengths[running.running == value].sum())
        if length or compat is Compat.HTA:
            found[name] = found.get(name, 0) + length
    return found


@view(
    "kernel_breakdown",
    columns(
        ("kernel_type", "text", "", "COMPUTATION, COMMUNICATION or MEMORY"),
        ("name", "text", "", "name; others: all that are not listed"),
        ("count", "int", "", "events; HTA's figures, where names were put together: names"),
        ("sum_us", "float", "us", "sum of durations"),
        ("max_us", "float", "us", "longest"),
        ("min_us", "float", "us", "shortest"),
        ("mean_us", "float", "us", "mean"),
        ("std_us", "float", "us", "standard deviation, of a sample; 0 for one event"),
    ),
    compat=(Compat.HTA,),
)
def kernel_breakdown(
    context: Context,
    *,
    duration_ratio: float = 0.8,
    num_kernels: int = 10,
    include_memory: bool = True,
    compat: Compat = Compat.NONE,
) -> Answer:
    """For each type the kernels that take most of the time, and all others as one row.

    Options: num_kernels: if a type has more, only so many are listed, and only until they are duration_ratio of its
    time; include_memory: copies and fills as well.

    HTA's figures (the second table of get_gpu_kernel_breakdown): sorted by name; kernels are put together by the
    quantile of running sums, and all statistics are then of the sums.
    """
    events = gpu_events(context, compat)
    names = context.trace.strings
    duration = (events.end - events.start) / 1000
    rows: list[dict[str, Any]] = []
    types = _TYPES if include_memory else _TYPES[:2]
    for number in sorted(types, key=lambda type_: HTA_TYPES[type_]) if compat is Compat.HTA else types:
        chosen = events.type == number
        group = events.name[chosen].astype(np.int64)
        if compat is Compat.HTA:
            table = as_hta(group, duration[chosen], names, ratio=duration_ratio, limit=num_kernels)
        else:
            table = largest(group, duration[chosen], names, ratio=duration_ratio, limit=num_kernels)
        found = [{"kernel_type": HTA_TYPES[number], **row} for row in statistics_rows(table)]
        rows += sorted(found, key=lambda row: str(row["name"])) if compat is Compat.HTA else found
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
