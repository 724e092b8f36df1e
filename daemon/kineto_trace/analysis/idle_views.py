"""When GPUs are idle, and why: the gaps of each stream and of each GPU."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.gpu_time_views import NO_GPU, GpuEvents, gpu_events
from kineto_trace.analysis.idle_gaps import CAUSES, IdleCause, IdleGaps, idle_gaps
from kineto_trace.analysis.idle_pieces import IDLE_CAUSES, idle_pieces
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Ints, Ints32
from kineto_trace.base.quantities import times
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, steps
from kineto_trace.structure.call_forests import NO_STACK, call_stacks
from kineto_trace.structure.library_calls import code_place
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import describe, statistics_columns
from kineto_trace.view_api.view import Answer, view

CATEGORIES = ("host_wait", "kernel_wait", "other")
HOST_WAIT, KERNEL_WAIT, OTHER = range(3)
Row = dict[str, float | str | None]
NEVER_IDLE = "no GPU was idle in the complete steps (or, if there are none, in the whole trace)"


class _Doing(NamedTuple):
    """The cause with most of a gap: number into IDLE_CAUSES."""

    cause: int
    time_ns: int
    function: str | None


@view(
    "idle_breakdown",
    columns(
        ("device", "int", "", "GPU index in the process; missing with compat=hta"),
        ("stream", "int", "", "stream"),
        ("category", "text", "", "host_wait, kernel_wait or other: see above"),
        ("idle_us", "float", "us", "sum of the gaps"),
        ("idle_pct", "float", "%", "share of the stream's idle time"),
    )
    + statistics_columns("us", "gaps", "_us"),
)
def idle_breakdown(
    context: Context,
    *,
    consecutive_kernel_delay: float = 30,
    streams: Sequence[int] = (),
) -> Answer:
    """The gaps between the kernels, copies and fills of each stream, by cause.

    A gap is the time from the end of all earlier activities of the stream to the start of the next one. Its categories:
    - host_wait: the call that launched the next activity began only after the gap had begun.
    - kernel_wait: the activity was launched in time, and the gap is shorter than consecutive_kernel_delay: the overhead
      of starting one kernel after another.
    - other: neither; for example, the stream waited for an event of another stream.

    Options:
    - consecutive_kernel_delay: in us.
    - streams: only these streams; all by default.
    """
    events = context.get(gpu_events)
    parts = tracks(events, events.track)
    gaps = [_gaps(events, part, round(consecutive_kernel_delay * 1000)) for part in parts]
    rows = [
        idle_row(int(events.device[part[0]]), int(events.stream[part[0]]), number, *found)
        for part, found in zip(parts, gaps, strict=True)
        for number in range(len(CATEGORIES))
    ]
    return idle_columns(events, parts, rows, streams)


def tracks(events: GpuEvents, keys: Ints) -> list[Ints]:
    """Groups the activities by keys, each group in the order of events."""
    rows = np.flatnonzero(events.activity)
    order = rows[np.argsort(keys[rows], kind="stable")]
    first = np.flatnonzero(np.diff(keys[order], prepend=-2))
    return np.split(order, first[1:]) if len(order) else []


def idle_row(
    device: int | None, stream: int, number: int, gaps: Ints, category: Ints, digits: int | None = None
) -> Row:
    """Returns the row of one stream and one category. gaps: of the stream, in ns; digits: rounding of figures."""
    chosen, total = gaps[category == number], int(gaps.sum())
    ratio = int(chosen.sum()) / total if total else float("nan")
    statistics = describe(chosen / 1000, "_us")
    if digits is not None:
        ratio = float(np.round(ratio, digits))
        statistics = {key: float(np.round(value, digits)) for key, value in statistics.items()}
    return {
        "device": device,
        "stream": stream,
        "category": CATEGORIES[number],
        "idle_us": int(chosen.sum()) / 1000,
        "idle_pct": 100 * ratio,
        **statistics,
    }


def idle_columns(events: GpuEvents, parts: Sequence[Ints], rows: Sequence[Row], streams: Sequence[int]) -> Answer:
    """Returns the columns of the view for these streams; () for all."""
    shown = [row for row in rows if not len(streams) or row["stream"] in streams]
    counted = [part for part in parts if not len(streams) or int(events.stream[part[0]]) in streams]
    missing = sum(int(np.count_nonzero(events.launch[part] == NOTHING)) for part in counted)
    notes = [] if parts else [NO_GPU]
    if parts and not shown:
        known = sorted({int(events.stream[part[0]]) for part in parts})
        notes.append(f"no GPU activity ran on these streams; the trace has {', '.join(map(str, known))}")
    if missing:
        notes.append(
            f"activities without a launch in the trace: {missing:,}; gaps before them count as kernel_wait or other"
        )
    return idle_breakdown.answer(shown, notes)


def _gaps(events: GpuEvents, part: Ints, delay_ns: int) -> tuple[Ints, Ints]:
    """Returns the gaps (ns) before the activities of one stream, without the first, and their categories."""
    gap, category = categorized_gaps(events, part, np.maximum.accumulate(events.end[part])[:-1], delay_ns)
    return gap[gap > 0], category[gap > 0]


def categorized_gaps(events: GpuEvents, part: Ints, before: Ints, delay_ns: int) -> tuple[Ints, Ints]:
    """Returns the gaps (ns) from `before` to the next activity, and their categories."""
    next_ = part[1:]
    gap = events.start[next_] - before
    launch = events.launch[next_]
    late = (launch != NOTHING) & (launch > before)
    return gap, np.where(late, HOST_WAIT, np.where(gap < delay_ns, KERNEL_WAIT, OTHER))


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
        ("op_us", "float", "us", "idle time that belongs to that operator"),
    ),
)
def idle_causes(context: Context) -> Answer:
    """Why each GPU was idle, by cause.

    A gap is a span of the window without any kernel, copy or fill on the GPU. The activity that ends it determines the
    cause: it was launched before the gap began (queued), or launched late, by a host that had waited for the GPU
    (synchronisation), for the next batch (data_loading), for other ranks (communication) or for CUDA's memory
    allocation (memory), or that was simply busy (host: the launch-bound case). kineto_trace.analysis.idle_gaps
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
    return idle_causes.answer(rows, _notes(found))


