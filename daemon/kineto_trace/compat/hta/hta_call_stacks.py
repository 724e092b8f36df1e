"""HTA's call stacks: which row of its frame is inside which other one, and how deep.

Theory of operation
    Rows without a stream are nested by time, by pid and tid (if one of these is 0 it is a GPU to HTA). A GPU row with
    a stream above 0 hangs under the call that it is linked to. If exactly one thread has ProfilerSteps and exactly one
    other has operators of autograd, the outermost rows of the second one are put under the annotations
    "## backward ##" of the first one (without such, under its ProfilerSteps) that last as long; if none is left while
    there are further outermost annotations, HTA puts these under themselves and so loses all that is in them. All
    other rows have the depth -1, which hides everything else from a search by depth.

    HTA nests by a stack: what opens goes on top, and whatever closes takes the topmost row off; in which order, says
    hta_row_order.py. Rows that end before they start, which HTA's rounding makes, leave one too many on the stack. HTA
    fails where one of them shares a time with one of no length, and where the tid of a thread is a text.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.compat.hta.hta_frame import KINDS, NOTHING, HtaError, HtaFrame, hta_frame
from kineto_trace.compat.hta.hta_row_order import boundaries
from kineto_trace.model.context import Context
from kineto_trace.model.event_kinds import TID_TEXT

LOST = -2
_BACKWARD = "## backward ##"
_STEP = "ProfilerStep#"

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HtaStacks:
    """depth: of each row of the frame. place: of each row in the stacks, in preorder; NOTHING: it is in none.

    row: of each place. stop: the place after the last one inside. outermost: places that nothing is around. under: for
    each of these the place that it was put under; LOST: HTA counts no kernels in it.
    """

    depth: Ints
    place: Ints
    row: Ints
    stop: Ints
    outermost: Ints
    under: Ints

    def among(self, places: Ints, roots: Ints) -> Ints:
        """For each place the index into roots (sorted, none inside another) of the one around it; NOTHING: none."""
        found = self._directly(places, roots)
        under = self.under[np.searchsorted(self.outermost, places, side="right") - 1]
        moved = np.flatnonzero((found < 0) & (under >= 0))
        found[moved] = self._directly(under[moved], roots)
        return np.where(under == LOST, NOTHING, found)

    def _directly(self, places: Ints, roots: Ints) -> Ints:
        if not len(roots):
            return np.full(len(places), NOTHING, np.int64)
        last = np.searchsorted(roots, places, side="right") - 1
        inside = (last >= 0) & (places < self.stop[roots[last]])
        return np.where(inside, last, NOTHING)


def hta_stacks(context: Context) -> HtaStacks:
    """The stacks of the whole frame. Raises HtaError."""
    frame = context.get(hta_frame)
    rows = np.flatnonzero((frame.stream == NOTHING) & (frame.pid != 0) & (frame.tid != 0))
    track = group([frame.pid[rows], frame.tid[rows]]).number
    _check(context, frame, rows, track)
    order, level, stop = _nested(track, frame.start[rows], frame.end[rows])
    row, track = rows[order], track[order]
    outermost = np.flatnonzero(level == 0)
    under = _moved_under(context, frame, row, track, outermost)
    deeper = np.where(under >= 0, level[under] + 1, 0) if len(row) else under
    depth = np.full(len(frame), NOTHING, np.int64)
    depth[row] = level + np.repeat(deeper, np.diff(outermost, append=len(row)))
    place = np.full(len(frame), NOTHING, np.int64)
    place[row] = np.arange(len(row))
    gpu = np.flatnonzero((frame.stream > 0) & (frame.link != NOTHING))
    gpu = gpu[place[frame.link[gpu]] >= 0]
    depth[gpu] = depth[frame.link[gpu]] + 1
    return HtaStacks(depth, place, row, stop, outermost, under)


def _check(context: Context, frame: HtaFrame, rows: Ints, track: Ints) -> None:
    """Raises HtaError where HTA fails: it cannot compare some events, nor negate the name of a thread."""
    for kind in unique_values(frame.kind[rows]).tolist():
        origin = context.trace.table(KINDS[kind]).origin
        own = frame.row[rows[frame.kind[rows] == kind]]
        if origin and (origin["present"][own] & np.uint64(TID_TEXT)).any():
            raise HtaError("the thread of some calls or operators is a text")
    length = np.tile(frame.duration[rows], 2)
    keys = group([np.tile(track, 2), np.concatenate([frame.start[rows], frame.end[rows]])])
    empty, backwards = (np.bincount(keys.number[chosen], minlength=len(keys)) for chosen in (length == 0, length < 0))
    if (empty * backwards).any():
        raise HtaError("its rounding made events of 0 and of -1 us at one time")


def _nested(track: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """The rows by track in the order in which they open; for each such place its level, and its stop."""
    count = len(track)
    if not count:
        return track, track, track
    order = boundaries(track, start, end)
    opens = order < count
    track, row = np.tile(track, 2)[order], order
    first = np.flatnonzero(np.diff(track, prepend=-1))
    step = np.where(opens, 1, -1)
    height = np.cumsum(step)
    height -= np.repeat(height[first] - step[first], np.diff(first, append=len(step)))
    lowest = _running_minimum(np.minimum(height, 0), first)
    before = np.roll(lowest, 1)
    before[first] = 0
    level = height - lowest - opens  # of what opens or closes
    kept = np.flatnonzero(opens | (lowest == before))  # all but closings on an empty stack
    kept = kept[np.lexsort((level[kept], track[kept]))]  # of a level and track: open, close, open, close, …
    opening = np.flatnonzero(opens[kept])
    here, following = kept[opening], kept[np.minimum(opening + 1, len(kept) - 1)]
    closed = ~opens[following] & (track[following] == track[here]) & (level[following] == level[here])
    ends = np.append(first[1:], len(step))
    close = np.where(closed, following, ends[np.searchsorted(first, here, side="right") - 1])
    opened = np.concatenate([[0], np.cumsum(opens)])
    stop = np.empty(count, np.int64)
    stop[opened[here]] = opened[close]
    return row[opens], level[opens], stop


def _running_minimum(values: Ints, first: Ints) -> Ints:
    """In each stretch that begins at one of `first`."""
    base = int(values.min(initial=0)) - 1
    track = np.repeat(np.arange(len(first)), np.diff(first, append=len(values)))
    found: Ints = np.minimum.accumulate(values + track * base) - track * base
    return found


def _moved_under(context: Context, frame: HtaFrame, row: Ints, track: Ints, outermost: Ints) -> Ints:
    """For each outermost place the place of the annotation that it is put under, if it is of the backward thread."""
    strings, under = context.trace.strings, np.full(len(outermost), NOTHING, np.int64)
    if not len(row):
        return under
    name = frame.name[row]
    is_step, is_annotation, is_backward = (
        np.array([test(text) for text in strings], np.bool_)[name]
        for test in (
            lambda text: text.startswith(_STEP),
            lambda text: text.startswith(_BACKWARD),
            lambda text: "autograd::" in text,
        )
    )
    main = unique_values(track[is_step])
    backward = np.setdiff1d(unique_values(track[is_backward]), main)
    if len(main) != 1 or len(backward) != 1:
        return under
    on_main = track == main[0]
    annotations = np.flatnonzero(is_annotation & on_main)
    if not len(annotations):
        annotations = np.flatnonzero(is_step & on_main)
    start, end = frame.start[row], frame.end[row]
    of_backward = np.flatnonzero(track[outermost] == backward[0])
    tops = outermost[of_backward]
    for annotation in annotations[np.argsort(row[annotations])].tolist():
        open_ = under[of_backward] == NOTHING
        if open_.any():
            inside = open_ & (start[tops] >= start[annotation]) & (end[tops] <= end[annotation])
            under[of_backward[inside]] = annotation
        else:
            under[outermost == annotation] = LOST
    return under
