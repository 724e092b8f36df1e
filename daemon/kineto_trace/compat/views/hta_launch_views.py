"""HTA's launches in the views launch_stats, launch_summary and op_kernel_delay."""

import re

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.launches.launch_views import (
    Launches,
    launch_columns,
    launch_stats,
    launch_summary,
    launches_of,
    summary_columns,
)
from kineto_trace.analysis.launches.op_delay_views import ATEN, OpLaunches, delay_columns, op_kernel_delay
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.range_search import last_reaching
from kineto_trace.arrays.row_groups import group
from kineto_trace.compat.hta.hta_frame import NOTHING, HtaFrame, hta_frame
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat

_KERNELS = frozenset(("cudaLaunchKernel", "cudaLaunchKernelExC", "runFunction - job_prep_and_submit_for_execution"))
_MEMORY = frozenset(("cudaMemcpyAsync", "cudaMemsetAsync"))
_KERNEL_LAUNCH = re.compile(r"cuda.*LaunchKernel|cuLaunchKernel|runFunction")

Ints = npt.NDArray[np.int64]


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
    return summary_columns(_launches(context, include_memory), runtime_cutoff, launch_delay_cutoff)


def _launches(context: Context, include_memory: bool) -> Launches:
    """All pairs of rows with the correlation of a launch, one without and one with a stream, in HTA's order."""
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
    started last among those that were still running when the call ended. Launches without a kernel, at which HTA
    fails, are left out. Delays are rounded to three digits.
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
    """For each launch the operator that started last of those around it."""
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
    """Of several that started last, the one that the sort of all around the launch, which is not stable, puts first."""
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
