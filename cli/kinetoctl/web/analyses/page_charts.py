"""The charts of pages that show more than one view's own: heat maps of ranks, memory over time, counters, trees.

Each takes the result of a view and options, and returns the rows that belong to the chart, and the chart.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

import numpy as np
from kineto_trace.html.block_map import Block, block_map
from kineto_trace.html.charts import SERIES, Series, legend
from kineto_trace.html.heat_maps import Axis, Span, heat_map
from kineto_trace.html.time_charts import ChartLine, Marks, areas, curves
from kineto_trace.html.view_charts import pairs
from kineto_trace.view_api.plot_shapes import SHAPES, Pairs
from kineto_trace.view_api.result import Result
from markupsafe import Markup

from kinetoctl.errors import UsageProblem
from kinetoctl.output.cell_values import human

Drawn = tuple[Result, Markup]
_OUTSIDE, _SMALLER, _OTHERS = "outside operators", "smaller blocks", "others"
US = 1000  # ns
MAX_COUNTERS = 60


def rank_map(result: Result, *, value: str, ranks: str = "", steps: str = "", page: str) -> Drawn:
    """The view rank_steps as a map of ranks by steps, the rows with the largest values first.

    value: the column that is drawn. ranks, steps: the only ones, such as 8-15 or 8; empty for all. page: the address of
    the capture's pages. Raises UsageProblem.
    """
    rows = [
        (at, rank, step, amount)
        for at, (rank, step, amount) in enumerate(
            zip(result.values("rank"), result.values("step"), result.values(value), strict=True)
        )
        if _inside(str(rank), ranks) and _inside(step, steps)
    ]
    known = sorted((row for row in rows if row[3] is not None), key=lambda row: -row[3])
    unknown = [row for row in rows if row[3] is None]
    kept = result.table.take([row[0] for row in (*known, *unknown)])
    names = [str(rank) for rank in sorted({row[1] for row in rows})]
    numbers = sorted({row[2] for row in rows}, key=lambda name: (not name.isdecimal(), name.zfill(20)))
    values = np.full((len(names), len(numbers)), np.nan)
    line, column = ({name: at for at, name in enumerate(axis)} for axis in (names, numbers))
    for _, rank, step, amount in known:
        values[line[str(rank)], column[step]] = amount
    chosen = {"value": value, "rank": ranks, "step": steps}

    def href(field: str, axis: Sequence[str], one: str) -> Callable[[Span], str]:
        def address(span: Span) -> str:
            first, last = axis[span[0]], axis[span[1]]
            if first == last:
                return f"{page}/view/{one}?{urlencode({field: first})}"
            return f"{page}/ranks?{urlencode({**chosen, field: f'{first}-{last}'})}"

        return address

    drawn = heat_map(
        values,
        Axis(title="rank", names=names, href=href("rank", names, "step_breakdown")),
        Axis(title="step", names=numbers, href=href("step", numbers, "rank_steps")),
        lambda amount: human(amount, "us"),
    )
    return Result(result.view, result.columns, kept, result.notes, result.failure), drawn


def _inside(name: str, wanted: str) -> bool:
    """Whether a number is in a range such as 8-15 or 8. Raises UsageProblem for what is no range."""
    if not wanted:
        return True
    first, separator, last = wanted.partition("-")
    if not first.isdecimal() or (separator and not last.isdecimal()):
        raise UsageProblem(f"{wanted!r} is not a range of numbers; expected for example 8-15 or 8")
    return name.isdecimal() and int(first) <= int(name) <= int(last or first)


def memory_levels(
    result: Result, *, start_ns: int | None = None, end_ns: int | None = None, at_ns: int | None = None
) -> Drawn:
    """The view memory_curve: for each rank and device what was allocated and reserved, with its peak.

    start_ns, end_ns: the stretch of time that the page's tables are about; at_ns: the moment of its snapshot; Unix.
    """
    charts = Markup("")
    for (rank, device), rows in _groups(result, "rank", "device"):
        times = [row["time_us"] for row in rows]
        allocated = [row["allocated_bytes"] for row in rows]
        reserved = [row["reserved_bytes"] for row in rows]
        series = [ChartLine("allocated", times, allocated)]
        series += [ChartLine("reserved", times, reserved)] if None not in reserved else []
        top = max(range(len(rows)), key=allocated.__getitem__)
        origin = rows[0]["time_ns"] - round(times[0] * US)
        moments = [(times[top], f"peak {human(int(allocated[top]), 'bytes')}")]
        moments += [((at_ns - origin) / US, "snapshot")] if at_ns is not None else []
        start = times[0] if start_ns is None else (start_ns - origin) / US
        end = times[-1] if end_ns is None else (end_ns - origin) / US
        span = (start, end) if (start, end) != (times[0], times[-1]) else None
        drawn = curves(series, "bytes", Marks(moments=moments, span=span))
        charts += (
            Markup(
                '<figure class="curve" data-curve="{0}" data-origin="{1}"><figcaption>{0}</figcaption>{2}</figure>'
            ).format(curve_name(rank, device), origin, drawn)
            if drawn
            else ""
        )
    return result, charts


def curve_name(rank: int, device: str) -> str:
    """The title of a device's charts."""
    return f"rank {rank}, {device}"


