"""How long ATen operators take to launch their kernels, and these to start."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.equal_sequences import group_sequences
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

ATEN = "aten::"
ARROW = " -> "

Ints = npt.NDArray[np.int64]


class OpLaunches(NamedTuple):
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
        ("kernels", "text", "", "kernels that it launched, in order"),
        ("kernel_count", "int", "", "number of these kernels"),
        ("count", "int", "", "runs of the operator with these kernels"),
        ("launch_delay_us", "float", "us", "mean time from the start of the operator to its first launch"),
        (
            "runtime_delay_us",
            "float",
            "us",
            "mean time from that launch to the start of its kernel; 0 if the kernel started earlier",
        ),
    ),
    nothing="no operator aten::… launched a kernel of the trace",
)
def op_kernel_delay(context: Context) -> Answer:
    """The sequences of kernels that ATen operators launch themselves, and the delays of the first kernel of each.

    A launch belongs to the innermost operator "aten::…" that runs on its thread when the call begins.
    """
    return delay_columns(context, _exact_launches(context))


def delay_columns(context: Context, found: OpLaunches, digits: int | None = None, notes: Sequence[str] = ()) -> Answer:
    """The columns of the view. digits: what delays are rounded to."""
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
        if digits is not None:
            delays = [float(np.round(delay, digits)) for delay in delays]
        rows.append((strings[op_name[example]], ARROW.join(kernels), len(kernels), size, *delays))
    rows.sort(key=lambda row: (-int(row[3]), row[0], row[1]))
    names = [column.name for column in op_kernel_delay.columns]
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)}, notes)


def _exact_launches(context: Context) -> OpLaunches:
    strings, table = context.trace.strings, context.trace.table("cpu_op")
    is_aten = np.array([text.startswith(ATEN) for text in strings], np.bool_)
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
    return OpLaunches(
        np.cumsum(np.diff(place, prepend=-1) != 0) - 1,
        ops["name"][row],
        ops["start"][row],
        launch,
        np.maximum(work.start[rows], launch),
        work.name[rows],
    )
