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
from kineto_trace.model.activity_table import ViewerRow
from kineto_trace.model.activity_tables import tables_on
from kineto_trace.model.trace import API_TABLES, Trace, own_tables
from kineto_trace.structure.fwd_bwd import forward_backward

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Arrows(NamedTuple):
    """Arrows as pairs of event numbers: arrow n goes from source[n] to target[n].

    loose: number of further arrows, which have no slice at one of their ends.
    """

    source: Ints
    target: Ints
    loose: int = 0


def capture_arrows(trace: Trace, offsets: Mapping[str, int]) -> Arrows:
    """Returns the arrows of a capture. offsets: the number of the first event of each table that is shown."""
    arrows = [_launches(trace, offsets)]
    links = forward_backward(trace.tables)
    if "cpu_op" in offsets:
        first = offsets["cpu_op"]
        arrows.append(Arrows(links.forward_rows + first, links.backward_rows + first))
    source, target = zip(*((each.source, each.target) for each in arrows), strict=True)
    return Arrows(np.concatenate(source), np.concatenate(target))


def file_arrows(trace: Trace, shown: Events, slices: Mask, track: npt.NDArray[np.uint32]) -> Arrows:
    """Returns the arrows of a file: its events of phases s, t and f, each at the slice of its time.

    shown: all events, sorted by track and start; arrows refer to places in it. slices: those that are slices. track:
    the track of each row of the table `flow`. An arrow goes from each s or t to every following t or f of the same id
    and category, up to the next s or t.
    """
    flow = trace.table("flow")
    if not len(flow):
        return Arrows(np.empty(0, np.int64), np.empty(0, np.int64))
    places = _slices_at(shown, slices, track, flow["start"])
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
    return Arrows(source[known], target[known], int(np.count_nonzero(~known)))


def _slices_at(shown: Events, slices: Mask, track: npt.NDArray[np.uint32], time: Ints) -> Ints:
    """Returns the place of each moment's slice on the track; -1 if there is none.

    This is the innermost slice that runs then, if it begins then; or one without duration at that moment; or the
    innermost slice that runs then; or one that ends then.
    """
    if not len(shown) or shown.end is None:
        return np.full(len(time), -1, np.int64)
    running = _running_at(shown, track, time)
    begins = (running >= 0) & (shown.start[running] == time)
    short = slices & (shown.end == shown.start)
    found = np.where(begins, running, _ending_at(shown, np.flatnonzero(short), track, time))
    found = np.where(found >= 0, found, running)
    missing = np.flatnonzero(found < 0)
    if len(missing):
        found[missing] = _ending_at(shown, np.flatnonzero(slices & ~short), track[missing], time[missing])
    return found


def _ending_at(shown: Events, rows: Ints, track: npt.NDArray[np.uint32], time: Ints) -> Ints:
    """Returns the last of these rows that ends on the track at each time; -1 if there is none."""
    if shown.end is None or not len(rows):
        return np.full(len(time), -1, np.int64)
    known, rank = np.unique(shown.end[rows], return_inverse=True)
    keys = shown.track[rows].astype(np.uint64) << np.uint64(32) | rank.reshape(-1).astype(np.uint64)
    at = np.minimum(np.searchsorted(known, time), len(known) - 1)
    wanted = track.astype(np.uint64) << np.uint64(32) | at.astype(np.uint64)
    found: Ints = np.where(known[at] == time, lookup(wanted, keys, rows, -1), -1)
    return found


def _running_at(shown: Events, track: npt.NDArray[np.uint32], time: Ints) -> Ints:
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
    own_calls, own_work = (own_tables(trace.tables, row) for row in (ViewerRow.CALL, ViewerRow.GPU))
    # Of equal correlations the last one counts: the runtime's call wins over the driver's.
    calls = [kind for kind in (*own_calls, *reversed(API_TABLES)) if kind in offsets]
    work = [kind for kind in (*tables_on(ViewerRow.GPU, ViewerRow.SYNC), *own_work) if kind in offsets]
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