def _notes(found: IdleGaps) -> list[str]:
    """Returns the reason if there is no gap."""
    if not found.windows:
        return [NO_GPU]
    return [] if len(found) else [NEVER_IDLE]


def _by_op(found: IdleGaps, chosen: Ints, op_names: Ints32) -> tuple[Ints32, Ints]:
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
        ("step", "int", "", "training step in which the gap began"),
        ("op", "text", "", "operator that the host was in"),
        ("doing", "text", "", f"what took most of the gap: one of {', '.join(IDLE_CAUSES)} (view time_causes)"),
        ("doing_us", "float", "us", "time that it took"),
        ("function", "text", "", "the user's Python function that ran then, with file and line"),
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
            notes.append(f"no gap has the cause {cause}; the causes in this trace are {seen}")
    if len(order) and limit <= 0:
        notes.append(f"{times(len(order), 'gap is', 'gaps are')} not shown, since limit is {limit}; use 1 or more")
    order = order[: max(limit, 0)]
    doing = _doing(context, order)
    strings, activity, called = context.trace.strings, context.get(gpu), context.get(calls)
    op_names, stacks, numbers = (
        context.trace.table("cpu_op")["name"],
        context.get(call_stacks),
        context.get(steps).number,
    )

    def texts(names: Ints32, rows: Ints) -> list[str | None]:
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


def _doing(context: Context, chosen: Ints) -> list[_Doing | None]:
    """Returns for each of these gaps the cause with most of it."""
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
