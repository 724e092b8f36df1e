"""Views of what the GPUs waited for."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.analysis.idle.idle_gaps import CAUSES, IdleCause, IdleGaps, idle_gaps
from kineto_trace.analysis.idle.idle_pieces import IDLE_CAUSES, idle_pieces
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.quantities import times
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING, calls, gpu, steps
from kineto_trace.structure.call_stacks import NO_STACK, call_stacks
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NEVER_IDLE = "no GPU was idle in the steps (without complete ones: in the trace)"


@view(
    "idle_causes",
    columns(
        ("device", "int", "", "GPU"),
        ("cause", "text", "", f"one of {', '.join(CAUSES)}"),
        ("gaps", "int", "", "number of gaps"),
        ("idle_us", "float", "us", "sum of their lengths"),
        ("idle_pct", "float", "%", "share of the GPU's idle time"),
        ("window_pct", "float", "%", "share of the window (the steps, or the trace)"),
        ("longest_us", "float", "us", "longest gap"),
        ("op", "text", "", "operator to which most of this idle time belongs"),
        ("op_us", "float", "us", "idle time that belongs to it"),
    ),
)
def idle_causes(context: Context) -> Answer:
    """Why each GPU was idle, by cause.

    A gap is a stretch of the window without any kernel, copy or fill on the GPU. The activity that ends it determines
    the cause: it was launched before the gap began (queued), or late by a host that had waited for the GPU
    (synchronisation), for the next batch (data_loading), for other ranks (communication) or for CUDA's memory
    allocation (memory), or that was simply busy (host: the launch-bound case). kineto_trace.analysis.idle.idle_gaps
    describes the rule in full.
    """
    found = context.get(idle_gaps)
    ops = context.trace.table("cpu_op")
    rows = []
    for device, window in found.windows.items():
        own = found.device == device
        idle = int(found.length[own].sum())
        for number, cause in enumerate(CAUSES):
            chosen = np.flatnonzero(own & (found.cause == number))
            if len(chosen):
                length = found.length[chosen]
                total = int(length.sum())
                names, times = _by_op(found, chosen, ops["name"])
                top = int(np.argmax(times)) if len(times) else NOTHING
                rows.append(
                    (
                        device,
                        cause,
                        len(chosen),
                        total / 1e3,
                        100 * total / idle,
                        100 * total / window,
                        int(length.max()) / 1e3,
                        context.trace.strings[names[top]] if top >= 0 else None,
                        times[top] / 1e3 if top >= 0 else None,
                    )
                )
    rows.sort(key=lambda row: (row[0], -row[3]))
    return Answer(
        {column.name: [row[n] for row in rows] for n, column in enumerate(idle_causes.columns)}, _notes(found)
    )


def _notes(found: IdleGaps) -> list[str]:
    """Returns why there is no gap, if there is none."""
    if not found.windows:
        return [NO_GPU]
    return [] if len(found) else [NEVER_IDLE]


def _by_op(
    found: IdleGaps, chosen: npt.NDArray[np.int64], op_names: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Names of operators (numbers of strings) and the idle time (ns) of each."""
    with_op = chosen[found.op[chosen] >= 0]
    names, place = np.unique(op_names[found.op[with_op]], return_inverse=True)
    times = np.zeros(len(names), np.int64)
    np.add.at(times, place, found.length[with_op])
    return names, times


@view(
    "idle_gaps",
    columns(
        ("device", "int", "", "GPU"),
        ("start_ns", "int", "ns", "start of the gap, Unix time"),
        ("idle_us", "float", "us", "length"),
        ("cause", "text", "", f"one of {', '.join(CAUSES)}"),
        ("step", "int", "", "training step in which it began"),
        ("op", "text", "", "operator that the host was in"),
        ("doing", "text", "", f"what most of it went to: one of {', '.join(IDLE_CAUSES)} (view time_causes)"),
        ("doing_us", "float", "us", "how much of it"),
        ("function", "text", "", "Python function of the user that ran then, with file and line"),
        ("blocking_call", "text", "", "call that had waited for the GPU"),
        ("launch_call", "text", "", "call that ended the gap"),
        ("before", "text", "", "activity before the gap"),
        ("after", "text", "", "activity after the gap"),
        ("call_stack", "text", "", "Python frames around the operator, innermost first"),
    ),
)
def idle_gaps_view(context: Context, *, limit: int = 100, cause: IdleCause | None = None) -> Answer:
    """The longest gaps of all GPUs, each with its cause and what the host did.

    Options:
    - limit: the maximum number of gaps.
    - cause: only gaps with this cause.
    """
    found = context.get(idle_gaps)
    order, notes = np.argsort(-found.length, kind="stable"), _notes(found)
    if cause:
        order = order[found.cause[order] == CAUSES.index(cause)]
        if len(found) and not len(order):
            seen = ", ".join(CAUSES[number] for number in unique_values(found.cause).tolist())
            notes.append(f"no gap has the cause {cause}: those of this trace are {seen}")
    if len(order) and limit <= 0:
        notes.append(f"{times(len(order), 'gap is', 'gaps are')} not shown, since limit is {limit}")
    order = order[: max(limit, 0)]
    doing = _doing(context, order)
    strings, activity, called = context.trace.strings, context.get(gpu), context.get(calls)
    op_names, stacks, numbers = (
        context.trace.table("cpu_op")["name"],
        context.get(call_stacks),
        context.get(steps).number,
    )

    def texts(names: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]) -> list[str | None]:
        return [strings[names[row]] if row >= 0 else None for row in rows.tolist()]

    return Answer(
        {
            "device": found.device[order],
            "start_ns": found.start[order],
            "idle_us": found.length[order] / 1e3,
            "cause": [CAUSES[number] for number in found.cause[order].tolist()],
            "step": [int(numbers[place]) if place >= 0 else None for place in found.step[order].tolist()],
            "op": texts(op_names, found.op[order]),
            "doing": [IDLE_CAUSES[each.cause] if each else None for each in doing],
            "doing_us": [each.time_ns / 1e3 if each else None for each in doing],
            "function": [each.function if each else None for each in doing],
            "blocking_call": texts(called.name, found.blocking[order]),
            "launch_call": texts(called.name, found.launch[order]),
            "before": texts(activity.name, found.before[order]),
            "after": texts(activity.name, found.after[order]),
            "call_stack": [
                stacks.text(context.trace, int(stacks.of_op[row]) if row >= 0 else NO_STACK)
                for row in found.op[order].tolist()
            ],
        },
        notes,
    )


class _Doing(NamedTuple):
    """What most of a gap went to: number into IDLE_CAUSES."""

    cause: int
    time_ns: int
    function: str | None


def _doing(context: Context, chosen: npt.NDArray[np.int64]) -> list[_Doing | None]:
    """Returns for each of these gaps what most of it went to."""
    pieces, strings = context.get(idle_pieces), context.trace.strings
    lines = np.append(context.trace.table("python_function")["line"], 0)
    rows = np.flatnonzero(np.isin(pieces.gap, chosen))
    found = group([pieces.gap[rows], pieces.cause[rows], pieces.name[rows], pieces.frame[rows]])
    time = found.sums(pieces.length[rows])
    most: dict[int, _Doing] = {}
    for place in np.argsort(-time, kind="stable").tolist():
        row = int(rows[found.first[place]])
        frame = int(pieces.frame[row])
        function = str(code_place(strings[int(pieces.name[row])], int(lines[frame]))) if frame >= 0 else None
        most.setdefault(int(pieces.gap[row]), _Doing(int(pieces.cause[row]), int(time[place]), function))
    return [most.get(gap) for gap in chosen.tolist()]
