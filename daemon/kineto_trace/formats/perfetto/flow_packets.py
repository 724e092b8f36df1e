"""Arrows between slices: from calls to the GPU work they caused, from forward to backward operators.

Theory of operation
    Every arrow has an id of its own, which both of its ends carry. The viewer closes a flow at its first end, so a
    graph launch needs as many ids as it has kernels.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Events
from kineto_trace.arrays.id_sets import lookup
from kineto_trace.model.activity_tables import ViewerRow, tables_on
from kineto_trace.model.trace import API_TABLES, Trace
from kineto_trace.structure.fwd_bwd import forward_backward

Ints = npt.NDArray[np.int64]


class Arrows(NamedTuple):
    """Arrows as pairs of event numbers: arrow n goes from source[n] to target[n]."""

    source: Ints
    target: Ints


def capture_arrows(trace: Trace, offsets: Mapping[str, int]) -> Arrows:
    """Returns the arrows of a capture. offsets: the number of the first event of each table that is shown."""
    arrows = [_launches(trace, offsets)]
    links = forward_backward(trace.tables)
    if "cpu_op" in offsets:
        first = offsets["cpu_op"]
        arrows.append(Arrows(links.forward_rows + first, links.backward_rows + first))
    return Arrows(*(np.concatenate(ends) for ends in zip(*arrows, strict=True)))


def file_arrows(trace: Trace, shown: Events, track: npt.NDArray[np.uint32]) -> Arrows:
    """Returns the arrows of a file: its events of phases s, t and f, each at the innermost slice running at its time.

    shown: all events, sorted by track and start; arrows refer to places in it. track: the track of each row of the
    table `flow`. An arrow goes from each s or t to every following t or f of the same id and category, up to the next s
    or t.
    """
    flow = trace.table("flow")
    if not len(flow) or not len(shown):
        return Arrows(np.empty(0, np.int64), np.empty(0, np.int64))
    places = _slices_at(shown, track, flow["start"])
    begins = flow["phase"] != ord("f")
    order = np.lexsort((~begins, flow["start"], flow["id"], flow["category"]))
    same = (np.diff(flow["id"][order], prepend=0) == 0) & (np.diff(flow["category"][order], prepend=0) == 0)
    group = np.cumsum(~same)
    begin = begins[order]
    position = np.arange(len(order))
    last = np.maximum.accumulate(np.where(begin, position, -1))
    before = np.concatenate([[-1], last[:-1]])  # the last begin before each event
    follows = (flow["phase"][order] != ord("s")) & (before >= 0) & (group[before] == group)
    source, target = places[order[before[follows]]], places[order[follows]]
    known = (source >= 0) & (target >= 0)
    return Arrows(source[known], target[known])


def _slices_at(shown: Events, track: npt.NDArray[np.uint32], time: Ints) -> Ints:
    """Returns the place of the innermost slice that runs on the track at each time; -1 if there is none."""
    tree = shown.nest(int(shown.end.max()) + 1 if shown.end is not None else 0)
    nested = Events(shown.track, shown.start, tree.end)
    moments = Events(track, time)
    order = moments.order()
    found = np.empty(len(order), np.int64)
    found[order] = nested.enclosing(tree.parent, moments.take(order))
    return found


def _launches(trace: Trace, offsets: Mapping[str, int]) -> Arrows:
    """Returns the arrows from each call to the work with its correlation id."""
    calls = [kind for kind in reversed(API_TABLES) if kind in offsets]  # the runtime's call wins over the driver's
    work = [kind for kind in tables_on(ViewerRow.GPU, ViewerRow.SYNC) if kind in offsets]
    if not calls or not work:
        return Arrows(np.empty(0, np.int64), np.empty(0, np.int64))

    def joined(kinds: list[str]) -> tuple[npt.NDArray[np.uint32], Ints]:
        tables = [trace.table(kind) for kind in kinds]
        numbers = [offsets[table.kind] + np.arange(len(table)) for table in tables]
        return np.concatenate([table["correlation"] for table in tables]), np.concatenate(numbers)

    (wanted, target), (known, source) = joined(work), joined(calls)
    found = lookup(wanted, known, source, -1)
    linked = (found >= 0) & (wanted != 0)
    return Arrows(found[linked], target[linked])
