"""How long ATen operators take to launch their kernels, and these to start."""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.equal_sequences import group_sequences
from kineto_trace.arrays.range_search import last_reaching
from kineto_trace.arrays.row_groups import group
from kineto_trace.compat.hta.hta_frame import NOTHING, HtaFrame, hta_frame
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

_ATEN = "aten::"
_HTA_LAUNCH = re.compile(r"cuda.*LaunchKernel|cuLaunchKernel|runFunction")
ARROW = " -> "

Ints = npt.NDArray[np.int64]


class _Launches(NamedTuple):
    """Kernels that an operator launched (ns), those of one operator one after the other in the order of launches."""

    op: Ints  # dense number of the operator's run
    op_name: npt.NDArray[np.int32]
    op_start: Ints
    launch: Ints
    start: Ints
    kernel: npt.NDArray[np.int32]


@view(
    "op_kernel_delay",
    columns(
        ("op", "text", "", "operator"),
        ("kernels", "text", "", "the kernels that it launched, in order"),
        ("kernel_count", "int", "", "how many these are"),
        ("count", "int", "", "runs of the operator with these kernels"),
        ("launch_delay_us", "float", "us", "mean time from the operator's start to its first launch"),
        ("runtime_delay_us", "float", "us", "mean time from that launch to the start of its kernel"),
    ),
    compat=(Compat.HTA,),
)
def op_kernel_delay(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """The sequences of kernels that ATen operators launch themselves, and the delays of the first kernel of each.

    A launch belongs to the innermost operator "aten::…" of its thread that runs when the call begins.

    HTA's figures (get_aten_op_kernels_and_delay): only calls named cuda…LaunchKernel… and cuLaunchKernel…; a launch
    belongs to the operator that started last of those, of any thread, that last until the call has ended; launches
    without a kernel, at which HTA fails, are left out; delays have three digits.
    """
    found, notes = _hta_launches(context) if compat is Compat.HTA else (_exact_launches(context), [])
    first = np.flatnonzero(np.diff(found.op, prepend=-1))
    op_name, op_start = found.op_name[first], found.op_start[first]
    values = np.insert(found.kernel.astype(np.int64), first, op_name)
    sequences = group_sequences(values, first + np.arange(len(first)))
    launch_delay = np.bincount(sequences.number, found.launch[first] - op_start, len(sequences.size))
    runtime_delay = np.bincount(sequences.number, found.start[first] - found.launch[first], len(sequences.size))
    strings = context.trace.strings
    stops = [*first[1:].tolist(), len(found.op)]
    rows = []
    for place, example in enumerate(sequences.example.tolist()):
        kernels = [strings[name] for name in found.kernel[first[example] : stops[example]].tolist()]
        size = int(sequences.size[place])
        delays = [float(total[place]) / size / 1000 for total in (launch_delay, runtime_delay)]
        if compat is Compat.HTA:
            delays = [float(np.round(delay, 3)) for delay in delays]
        rows.append((strings[op_name[example]], ARROW.join(kernels), len(kernels), size, *delays))
    rows.sort(key=lambda row: (-int(row[3]), row[0], row[1]))
    names = [column.name for column in op_kernel_delay.columns]
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)}, notes)


def _exact_launches(context: Context) -> _Launches:
    strings, table = context.trace.strings, context.trace.table("cpu_op")
    is_aten = np.array([text.startswith(_ATEN) for text in strings], np.bool_)
    ops = table.take(np.flatnonzero(is_aten[table["name"]])) if len(strings) else table
    work, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero((work.kind == KERNEL) & (work.call >= 0))
    nested = nest_tables([ops], context.trace.window_end_ns)
    place = nested.innermost(called.thread, called.start)[work.call[rows]] if len(rows) else rows
    rows, place = rows[place >= 0], place[place >= 0]
    launch = called.start[work.call[rows]] if len(rows) else rows
    order = np.lexsort((work.start[rows], launch, place))
    rows, place, launch = rows[order], place[order], launch[order]
    row = nested.order[place]
    return _Launches(
        np.cumsum(np.diff(place, prepend=-1) != 0) - 1,
        ops["name"][row],
        ops["start"][row],
        launch,
        work.start[rows],
        work.name[rows],
    )


def _hta_launches(context: Context) -> tuple[_Launches, list[str]]:
    frame, strings = context.get(hta_frame), context.trace.strings
    empty = np.zeros(0, np.bool_)
    is_aten = np.array([text.startswith(_ATEN) for text in strings], np.bool_)
    is_launch = np.array([_HTA_LAUNCH.match(text) is not None for text in strings], np.bool_)
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
    found = _Launches(
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
    for size in np.unique(count).tolist():
        chosen = np.flatnonzero(count == size)
        among = ops[first[chosen][:, None] + np.arange(size)]
        best = np.argsort(frame.counted(frame.start[among]), axis=1, kind="quicksort")[:, -1]
        found[chosen] = among[np.arange(len(chosen)), best]
    return found
