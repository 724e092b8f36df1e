"""HTA's call stacks: which row of its frame is inside which other one, and how deep.

Theory of operation
    Rows without a stream are nested by time, by pid and tid (if one of these is 0 it is a GPU to HTA). A GPU row with
    a stream above 0 hangs under the call that it is linked to. If exactly one thread has ProfilerSteps and exactly one
    other has operators of autograd, the outermost rows of the second one are put under the annotations
    "## backward ##" of the first one (without such, under its ProfilerSteps) that last as long. All other rows have
    the depth -1, which hides everything else from a search by depth.

    HTA fails where its rounding makes rows that end before they start; here they are taken to last nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.context import Context
from kineto_trace.analysis.groups import group
from kineto_trace.analysis.hta_frame import NOTHING, HtaFrame, hta_frame
from kineto_trace.analysis.threads import Nested, nest
from kineto_trace.codec import Events

_BACKWARD = "## backward ##"
_STEP = "ProfilerStep#"

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HtaStacks:
    """depth: of each row of the frame. place: of each row among the sorted ones, NOTHING: not in a stack.

    nested: the stacks; row: of each place. under: for each outermost place the place that it was put under.
    """

    depth: Ints
    place: Ints
    row: Ints
    nested: Nested
    under: Ints

    def among(self, places: Ints, roots: Ints) -> Ints:
        """For each place the index into roots (sorted, none inside another) of the one around it; NOTHING: none."""
        found = self._directly(places, roots)
        missing = np.flatnonzero(found < 0)
        tops = np.flatnonzero(self.nested.tree.parent < 0)
        top = tops[np.searchsorted(tops, places[missing], side="right") - 1]
        moved = self.under[top] >= 0
        found[missing[moved]] = self._directly(self.under[top[moved]], roots)
        return found

    def _directly(self, places: Ints, roots: Ints) -> Ints:
        if not len(roots):
            return np.full(len(places), NOTHING, np.int64)
        last = np.searchsorted(roots, places, side="right") - 1
        inside = (last >= 0) & (places < self.nested.tree.stop[roots[last]])
        return np.where(inside, last, NOTHING)


def hta_stacks(context: Context) -> HtaStacks:
    """The stacks of the whole frame."""
    frame = context.get(hta_frame)
    rows = np.flatnonzero((frame.stream == NOTHING) & (frame.pid != 0) & (frame.tid != 0))
    track = group([frame.pid[rows], frame.tid[rows]]).number
    start = frame.start[rows]
    nested = nest(Events(track, start, np.maximum(frame.end[rows], start)), int(frame.end.max(initial=0)))
    row = rows[nested.order]
    under = _moved_under(context, frame, nested, row)
    depth = np.full(len(frame), NOTHING, np.int64)
    tops = np.flatnonzero(nested.tree.parent < 0)
    deeper = np.where(under[tops] >= 0, nested.tree.depth[under[tops]] + 1, 0)
    depth[row] = nested.tree.depth + np.repeat(deeper, np.diff(tops, append=len(row)))
    place = np.full(len(frame), NOTHING, np.int64)
    place[row] = np.arange(len(row))
    gpu = np.flatnonzero((frame.stream > 0) & (frame.link != NOTHING))
    gpu = gpu[place[frame.link[gpu]] >= 0]
    depth[gpu] = depth[frame.link[gpu]] + 1
    return HtaStacks(depth, place, row, nested, under)


def _moved_under(context: Context, frame: HtaFrame, nested: Nested, row: Ints) -> Ints:
    """For each outermost place of the backward thread the place of the annotation that it is put under."""
    strings, under = context.trace.strings, np.full(len(row), NOTHING, np.int64)
    if not len(row):
        return under
    name, track = frame.name[row], nested.events.track.astype(np.int64)
    is_step, is_annotation, is_backward = (
        np.array([test(text) for text in strings], np.bool_)[name]
        for test in (
            lambda text: text.startswith(_STEP),
            lambda text: text.startswith(_BACKWARD),
            lambda text: "autograd::" in text,
        )
    )
    main = np.unique(track[is_step])
    backward = np.setdiff1d(np.unique(track[is_backward]), main)
    if len(main) != 1 or len(backward) != 1:
        return under
    annotations = np.flatnonzero(
        (is_annotation if is_annotation[track == main[0]].any() else is_step) & (track == main[0])
    )
    tops = np.flatnonzero((nested.tree.parent < 0) & (track == backward[0]))
    start, end = frame.start[row], frame.end[row]
    for annotation in annotations[np.argsort(row[annotations])][::-1].tolist():  # the first one wins
        inside = tops[(start[tops] >= start[annotation]) & (end[tops] <= end[annotation])]
        under[inside] = annotation
    return under
