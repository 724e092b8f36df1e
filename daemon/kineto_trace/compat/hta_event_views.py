"""HTA's events in the views diff_event_names, frequent_sequences and counters_with_operators, its launches and queues.

Also builds HTA's call stacks: which row of its frame is inside which other one, and how deep.

Theory of operation
    Rows without a stream are nested by time, by pid and tid (if one of these is 0 it is a GPU to HTA). A GPU row with
    a stream above 0 is below the call that it is linked to. If exactly one thread has ProfilerSteps and exactly one
    other has operators of autograd, the outermost rows of the second one are put under the annotations "## backward ##"
    of the first one (without such, under its ProfilerSteps) that last as long; if none is left while there are further
    outermost annotations, HTA puts these under themselves and so loses their contents. All other rows have the depth
    -1, which hides everything else from a search by depth.

    HTA nests by a stack: a beginning pushes its row, and any end pops the topmost row; the order is described below.
    Rows that end before they start, which HTA's rounding makes, leave one too many on the stack. HTA fails if one of
    them shares a time with one of no length, and if the tid of a thread is a text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kineto_trace.analysis.diff.event_diff_views import EventsOn, Side, diff_event_names, side_of
from kineto_trace.analysis.kernels.kernel_views import (
    LaunchedWork,
    frequent_sequences,
    launched_activities,
    names_containing,
    sequence_columns,
)
from kineto_trace.analysis.kernels.precision_views import counter_columns, counters_with_operators
from kineto_trace.analysis.launch_views import (
    ATEN,
    MAX_QUEUE_LENGTH,
    Launches,
    OpLaunches,
    Queues,
    blocked_columns,
    blocked_on_full_queue,
    delay_columns,
    launch_columns,
    launch_stats,
    launch_summary,
    launch_summary_columns,
    launches_of,
    length_columns,
    op_kernel_delay,
    queue_length,
    queue_length_summary,
    queue_summary_columns,
    queues,
    queues_of,
)
from kineto_trace.arrays.id_sets import is_in, last_reaching, unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Flags, Ints, Ints32
from kineto_trace.compat.hta_critical_path_gpu import launches
from kineto_trace.compat.hta_frame import KIND, KINDS, HtaError, HtaFrame, hta_events, hta_frame, hta_rows, step_numbers
from kineto_trace.errors import ViewError
from kineto_trace.model.activity_tables import TID_TEXT
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat

LOST = -2
_BACKWARD = "## backward ##"
_STEP = "ProfilerStep#"
_KERNELS = frozenset(("cudaLaunchKernel", "cudaLaunchKernelExC", "runFunction - job_prep_and_submit_for_execution"))
_MEMORY = frozenset(("cudaMemcpyAsync", "cudaMemsetAsync"))
_KERNEL_LAUNCH = re.compile(r"cuda.*LaunchKernel|cuLaunchKernel|runFunction")


class _Boundary(int):
    """A beginning or end at a time where the rules are circular; its value is the place of the first one there."""

    opens: bool
    length: int
    row: int
    number: int

    def __lt__(self, other: int) -> bool:
        if type(other) is not _Boundary or int(self) != int(other):
            return int(self) < int(other)
        if self.row == other.row:
            return self.opens
        if not self.length and not other.length:
            if self.opens == other.opens:
                return (self.row < other.row) == self.opens
            return self.opens
        if not self.length:
            return not other.opens
        if not other.length:
            return self.opens
        if self.opens != other.opens:
            return other.opens
        if self.length != other.length:
            return (self.length > other.length) == self.opens
        return (self.row < other.row) == self.opens


@dataclass(frozen=True, slots=True)
class HtaStacks:
    """HTA's call stacks.

    depth: of each row of the frame.
    place: of each row in the stacks, in preorder, or NOTHING.
    row: of each place.
    stop: the place after the last one inside.
    outermost: places without an enclosing one.
    under: for each of these the place that it was put under; LOST if HTA counts no kernels in it.
    """

    depth: Ints
    place: Ints
    row: Ints
    stop: Ints
    outermost: Ints
    under: Ints

    def among(self, places: Ints, roots: Ints) -> Ints:
        """Returns for each place the index into roots (sorted, none inside another) of the one around it, or
        NOTHING.
        """
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


@diff_event_names.variant(Compat.HTA)
def hta_event_names(
    context: Context, *, device: EventsOn = "all", step: int | None = None, short_names: bool = False
) -> Side:
    """compat=hta: the figures of TraceDiff.compare_traces and TraceDiff.ops_diff.

    All rows that HTA keeps count, including Python functions (and here those of the last step), with HTA's rounding.
    Without `step` it compares the first step.
    """
    return side_of(context, *_of_step(context, device, step), short_names)


def _of_step(context: Context, device: EventsOn, step: int | None) -> tuple[Ints32, Ints]:
    frame = context.get(hta_rows)
    if step is None:
        numbers = step_numbers(context.trace.strings, np.arange(len(context.trace.strings), dtype=np.int32))
        known = numbers[numbers >= 0]
        if not len(known):
            raise ViewError("view diff_event_names: HTA compares one step, but the trace has no steps (ProfilerStep#N)")
        step = int(known.min())
    chosen = frame.iteration == step
    if device != "all":
        chosen &= (frame.stream != NOTHING) == (device == "gpu")
    return frame.name[chosen], frame.duration[chosen]


@frequent_sequences.variant(Compat.HTA)
def hta_sequences(context: Context, *, op: str = "aten::", min_pattern_len: int = 3) -> Answer:
    """compat=hta: the figures of get_frequent_cuda_kernel_sequences.

    All sequences are listed (HTA uses top_k only for its pictures). Of the events whose names match, only those at the
    smallest depth of their call stack count. Activities of the backward thread can belong to annotations of the other
    thread. Stream 0 does not count; synchronisations do. If HTA fails, the figures are the exact ones (of all
    sequences).
    """
    try:
        return sequence_columns(context, _launched(context, op), op, min_pattern_len, 0)
    except HtaError as exc:
        return sequence_columns(context, launched_activities(context, op), op, min_pattern_len, 0, [exc.note])


def _launched(context: Context, op: str) -> LaunchedWork:
    """Returns the launched activities. Raises HtaError."""
    frame, stacks = context.get(hta_frame), context.get(hta_stacks)
    empty = np.empty(0, np.int64)
    fits = names_containing(context, op)
    candidates = np.flatnonzero(fits[frame.name]) if len(fits) else empty
    if not len(candidates):
        return LaunchedWork(empty, empty.astype(np.int32), empty, empty.astype(np.int32), empty)
    depth = int(stacks.depth[candidates].min())
    places = stacks.place[candidates[stacks.depth[candidates] == depth]]
    roots = np.sort(places[places >= 0])
    rows = np.flatnonzero((frame.stream > 0) & (frame.link != NOTHING))
    rows = rows[stacks.place[frame.link[rows]] >= 0]
    root = stacks.among(stacks.place[frame.link[rows]], roots)
    rows, root = rows[root >= 0], root[root >= 0]
    order = np.lexsort((frame.start[rows], root))
    rows = rows[order]
    top = stacks.row[roots]
    return LaunchedWork(root[order], frame.name[rows], frame.duration[rows], frame.name[top], frame.duration[top])


@counters_with_operators.variant(Compat.HTA)
def hta_counters(context: Context) -> Answer:
    """compat=hta: the figures of get_cupti_counter_data_with_operators: the same, but without the last step."""
    frame = context.get(hta_frame)
    ranges, calls = (frame.row[frame.kind == KIND[kind]] for kind in ("other", "cuda_runtime"))
    return counter_columns(context, ranges, calls)


# The order in which HTA opens and closes the rows of a thread, before it nests them.
# HTA sorts the beginnings and ends of rows by time; at equal times ends come before beginnings; among beginnings the
# longest row is first, among ends the shortest, and among equally long rows the outer one. Rows of no length come after
# beginnings and before ends at the same time. If all three meet, these rules are circular, and the order is the result
# of Python's sort of an order that numpy's unstable sort by time left. So threads with such places are sorted by Python
# here as well. Only rows that meet there are compared by the rules: all others are plain numbers, which costs Python
# little.
def boundaries(track: Ints, start: Ints, end: Ints) -> Ints:
    """Returns the order of beginnings (numbers from 0 on) and ends (from the number of rows on) of all rows,
    by track.
    """
    count = len(track)
    opens = np.arange(2 * count) < count
    tracks, time = np.tile(track, 2), np.concatenate([start, end])
    length, empty = np.tile(end - start, 2), np.tile(start == end, 2)
    places = group([tracks, time])
    number, size = places.number, len(places)
    bridged, begun, ended = (
        np.bincount(number[chosen], minlength=size) > 0 for chosen in (empty, opens & ~empty, ~opens & ~empty)
    )
    rank = np.where(opens, np.where(bridged[number], 0, 1), np.where(bridged[number], 3, 0))
    rank = np.where(empty, np.where(opens, 1, 2), rank)
    row = np.tile(np.arange(count), 2)
    order = np.lexsort((np.where(opens, row, -row), np.where(opens, -length, length), rank, time, tracks))
    circular = (bridged & begun & ended)[number]
    if circular.any():
        _sort_by_rules(order, tracks, time, circular, number)
    return order


def _sort_by_rules(order: Ints, tracks: Ints, time: Ints, circular: Flags, number: Ints) -> None:
    """Sorts circular places in the order of HTA's sort."""
    count = len(order) // 2
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    first = np.full(int(number.max()) + 1, len(order), np.int64)
    np.minimum.at(first, number[circular], place[circular])
    value = np.where(circular, first[number], place)
    length = time[count:] - time[:count]
    for track in unique_values(tracks[circular]).tolist():
        own = np.flatnonzero(tracks == track)
        own = own[np.argsort(time[own].astype(np.float64), kind="quicksort")]
        values: list[int] = value[own].tolist()
        chosen = np.flatnonzero(circular[own])
        for at, what in zip(chosen.tolist(), own[chosen].tolist(), strict=True):
            boundary = _Boundary(values[at])
            boundary.opens, boundary.row, boundary.number = what < count, what % count, what
            boundary.length = int(length[what % count])
            values[at] = boundary
        found = [entry.number for entry in sorted(values) if type(entry) is _Boundary]
        order[np.sort(place[own[chosen]])] = found


