"""A flame graph as its page shows it: drawn, with a table of its functions and what can be chosen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any
from urllib.parse import urlencode

from kineto_trace.analysis.flame.flame_folding import find, folded, keys
from kineto_trace.analysis.flame.flame_functions import FunctionTotals, callees, callers, function_totals
from kineto_trace.analysis.flame.flame_nodes import FlameKind, FlameNode
from kineto_trace.analysis.flame.flame_profiles import (
    GPU_SUBJECTS,
    SECOND,
    STEP,
    FlameChoice,
    FlameProfile,
    FlameSubject,
    merged_profile,
    timed_profile,
)
from kineto_trace.analysis.flame.flame_trees import ROOT, FlameTree, compact, merged_tree, timed_tree
from kineto_trace.analysis.flame.flame_views import NOTHING_OF
from kineto_trace.html.flame_chart import FrameTexts, flame_chart
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import steps
from kineto_trace.structure.stacks.call_forests import StackKind
from kineto_trace.structure.trace_forms import as_meant

MAX_FUNCTIONS = 200  # rows of the table
MAX_STEPS = 500  # of a selector
MAX_LINK = 4_000  # bytes of an address
NS_PER_S = 1e9
CROWDED = 0.5  # share of frames that are too narrow, from which on the page says what helps

Contexts = Iterable[Context]


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
    drawn, notes = _drawn(request, first.get(as_meant), tree, totals, texts)
    said = [note for side in (ours, theirs) for profile in side.profiles for note in profile.notes]
    if not tree.total[ROOT]:
        notes.append(NOTHING_OF[request.choice.of])
    elif theirs.profiles and request.order is FlameOrder.TIME:
        notes.append("differences are shown with merged stacks and in the sandwich, not in order of time")
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
    profiles = (merged_profile(each.get(as_meant), choice, whole_steps_only=compared) for each in contexts)
    return _Side(profiles=[replace(each, calls=compact(each.calls)) for each in profiles])


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
        notes.append("most of it is in frames that are too narrow to draw: choose a step, or zoom into a frame")
    whole = int(tree.total[ROOT])
    link = lambda each: request.link(root=each.key) if each.key else ""  # noqa: E731
    chart = _chart(node, texts, link=link, whole=whole, name=f"Flame graph of {request.choice.of}, {request.order}")
    path = [(tree.name(place), request.link(root=f"{int(known[place]):x}")) for place in _path(tree, root)]
    return {"charts": [chart], "tree": [_plain(node)], "path": path if root != ROOT else [], "focus": ""}, notes


TIMED = "one thread in its order of time; the width of the graph is the time from its first call to its last one"
LAUNCHED = "GPU work in the order in which it was launched, without the pauses between"


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
