"""The flame graph of a result of the view flame_graph, whose rows have the stacks of one or several ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kineto_trace.analysis.flame.flame_folding import folded, keys
from kineto_trace.analysis.flame.flame_nodes import NS, SAMPLES, FlameNode
from kineto_trace.analysis.flame.flame_trees import ALL_THREADS, Ints, rooted
from kineto_trace.structure.stacks.call_forests import NOTHING, StackKind
from kineto_trace.view_api.result import Result

NS_PER_US = 1000


def flame_of_rows(result: Result) -> tuple[FlameNode, str] | None:
    """Returns the merged stacks of all ranks below one root, and their unit; None without rows.

    A frame that is in no row as the innermost one is of the kind of what it called.
    """
    rows = result.rows()
    unit = NS if any(row["self_us"] is not None for row in rows) else SAMPLES
    several = len({row["rank"] for row in rows}) > 1
    parent, depth, frame, kind, own = (list[int]() for _ in range(5))
    frames: dict[str, int] = {}
    places: dict[tuple[int, str], int] = {}
    for row in rows:
        place = NOTHING
        for level, name in enumerate(_stack(row, several)):
            found = places.get((place, name))
            if found is None:
                found = places[place, name] = len(parent)
                parent.append(place)
                depth.append(level)
                frame.append(frames.setdefault(name, len(frames)))
                kind.append(_kind(row) if level else StackKind.THREAD)
                own.append(0)
            place = found
        if place != NOTHING:
            own[place] += _amount(row, unit)
            kind[place] = _kind(row)
    if not parent:
        return None
    tree = rooted(_whole(parent), _whole(depth), _whole(frame), _whole(kind), [_whole(own)], list(frames))
    return folded(tree, keys(tree)), unit


def _whole(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def _stack(row: Mapping[str, Any], several: bool) -> Sequence[str]:
    """The frames from outside in; of several ranks, the threads are one."""
    stack: list[str] = row["stack"]
    return [ALL_THREADS, *stack[1:]] if several and len(stack) > 1 else stack


def _kind(row: Mapping[str, Any]) -> StackKind:
    return StackKind[row["kind"].upper()] if row["kind"] else StackKind.THREAD


def _amount(row: Mapping[str, Any], unit: str) -> int:
    if unit == NS:
        return round((row["self_us"] or 0.0) * NS_PER_US)
    return int(row["samples"] or 0)