def hta_stacks(context: Context) -> HtaStacks:
    """Returns the stacks of the whole frame. Raises HtaError."""
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
    """Raises HtaError if HTA fails: it cannot compare some events, nor negate the name of a thread."""
    for kind in unique_values(frame.kind[rows]).tolist():
        origin = context.trace.table(KINDS[kind]).origin
        own = frame.row[rows[frame.kind[rows] == kind]]
        if origin and (origin["present"][own] & np.uint64(TID_TEXT)).any():
            raise HtaError("some calls or operators have a thread id that is not a number")
    length = np.tile(frame.duration[rows], 2)
    keys = group([np.tile(track, 2), np.concatenate([frame.start[rows], frame.end[rows]])])
    empty, backwards = (np.bincount(keys.number[chosen], minlength=len(keys)) for chosen in (length == 0, length < 0))
    if (empty * backwards).any():
        raise HtaError("its rounding produced events of 0 and of -1 us at the same time")


def _nested(track: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns the rows by track in the order in which they open, and the level and stop of each place."""
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
    level = height - lowest - opens  # of each beginning or end
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
    """Returns the running minimum within each run that begins at one of `first`."""
    base = int(values.min(initial=0)) - 1
    track = np.repeat(np.arange(len(first)), np.diff(first, append=len(values)))
    found: Ints = np.minimum.accumulate(values + track * base) - track * base
    return found


def _moved_under(context: Context, frame: HtaFrame, row: Ints, track: Ints, outermost: Ints) -> Ints:
    """Returns for each outermost place of the backward thread the place of the annotation that it is put under."""
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


# HTA's figures of launches and queues.
#
# HTA's queues in the views queue_length, queue_length_summary and blocked_on_full_queue.
#
# HTA does not distinguish devices, and if a launch and a start share a microsecond it uses the order of an unstable
# sort. It fails if calls share a correlation; the queues are then the exact ones.


@launch_stats.variant(Compat.HTA)
def hta_launch_stats(
    context: Context,
    *,
    runtime_cutoff: float = 50,
    launch_delay_cutoff: float = 100,
    include_memory: bool = True,
) -> Answer:
    """compat=hta: the launches of get_cuda_kernel_launch_stats.

    These are the launches by cudaLaunchKernel and cudaLaunchKernelExC, with include_memory also by cudaMemcpyAsync and
    cudaMemsetAsync. Driver calls and graph launches do not count.
    """
    return launch_columns(context, _launches(context, include_memory), runtime_cutoff, launch_delay_cutoff)


@launch_summary.variant(Compat.HTA)
def hta_launch_summary(
    context: Context,
    *,
    runtime_cutoff: float = 50,
    launch_delay_cutoff: float = 100,
    include_memory: bool = True,
) -> Answer:
    """compat=hta: the same launches as in launch_stats. The counts are those of the values in HTA's histograms."""
    return launch_summary_columns(_launches(context, include_memory), runtime_cutoff, launch_delay_cutoff)


def _launches(context: Context, include_memory: bool) -> Launches:
    """Returns all pairs of rows with the correlation of a launch, one without and one with a stream, in HTA's order."""
    frame = context.get(hta_frame)
    wanted = _KERNELS | _MEMORY if include_memory else _KERNELS
    launches = np.array([text in wanted for text in context.trace.strings], np.bool_)
    chosen = frame.correlation[launches[frame.name]] if len(launches) else frame.correlation[:0]
    among = np.isin(frame.correlation, chosen[chosen >= 0])
    cpu, work = np.flatnonzero(among & (frame.stream == -1)), np.flatnonzero(among & (frame.stream != -1))
    work = work[np.argsort(frame.correlation[work], kind="stable")]
    keys = frame.correlation[work]
    low, high = (np.searchsorted(keys, frame.correlation[cpu], side) for side in ("left", "right"))
    count = high - low
    place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    cpu, work = np.repeat(cpu, count), work[np.repeat(low, count) + place]
    return launches_of(
        frame.correlation[cpu],
        (frame.name[cpu], frame.start[cpu], frame.end[cpu]),
        (frame.name[work], frame.start[work], frame.end[work]),
    )


@op_kernel_delay.variant(Compat.HTA)
def hta_op_kernel_delay(context: Context) -> Answer:
    """compat=hta: the figures of get_aten_op_kernels_and_delay.

    Only calls named cuda…LaunchKernel… and cuLaunchKernel… count. A launch belongs to the operator, of any thread, that
    started last among those that were still running when the call ended. Launches without a kernel, on which HTA fails,
    are left out. Delays are rounded to three digits.
    """
    found, notes = _op_launches(context)
    return delay_columns(context, found, 3, notes)


def _op_launches(context: Context) -> tuple[OpLaunches, list[str]]:
    frame, strings = context.get(hta_frame), context.trace.strings
    empty = np.zeros(0, np.bool_)
    is_aten = np.array([text.startswith(ATEN) for text in strings], np.bool_)
    is_launch = np.array([_KERNEL_LAUNCH.match(text) is not None for text in strings], np.bool_)
    ops = np.flatnonzero(is_aten[frame.name] if len(strings) else empty)
    launches = np.flatnonzero(is_launch[frame.name] if len(strings) else empty)
    op = _deepest(frame, ops, launches)
    launches, op = launches[op >= 0], op[op >= 0]
    kernels = np.flatnonzero((frame.stream != NOTHING) & (frame.link != NOTHING))
    kernel_of = np.full(len(frame), NOTHING, np.int64)
    kernel_of[frame.link[kernels[::-1]]] = kernels[::-1]
    kernel = kernel_of[launches]
    lost = int(np.count_nonzero(kernel < 0))
    notes = [f"HTA fails on this trace: {lost:,} launches inside operators have no kernel"] if lost else []
    launches, op, kernel = launches[kernel >= 0], op[kernel >= 0], kernel[kernel >= 0]
    run = group([frame.tid[op], frame.name[op].astype(np.int64), frame.start[op]]).number
    order = np.argsort(run, kind="stable")
    launches, op, kernel, run = launches[order], op[order], kernel[order], run[order]
    found = OpLaunches(
        run, frame.name[op], frame.start[op], frame.start[launches], frame.start[kernel], frame.name[kernel]
    )
    return found, notes


def _deepest(frame: HtaFrame, ops: Ints, launches: Ints) -> Ints:
    """Returns for each launch the operator that started last of those around it."""
    order = ops[np.argsort(frame.start[ops], kind="stable")]
    start, end, needed = frame.start[order], frame.end[order], frame.end[launches]
    place = last_reaching(end, np.searchsorted(start, frame.start[launches], side="right"), needed)
    found = np.where(place >= 0, order[place], NOTHING) if len(order) else np.full(len(launches), NOTHING)
    second = np.full(len(launches), NOTHING)
    rows = np.flatnonzero(place >= 0)
    second[rows] = last_reaching(end, place[rows], needed[rows])
    tied = np.flatnonzero((second >= 0) & (start[second] == start[place])) if len(order) else rows
    found[tied] = _first_by_sort(frame, order, end, place[tied], needed[tied])
    return found


def _first_by_sort(frame: HtaFrame, order: Ints, end: Ints, place: Ints, needed: Ints) -> Ints:
    """Returns, of several that started last, the one that the unstable sort of all around the launch puts first."""
    question, op = [], []
    rows = np.arange(len(place))
    while len(rows):
        question.append(rows)
        op.append(order[place])
        place = last_reaching(end, place, needed[rows])
        rows, place = rows[place >= 0], place[place >= 0]
    questions, ops = np.concatenate([rows, *question]), np.concatenate([order[:0], *op])
    by_row = np.lexsort((-ops, questions))  # backwards, as pandas sorts from high to low
    ops, count = ops[by_row], np.bincount(questions, minlength=len(needed))
    first = np.cumsum(count) - count
    found = np.full(len(needed), NOTHING, np.int64)
    for size in unique_values(count).tolist():
        chosen = np.flatnonzero(count == size)
        among = ops[first[chosen][:, None] + np.arange(size)]
        best = np.argsort(frame.counted(frame.start[among]), axis=1, kind="quicksort")[:, -1]
        found[chosen] = among[np.arange(len(chosen)), best]
    return found


@queue_length.variant(Compat.HTA)
def hta_queue_length(context: Context) -> Answer:
    """compat=hta: the figures of get_queue_length_time_series: only calls that HTA knows as launches (no graphs)."""
    return _or_exact(context, length_columns, length_columns)


@queue_length_summary.variant(Compat.HTA)
def hta_queue_length_summary(context: Context) -> Answer:
    """compat=hta: the figures of get_queue_length_summary."""
    return _or_exact(context, queue_summary_columns, queue_summary_columns)


@blocked_on_full_queue.variant(Compat.HTA)
def hta_blocked_on_full_queue(context: Context, *, max_queue_length: int = MAX_QUEUE_LENGTH) -> Answer:
    """compat=hta: the figures of get_time_spent_blocked_on_full_queue: only the last such stream of each rank."""
    return _or_exact(
        context,
        lambda found: blocked_columns(found, max_queue_length, last_only=True),
        lambda found: blocked_columns(found, max_queue_length),
    )


def _or_exact(context: Context, hta: Callable[[Queues], Answer], exact: Callable[[Queues], Answer]) -> Answer:
    """Returns HTA's figures, or if HTA fails the exact ones."""
    try:
        return hta(context.get(hta_queues))
    except HtaError as exc:
        answer = exact(context.get(queues))
        return Answer(answer.values, [exc.note, *answer.notes])


def hta_queues(context: Context) -> Queues:
    """Returns HTA's queues. Raises HtaError."""
    frame, events = context.get(hta_frame), context.get(hta_events)
    is_launch = launches(context.trace.strings, frame)
    correlation = frame.correlation[events.row]
    known = (correlation >= 0) & is_in(correlation.astype(np.uint64), frame.correlation[is_launch].astype(np.uint64))
    rows = np.flatnonzero(known)
    keys, count = np.unique(correlation[rows], return_counts=True)
    of_call = frame.correlation[is_launch]
    at = np.minimum(np.searchsorted(keys, of_call), max(len(keys) - 1, 0))
    joined = np.where(keys[at] == of_call, count[at], 1).sum() if len(keys) else len(of_call)
    if joined != len(rows):
        raise HtaError("several launches have the same correlation id")
    called = frame.link[events.row[rows]]
    order = np.argsort(called, kind="stable")  # launches are in the order of the calls
    time = np.concatenate([frame.start[called[order]], events.start[rows]])
    rows_ = np.concatenate([rows[order], rows])
    change = np.repeat([1, -1], len(rows))
    by_time = frame.order(time)
    by_time = by_time[np.argsort(events.track[rows_][by_time], kind="stable")]
    rows_ = rows_[by_time]
    span = int(np.ptp(frame.start)) if len(frame) else 0
    found = queues_of(
        (time[by_time], change[by_time], events.track[rows_]),
        (np.full(len(rows_), NOTHING, np.int64), events.stream[rows_]),
        (frame.origin_ns, span, int(np.count_nonzero(events.activity)) - len(rows)),
    )
    return replace(found, because="were not launched by a call that HTA knows", by_device=False)
