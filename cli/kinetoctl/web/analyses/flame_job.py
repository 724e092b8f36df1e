"""The charts that pages draw themselves: flame graphs, heat maps, memory over time, counters and trees."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, groupby
from typing import Any
from urllib.parse import urlencode

import numpy as np
from kineto_trace.analysis.flame_trees import (
    ROOT,
    FlameKind,
    FlameNode,
    FlameTree,
    FunctionTotals,
    callees,
    callers,
    find,
    folded,
    function_totals,
    keys,
    merge_equal_stacks,
    merged_tree,
    timed_tree,
)
from kineto_trace.analysis.flame_views import (
    GPU_SUBJECTS,
    NOTHING_OF,
    SECOND,
    STEP,
    FlameChoice,
    FlameProfile,
    FlameSubject,
    merged_profile,
    timed_profile,
)
from kineto_trace.html.charts import SERIES, Series, legend
from kineto_trace.html.flame_chart import FrameTexts, flame_chart
from kineto_trace.html.heat_maps import Axis, Block, Span, block_map, heat_map
from kineto_trace.html.time_charts import ChartLine, Marks, areas, curves
from kineto_trace.html.view_charts import pairs
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import steps
from kineto_trace.structure.call_forests import StackKind
from kineto_trace.structure.trace_forms import with_current_forms
from kineto_trace.view_api.plot_shapes import SHAPES, Pairs
from kineto_trace.view_api.result import Result
from markupsafe import Markup

from kinetoctl.errors import UsageProblem
from kinetoctl.output.units import human

MAX_FUNCTIONS = 200  # rows of the table
MAX_STEPS = 500  # of a selector
MAX_LINK = 4_000  # bytes of an address
NS_PER_S = 1e9
CROWDED = 0.5  # share of frames that are too narrow, from which on the page says what helps

Contexts = Iterable[Context]
Drawn = tuple[Result, Markup]
_OUTSIDE, _SMALLER, _OTHERS = "outside any operator", "smaller blocks", "others"
US = 1000  # ns
MAX_COUNTERS = 60


class FlameOrder(StrEnum):
    """How a flame graph is laid out."""

    MERGED = "merged"
    TIME = "time"
    SANDWICH = "sandwich"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameRequest:
    """What of a flame graph is asked for. root: key of the frame to show; focus: the function of a sandwich.

    address: of the page, with the fields that stay when a frame is chosen.
    """

    choice: FlameChoice
    order: FlameOrder
    root: str = ""
    focus: str = ""
    address: str = ""
    fields: tuple[tuple[str, str], ...] = ()

    def link(self, **further: str) -> str:
        """The address with further fields; empty if it is too long."""
        found = f"{self.address}?{urlencode([*self.fields, *further.items()])}"
        return found if len(found) <= MAX_LINK else ""


def flame_request(
    *,
    of: str,
    order: str,
    thread: int | None = None,
    step: int | None = None,
    idle: bool = False,
    **fields: Any,
) -> FlameRequest:
    """The request that a job's plain values stand for; fields: the other ones of FlameRequest. Raises ViewError."""
    choice = FlameChoice(of=FlameSubject(of), thread=thread, step=step, idle=idle)
    pairs = tuple((name, value) for name, value in fields.pop("fields", ()))
    return FlameRequest(choice=choice, order=FlameOrder(order), fields=pairs, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """The merged profiles of one or several traces."""

    profiles: list[FlameProfile]

    @property
    def steps(self) -> int:
        return sum(profile.steps for profile in self.profiles)

    @property
    def seconds(self) -> float:
        return sum(profile.end - profile.start for profile in self.profiles) / NS_PER_S


def flame_values(request: FlameRequest, contexts: Contexts, base: Contexts = ()) -> dict[str, Any]:
    """The graph of some traces: charts as SVG, the tree behind them, functions, and what can be chosen.

    base: the traces to compare with. Only one trace's calls can be in order of time. Raises ViewError.
    """
    theirs = _side(base, replace(request.choice, step=None, thread=None), compared=True)
    rest = iter(contexts)
    first = next(rest)
    ours = _side(chain([first], rest), request.choice, compared=bool(theirs.profiles))
    periods, per, scale = _periods(ours, theirs)
    tree = merged_tree(
        [profile.calls for profile in ours.profiles], [profile.calls for profile in theirs.profiles], scale
    )
    totals = function_totals(tree)
    texts = FrameTexts(whole=int(tree.total[ROOT]), unit=ours.profiles[0].unit, periods=periods, per=per)
    drawn, notes = _drawn(request, first.get(with_current_forms), tree, totals, texts)
    said = [note for side in (ours, theirs) for profile in side.profiles for note in profile.notes]
    if not tree.total[ROOT]:
        notes.append(NOTHING_OF[request.choice.of])
    elif theirs.profiles and request.order is FlameOrder.TIME:
        notes.append("there are no differences in time order: choose merged or sandwich")
    return {
        **drawn,
        **_functions(request, totals, texts),
        "unit": texts.unit,
        "total": texts.amount(texts.whole),
        "per": per,
        "notes": list(dict.fromkeys([*said, *notes])),
        "steps": _steps(first),
        "threads": _threads(first) if len(ours.profiles) == 1 else [],
    }


def _side(contexts: Contexts, choice: FlameChoice, *, compared: bool) -> _Side:
    """Of each trace, one after the other, only what merging needs is kept."""
    profiles = (merged_profile(each.get(with_current_forms), choice, whole_steps_only=compared) for each in contexts)
    return _Side(profiles=[replace(each, calls=merge_equal_stacks(each.calls)) for each in profiles])


def _periods(ours: _Side, theirs: _Side) -> tuple[float, str, float]:
    """How many steps or seconds there are, which of them, and what the baseline's values are multiplied with."""
    if not theirs.profiles:
        return 1.0, "", 1.0
    if ours.steps and theirs.steps:
        return float(ours.steps), STEP, ours.steps / theirs.steps
    return ours.seconds or 1.0, SECOND, ours.seconds / (theirs.seconds or 1.0)


def _drawn(
    request: FlameRequest, context: Context, tree: FlameTree, totals: FunctionTotals, texts: FrameTexts
) -> tuple[dict[str, Any], list[str]]:
    """The charts, from top to bottom, with the nodes that they draw, and notes."""
    if request.order is FlameOrder.SANDWICH:
        return _sandwich(request, tree, totals, texts), []
    notes = []
    if request.order is FlameOrder.TIME:
        profile = timed_profile(context, request.choice)
        placed = request.choice.of not in GPU_SUBJECTS
        texts = FrameTexts(whole=0, unit=profile.unit, periods=1.0, per="")
        tree = timed_tree(profile.calls, profile.start if placed else None)
        notes.append(TIMED if placed else LAUNCHED)
    known = keys(tree)
    root = find(known, request.root)
    node = folded(tree, known, root)
    if _crowded(node):
        notes.append("most of the graph is in frames that are too narrow to draw: choose a step, or zoom into a frame")
    whole = int(tree.total[ROOT])
    link = lambda each: request.link(root=each.key) if each.key else ""  # noqa: E731
    chart = _chart(node, texts, link=link, whole=whole, name=f"Flame graph of {request.choice.of}, {request.order}")
    path = [(tree.name(place), request.link(root=f"{int(known[place]):x}")) for place in _path(tree, root)]
    return {"charts": [chart], "tree": [_plain(node)], "path": path if root != ROOT else [], "focus": ""}, notes


TIMED = "one thread in time order, from its first call to its last"
LAUNCHED = "GPU work in launch order, without the pauses in between"


def _sandwich(request: FlameRequest, tree: FlameTree, totals: FunctionTotals, texts: FrameTexts) -> dict[str, Any]:
    focus = request.focus or (totals.names[0] if len(totals) else "")
    charts, trees = [], []
    for side, upward, name in ((callers(tree, focus), True, "Callers"), (callees(tree, focus), False, "Callees")):
        if len(side) > 1:
            known = keys(side)
            node = folded(side, known, 1)  # the function itself is the only frame below the root
            link = lambda each: "" if each.kind is FlameKind.OTHERS else request.link(focus=each.name)  # noqa: E731
            whole = int(tree.total[ROOT])
            charts.append(_chart(node, texts, link=link, whole=whole, name=f"{name} of {focus}", upward=upward))
            trees.append(_plain(node))
    return {"charts": charts, "tree": trees, "path": [], "focus": focus}


def _chart(
    node: FlameNode,
    texts: FrameTexts,
    *,
    link: Callable[[FlameNode], str],
    whole: int,
    name: str,
    upward: bool = False,
) -> str:
    return str(
        flame_chart(
            node,
            name=name,
            link=link,
            whole=whole,
            unit=texts.unit,
            periods=texts.periods,
            per=texts.per,
            upward=upward,
        )
    )


def _crowded(node: FlameNode) -> bool:
    """Whether most of what is in the graph is in frames that are not drawn one by one."""
    waiting, narrow = [node], 0
    while waiting:
        each = waiting.pop()
        narrow += each.total if each.kind is FlameKind.OTHERS else 0
        waiting += each.children
    return narrow > CROWDED * node.total


def _path(tree: FlameTree, place: int) -> list[int]:
    """The frames from the root to this one."""
    found = [place]
    while found[-1] != ROOT:
        found.append(int(tree.parent[found[-1]]))
    return found[::-1]


def _plain(node: FlameNode) -> dict[str, Any]:
    """A node and what is below it, for JSON; not deeper than a graph is drawn."""
    base = {} if node.base_total is None else {"base_total": node.base_total, "base_self": node.base_own}
    return {
        "name": node.name,
        "kind": node.kind.value,
        "start": node.start,
        "total": node.total,
        "self": node.own,
        **base,
        **({"frames": node.frames} if node.kind is FlameKind.OTHERS else {}),
        "children": [_plain(child) for child in node.children],
    }


def _functions(request: FlameRequest, totals: FunctionTotals, texts: FrameTexts) -> dict[str, Any]:
    """The table: functions with most of their own, or with the largest differences, and the figures behind it."""
    order = list(range(len(totals)))
    compares = totals.base_total is not None and totals.base_own is not None
    if compares:
        order.sort(key=lambda place: -abs(totals.own[place] - totals.base_own[place]))  # type: ignore[index]
    shown = [_function(request, totals, texts, place) for place in order[:MAX_FUNCTIONS]]
    return {"functions": shown, "function_count": len(totals), "compares": compares}


def _function(request: FlameRequest, totals: FunctionTotals, texts: FrameTexts, place: int) -> dict[str, Any]:
    name, own, total = totals.names[place], int(totals.own[place]), int(totals.total[place])
    values: dict[str, Any] = {
        "name": name,
        "kind": StackKind(int(totals.kind[place])).name.lower(),
        "self": own,
        "self_pct": 100 * own / max(texts.whole, 1),
        "self_text": texts.amount(own),
        "total": total,
        "total_pct": 100 * total / max(texts.whole, 1),
        "total_text": texts.amount(total),
        "link": replace(request, fields=_sandwich_fields(request.fields)).link(focus=name),
    }
    if totals.base_own is not None and totals.base_total is not None:
        for key, value, base in (("self", own, totals.base_own[place]), ("total", total, totals.base_total[place])):
            values[f"{key}_delta"] = float(value - base) / texts.periods
            values[f"{key}_delta_text"] = texts.difference(value, float(base))
    return values


def _sandwich_fields(fields: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return (*((key, value) for key, value in fields if key != "order"), ("order", FlameOrder.SANDWICH.value))


def _steps(context: Context) -> list[int]:
    numbers: list[int] = sorted(set(context.get(steps).number.tolist()))
    return numbers[:MAX_STEPS]


def _threads(context: Context) -> list[tuple[int, str]]:
    """The threads of the trace with their names."""
    names: Mapping[int, str] = context.trace.target.threads
    kinds = ("cpu_op", "user_annotation", "python_function")
    found = {int(each) for kind in kinds for each in set(context.trace.table(kind)["thread"].tolist())}
    return [(tid, f"{tid} ({names[tid]})" if names.get(tid) else str(tid)) for tid in sorted(found)]


# The charts of pages that show more than one view's own: heat maps of ranks, memory over time, counters, trees.
# Each takes the result of a view and options, and returns the rows that belong to the chart, and the chart.
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
        raise UsageProblem(f"{wanted!r} is not a range of numbers; expected 8-15 or 8, for example")
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