def memory_blocks(result: Result) -> Drawn:
    """The view memory_snapshot: for each rank and device its blocks as bars, those of an operator beside each other."""
    charts = Markup("")
    for (rank, device), rows in _groups(result, "rank", "device"):
        held = Counter[str]()
        for row in rows:
            held[_holder(row)] += row["size_bytes"]
        places = {name: at for at, (name, _) in enumerate(held.most_common())}
        colours = {name: min(at, SERIES - 1) for name, at in places.items()}
        ordered = sorted(rows, key=lambda row: (places[_holder(row)], -row["size_bytes"]))
        blocks = [Block(row["size_bytes"], colours[_holder(row)], _block_title(row)) for row in ordered]
        total = human(rows[0]["allocated_bytes"], "bytes")
        names = [name for name in colours if colours[name] < SERIES - 1]
        names += [_OTHERS] if len(colours) >= SERIES else []
        drawn = block_map(blocks, f"{total} in {len(rows)} blocks, by operator")
        charts += _titled(
            f"{curve_name(rank, device)}: {total}",
            legend([Series(name, [1.0]) for name in names]) + drawn if drawn else drawn,
        )
    return result, charts


def _holder(row: Mapping[str, Any]) -> str:
    if row["blocks"] is None:
        return "before the recording"
    return _SMALLER if row["address"] is None else row["operator"] or _OUTSIDE


def _block_title(row: Mapping[str, Any]) -> str:
    size = human(row["size_bytes"], "bytes")
    age = "" if row["age_us"] is None else f", held for {human(row['age_us'], 'us')}"
    return f"{_holder(row)}: {size}{age}"


def memory_holders(result: Result) -> Drawn:
    """The view memory_holders: for each rank and device the bytes by operator on top of each other."""
    charts = Markup("")
    for (rank, device), rows in _groups(result, "rank", "device"):
        by_operator = [(name, list(part)) for name, part in groupby(rows, key=lambda row: row["operator"] or _OUTSIDE)]
        times = [row["time_us"] for row in by_operator[0][1]]
        series = [Series(name, [row["held_bytes"] for row in part]) for name, part in by_operator]
        charts += _titled(curve_name(rank, device), areas(times, series, "bytes"))
    return result, charts


def tree_levels(result: Result, *, address: str) -> Drawn:
    """The view diff_tree: both traces, with bars that lead into the nodes.

    address: of the page of a node, up to its path.
    """
    hrefs = [f"{address}{row['path']}" if at and row["children"] else "" for at, row in enumerate(result.rows())]
    shape = SHAPES[result.view]
    assert isinstance(shape, Pairs)
    return result, pairs(result, shape, hrefs=hrefs)


def counter_charts(result: Result) -> Drawn:
    """The view counters: a small chart for each rank and counter."""
    charts = Markup("")
    groups = _groups(result, "rank", "counter")
    for (rank, name), rows in groups[:MAX_COUNTERS]:
        times, values = [row["time_us"] for row in rows], [row["value"] for row in rows]
        drawn = curves([ChartLine(name, times, values)], rows[0]["unit"] or "")
        charts += _titled(f"rank {rank}, {name}", drawn) or _single(f"rank {rank}, {name}", values, rows[0]["unit"])
    if len(groups) > MAX_COUNTERS:
        charts += Markup(
            '<p class="note">These are the first {} of {} counters. The tables have all of them.</p>'
        ).format(MAX_COUNTERS, len(groups))
    return result, charts


def _single(title: str, values: Sequence[float | None], unit: str | None) -> Markup:
    """A counter of one moment, which is no curve."""
    known = next(value for value in reversed(values) if value is not None)
    return Markup("<figure><figcaption>{}</figcaption><p>{}</p></figure>").format(
        title, f"{human(known)} {unit or ''} at one moment"
    )


def _titled(title: str, drawn: Markup) -> Markup:
    if not drawn:
        return Markup("")
    return Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(title, drawn)


def _groups(result: Result, *names: str) -> list[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """The rows by the values of these columns, in the order of the first ones."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result.table.to_pylist():
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(found.items())


DRAWINGS: Mapping[str, Callable[..., Drawn]] = {
    "rank_steps": rank_map,
    "memory_curve": memory_levels,
    "memory_holders": memory_holders,
    "memory_snapshot": memory_blocks,
    "counters": counter_charts,
    "diff_tree": tree_levels,
}
