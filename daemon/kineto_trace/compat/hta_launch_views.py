"""HTA's figures of launches and queues.

HTA's queues in the views queue_length, queue_length_summary and blocked_on_full_queue.

HTA does not distinguish devices, and if a launch and a start share a microsecond it uses the order of an unstable sort.
It fails if calls share a correlation; the queues are then the exact ones.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

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
from kineto_trace.base.array_types import NOTHING, Ints
from kineto_trace.compat.hta_critical_path_gpu import launches
from kineto_trace.compat.hta_frame import HtaError, HtaFrame, hta_events, hta_frame
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat

_KERNELS = frozenset(("cudaLaunchKernel", "cudaLaunchKernelExC", "runFunction - job_prep_and_submit_for_execution"))
_MEMORY = frozenset(("cudaMemcpyAsync", "cudaMemsetAsync"))
_KERNEL_LAUNCH = re.compile(r"cuda.*LaunchKernel|cuLaunchKernel|runFunction")


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
        raise HtaError("several launches have one correlation")
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
