"""The innermost Python function of the training thread at many moments of the steps, and the time each represents.

Theory of operation
    Samples became slices, and slices were moved to where operators begin and end; a sample is now only a count in its
    innermost slice. A slice's own samples are spread evenly over the time in which it is the innermost one, from its
    beginning on, where the first one was. Each represents the same part of the steps' time. Exact calls are cut where
    steps begin and end, and into pieces of EXACT_NS, which represent their lengths.

    Only the moments of the training thread within its steps count; without steps, all.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import containing, union
from kineto_trace.arrays.row_groups import in_subtrees, sums
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu, steps, training_thread
from kineto_trace.structure.nesting import Nested
from kineto_trace.structure.python_frames import IDLE, WAITING, python_tree, state_counts
from kineto_trace.structure.step_pace import paced_steps

EXACT_NS = 100_000
MAX_MOMENTS = 2_000_000  # pieces of exact calls, or samples; if there are more, each represents several


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """The evaluated time (Unix ns), step by step: the measured steps, if there are any.

    thread: the training thread.
    number: of each step.
    told: whether the trace has steps.
    """

    thread: int
    start: Ints
    end: Ints
    number: Ints
    told: bool

    @property
    def total_ns(self) -> int:
        """Returns the time of all steps."""
        return int((self.end - self.start).sum())

    def of(self, time: Ints) -> Ints:
        """Returns for each moment the place of its step, or -1."""
        return containing(self.start, self.end, time)


@dataclass(frozen=True, slots=True)
class HostMoments:
    """One value per moment.

    place: of the innermost slice in thread_slices.
    weight: ns.
    step: place in TrainingSteps.
    sure: whether this is the time of the sample: of a slice's samples only the first one's is known, the others follow
        it.
    waiting, idle, collecting: the share (0 to 1) of its slice's own samples in which the thread waited for the GIL,
        slept, or ran the garbage collector.
    """

    time: Ints
    place: Ints
    weight: Floats
    step: Ints
    sure: Flags
    waiting: Floats
    idle: Floats
    collecting: Floats

    def __len__(self) -> int:
        return len(self.time)


def host_steps(context: Context) -> TrainingSteps:
    """Returns the steps of the training thread."""
    found, trace, thread = context.get(paced_steps), context.trace, context.get(training_thread)
    found = found if len(found) else context.get(steps)
    if not len(found):
        window = np.array([trace.window_start_ns]), np.array([trace.window_end_ns])
        return TrainingSteps(thread, *window, np.zeros(1, np.int64), told=False)
    own = found.thread == thread
    start, end = found.start[own], np.minimum(found.end[own], np.append(found.start[own][1:], found.end[own][-1]))
    return TrainingSteps(thread, start, end, found.number[own], told=True)


@dataclass(frozen=True, slots=True)
class ThreadSlices:
    """The Python slices of the training thread, outer ones first.

    row: of python_function.
    parent: place of the caller's slice as recorded, or NOTHING. By their times, sampled slices may lie inside others:
        some end too early, and some are moved to where operators begin.
    depth: larger than the caller's.
    """

    nested: Nested
    row: Ints
    parent: Ints
    depth: Ints

    def __len__(self) -> int:
        return len(self.row)


def thread_slices(context: Context) -> ThreadSlices:
    """Returns the slices of the thread of host_steps."""
    nested = context.get(python_tree).of_thread(context.get(host_steps).thread)
    table, row = context.trace.table("python_function"), nested.order.astype(np.int64)
    place = np.full(len(table) + 1, NOTHING, np.int64)  # the last one is for "no caller"
    place[row] = np.arange(len(row))
    depth = table["depth"][row].astype(np.int64)
    parent = place[np.clip(table["parent"][row], NOTHING, len(table))]
    inner = np.append(depth, np.iinfo(np.int64).max)[parent] < depth  # files may contain anything
    return ThreadSlices(nested, row, np.where(inner, parent, NOTHING), depth)


def slices_below(context: Context, names: Flags) -> Flags:
    """Returns for each slice of thread_slices whether it, or one around it, has one of these names (per string)."""
    slices = context.get(thread_slices)
    chosen = names[context.trace.table("python_function")["name"][slices.row]]
    return in_subtrees(chosen, slices.nested.tree.stop)


def moments(context: Context) -> HostMoments:
    """Returns the moments of the training thread inside its steps."""
    table, window, found = context.trace.table("python_function"), context.get(host_steps), context.get(thread_slices)
    own = _fewer(np.maximum(table["self_samples"][found.row].astype(np.int64), 0))
    stretches = _stretches(found, window)
    time, place, weight = _of_samples(stretches, own, found) if own.any() else _of_calls(stretches)
    step = window.of(time)
    inside = step >= 0
    time, place, weight, step = time[inside], place[inside], weight[inside], step[inside]
    sure = np.append(True, place[1:] != place[:-1])[: len(place)] if own.any() else np.ones(len(place), np.bool_)
    if own.any():
        weight = weight * window.total_ns / max(len(time), 1)
    row = found.row[place]
    counts = state_counts(table)[row]
    seen = np.maximum(counts.sum(axis=1), 1)
    shares = counts[:, WAITING] / seen, counts[:, IDLE] / seen, np.minimum(table["collecting"][row] / seen, 1)
    return HostMoments(time, place, weight, step, sure, *shares)


class _Stretches(NamedTuple):
    """Spans of time, and the innermost slice in each, sorted by slice and time."""

    start: Ints
    length: Ints
    place: Ints


def _stretches(found: ThreadSlices, window: TrainingSteps) -> _Stretches:
    nested = found.nested
    edges = unique_values(np.concatenate([nested.events.start, nested.tree.end, window.start, window.end]))
    inner = nested.innermost(np.full(len(edges) - 1, window.thread, np.uint32), edges[:-1]).astype(np.int64)
    order = np.argsort(inner, kind="stable")
    order = order[inner[order] >= 0]
    return _Stretches(edges[:-1][order], np.diff(edges)[order], inner[order])


def _fewer(own: Ints) -> Ints:
    """Scales the samples of all slices down to the maximum in total: a file may contain any number."""
    until = np.cumsum(own)
    share = -(-int(until[-1]) // MAX_MOMENTS) if len(own) else 1
    return np.diff(until // share, prepend=0) if share > 1 else own


def _of_samples(stretches: _Stretches, own: Ints, found: ThreadSlices) -> tuple[Ints, Ints, Floats]:
    """Returns times, slices and weights (1) of samples."""
    total = sums(stretches.place, stretches.length, len(found))
    ends = np.cumsum(stretches.length)
    base = np.zeros(len(found), np.int64)  # where the spans of each slice begin, if concatenated
    base[1:] = np.cumsum(total)[:-1]
    place = np.repeat(np.arange(len(found)), own)
    within = np.arange(len(place)) - np.repeat(np.cumsum(own) - own, own)
    at = base[place] + within * total[place] // own[place]
    stretch = np.minimum(np.searchsorted(ends, at, side="right"), max(len(ends) - 1, 0))
    offset = at - (ends[stretch] - stretches.length[stretch])
    time = np.where(total[place] > 0, stretches.start[stretch] + offset, found.nested.events.start[place])
    return time, place, np.ones(len(place))


def _of_calls(stretches: _Stretches) -> tuple[Ints, Ints, Floats]:
    """Returns times, slices and weights (ns) of pieces of exact calls."""
    piece = max(EXACT_NS, int(stretches.length.sum()) // MAX_MOMENTS)
    count = np.maximum((stretches.length + piece // 2) // piece, 1)
    place = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count)
    length = stretches.length / count
    time = stretches.start[place] + (within * length[place]).astype(np.int64)
    return time, stretches.place[place], length[place]


def host_time_lost(context: Context) -> Flags:
    """Returns for each moment whether the host loses time then: while no GPU works. Without GPU work: always."""
    found, activity = context.get(moments), context.get(gpu)
    if not len(activity):
        return np.ones(len(found), np.bool_)
    free: Flags = containing(*union(activity.start, activity.end), found.time) < 0
    return free
