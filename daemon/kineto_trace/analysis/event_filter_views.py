"""The events of a trace that meet conditions, as HTA's filters select them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import pyarrow as pa

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Ints
from kineto_trace.base.quantities import times
from kineto_trace.errors import ViewError
from kineto_trace.model.activity_tables import OWN_ROWS, ViewerRow, tables_on
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, UNKNOWN_STREAM, Table, own_tables
from kineto_trace.structure.activity_links import call_owners, calls, gpu, owners, steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, view

KINDS = tables_on(
    ViewerRow.OPERATOR,
    ViewerRow.CALL,
    ViewerRow.PYTHON,
    ViewerRow.MEMORY,
    ViewerRow.OVERHEAD,
    ViewerRow.GPU,
    ViewerRow.SYNC,
    ViewerRow.ANNOTATION,
)
ON_DEVICE = tables_on(ViewerRow.GPU, ViewerRow.SYNC, ViewerRow.ANNOTATION)


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events in no particular order (Unix ns); NOTHING where a value does not apply.

    kind: number into event_kinds().
    call: place of the call that launched GPU work.
    op: name (string number) of the operator or annotation that launched or called.
    iteration: number of the step in which the event, or its call, began.
    """

    kind: Ints
    name: Ints
    start: Ints
    end: Ints
    thread: Ints
    device: Ints
    stream: Ints
    call: Ints
    op: Ints
    iteration: Ints

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: AnyArray) -> "EventColumns":
        """Returns some of them; calls still count in the whole."""
        return EventColumns(*(getattr(self, field.name)[rows] for field in fields(self)))


def event_kinds(context: Context) -> tuple[str, ...]:
    """Returns the kinds of events that this trace may have: KINDS, and its vendor's own types."""
    return (*KINDS, *own_tables(context.trace.tables, *OWN_ROWS))


def event_columns(context: Context) -> EventColumns:
    """Returns the events of all tables with times, except flows and events without a table of their own."""
    kinds = event_kinds(context)
    tables = {number: context.trace.table(kind) for number, kind in enumerate(kinds)}
    sizes = [len(table) for table in tables.values()]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    call, op = _launches(context, first)
    start = np.concatenate([table["start"] for table in tables.values()])
    return EventColumns(
        kind=np.repeat(np.arange(len(kinds), dtype=np.int64), sizes),
        name=np.concatenate([table["name"].astype(np.int64) for table in tables.values()]),
        start=start,
        end=np.concatenate([table.end() for table in tables.values()]),
        thread=np.concatenate([_column(table, "thread") for table in tables.values()]),
        device=np.concatenate([_column(table, "device") for table in tables.values()]),
        stream=np.concatenate([_column(table, "stream") for table in tables.values()]),
        call=call,
        op=op,
        iteration=context.get(steps).number_at(np.where(call != NOTHING, start[call], start)),
    )


def _column(table: Table, name: str) -> Ints:
    if name not in table.columns or not len(table):
        return np.full(len(table), NOTHING, np.int64)
    values = table[name].astype(np.int64)
    return np.where(values == UNKNOWN_STREAM, NOTHING, values)


def _launches(context: Context, first: Ints) -> tuple[Ints, Ints]:
    """The call and the operator of each event. first: where the events of each kind begin."""
    work, called = context.get(gpu), context.get(calls)
    call, op = np.full(int(first[-1]), NOTHING), np.full(int(first[-1]), NOTHING)
    of_work, of_calls = context.get(owners), context.get(call_owners)
    begins = first[[KINDS.index(kind) for kind in API_TABLES]]
    place_of_call = np.append(begins[called.kind] + called.row, NOTHING)
    op[place_of_call[:-1]] = of_calls
    for number, kind in enumerate(GPU_TABLES):
        own = np.flatnonzero(work.kind == number)
        rows = first[KINDS.index(kind)] + work.row[own]
        op[rows] = of_work[own]
        call[rows] = place_of_call[work.call[own]]
    return call, op


_GROUPS = {
    "gpu": ON_DEVICE,
    "cpu": tuple(kind for kind in KINDS if kind not in ON_DEVICE),
    **{kind: (kind,) for kind in KINDS},
}
_OPERATORS = tuple(KINDS.index(kind) for kind in ("cpu_op", "user_annotation"))


@view(
    "event_selection",
    columns(
        ("kind", "text", "", "table that contains it: kernel, cpu_op, cuda_runtime, …"),
        ("name", "text", "", "name of the event"),
        (
            "iteration",
            "int",
            "",
            "number of the step during which it began (GPU work: in which it was launched); missing outside steps",
        ),
        ("start_ns", "int", "ns", "Unix time"),
        ("time_us", "float", "us", "start, relative to the beginning of the trace"),
        ("duration_us", "float", "us", "duration"),
        ("thread", "int", "", "thread; missing for GPU work"),
        ("device", "int", "", "GPU index in the process; missing for host events"),
        ("stream", "int", "", "stream; missing for host events and for events of a whole device"),
        (
            "op",
            "text",
            "",
            "operator (or, failing that, annotation) that made the call, or launched or captured the work; missing for "
            "other events",
        ),
    ),
    nothing="no event in the trace meets all conditions",
)
def event_selection(
    context: Context,
    *,
    kind: Sequence[str] = (),
    name: str = "",
    iteration: Sequence[int] = (),
    iteration_index: Sequence[int] = (),
    start_us: float | None = None,
    end_us: float | None = None,
    min_us: float = 0,
    stream: Sequence[int] = (),
    where: Literal["under", "before", "after"] = "under",
    op: str = "",
    position: int = 0,
    with_kernels: bool = False,
    limit: int = 1000,
) -> Answer:
    """The events that meet all conditions, ordered by start. Without conditions, all events.

    HTA's filters correspond to options: IterationFilter (iteration), IterationIndexFilter and FirstIterationFilter
    (iteration_index=0), TimeRangeFilter (start_us, end_us), NameFilter (name), GPUKernelFilter (kind=gpu),
    CPUOperatorFilter (kind=cpu), MemCopyEventFilter (kind=gpu_memcpy with a name), ZeroDurationFilter (min_us=0.001),
    UnderOperatorFilter, BeforeOperatorFilter and AfterOperatorFilter (op, where, position). For CompositeFilter and
    CombinedOperatorFilter, give several conditions; for RankFilter, select the traces. For QueryFilter, use SQL: SELECT
    … FROM kernel WHERE …, with all columns of each kind of event.

    Options:
    - kind: kinds of events; gpu or cpu selects all kinds on that side.
    - name: a regular expression that must match at the beginning of the name.
    - iteration: numbers of steps.
    - iteration_index: positions of steps in the trace, 0 for the first.
    - start_us: only events that start at this time or later, relative to the beginning of the trace.
    - end_us: only events that end at this time or earlier, relative to the beginning of the trace.
    - min_us: the minimum duration.
    - stream: numbers of GPU streams.
    - op: an operator or annotation with exactly this name; events are selected by their time relative to it.
    - where: "under" selects the host events during that operator, "before" those that ended before it, "after" those
      that started after it.
    - position: which run of that operator, 0 for the first, -1 for the last.
    - with_kernels: also list the GPU work that the selected calls launched.
    - limit: the maximum number of events to list; 0 lists all.
    """
    events = context.get(event_columns)
    base = context.trace.window_start_ns
    chosen = _of_kinds(context, events, kind) & (events.end - events.start >= round(min_us * 1000))
    if name:
        chosen &= _named(context, events, name)
    if iteration:
        chosen &= np.isin(events.iteration, list(iteration))
    if iteration_index:
        chosen &= np.isin(events.iteration, _numbers(context, iteration_index))
    if start_us is not None:
        chosen &= events.start >= base + round(start_us * 1000)
    if end_us is not None:
        chosen &= events.end <= base + round(end_us * 1000)
    if stream:
        chosen &= np.isin(events.stream, list(stream))
    if op:
        chosen &= _around(context, events, op, position, where)
    if with_kernels:
        chosen |= np.append(chosen, False)[events.call]
    return _answer(context, events, np.flatnonzero(chosen), limit)


def _of_kinds(context: Context, events: EventColumns, kinds: Sequence[str]) -> Flags:
    present, own_work = event_kinds(context), own_tables(context.trace.tables, ViewerRow.GPU)
    own_calls = own_tables(context.trace.tables, ViewerRow.CALL)
    groups = {**_GROUPS, **{kind: (kind,) for kind in (*own_work, *own_calls)}}
    groups |= {"gpu": (*ON_DEVICE, *own_work), "cpu": (*_GROUPS["cpu"], *own_calls)}
    unknown = [kind for kind in kinds if kind not in groups]
    if unknown:
        raise ViewError(f"view event_selection: kind={unknown[0]} is not valid; use one or more of {', '.join(groups)}")
    wanted = np.zeros(len(present), np.bool_)
    wanted[[present.index(each) for kind in kinds or ("cpu", "gpu") for each in groups[kind]]] = True
    return wanted[events.kind]


def _named(context: Context, events: EventColumns, pattern: str) -> Flags:
    try:
        expression = re.compile(pattern)
    except re.error as exc:
        raise ViewError(f"view event_selection: name={pattern!r} is not a regular expression: {exc}") from exc
    fits = np.array([*(expression.match(text) is not None for text in context.trace.strings), False], np.bool_)
    return fits[events.name]


def _numbers(context: Context, places: Sequence[int]) -> Ints:
    """Returns the numbers of the steps at these places."""
    known = unique_values(context.get(steps).number)
    wrong = [place for place in places if not -len(known) <= place < len(known)]
    if wrong:
        raise ViewError(
            f"view event_selection: the trace has {times(len(known), 'step')}, so iteration_index={wrong[0]} is out of "
            "range"
        )
    return known[list(places)]


def _around(context: Context, events: EventColumns, op: str, position: int, where: str) -> Flags:
    """Returns which events of the host are before, after or under a run of the operator."""
    named = np.array([*(text == op for text in context.trace.strings), False], np.bool_)
    runs = np.flatnonzero(named[events.name] & np.isin(events.kind, _OPERATORS))
    runs = runs[np.argsort(events.start[runs], kind="stable")]
    if not -len(runs) <= position < len(runs):
        raise ViewError(
            f"view event_selection: {op!r} ran {times(len(runs), 'time')} in the trace, so position={position} is out "
            "of range"
        )
    start, end = int(events.start[runs[position]]), int(events.end[runs[position]])
    found: Flags = events.device == NOTHING
    if where == "under":
        found &= (events.start >= start) & (events.end <= end)
    else:
        found &= events.end <= start if where == "before" else events.start >= end
    return found


def _answer(context: Context, events: EventColumns, rows: Ints, limit: int) -> Answer:
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    notes = []
    if limit and len(rows) > limit:
        notes = [f"{len(rows):,} events match; only the first {limit:,} are listed (limit=0 lists all)"]
        rows = rows[:limit]
    found, strings = events.take(rows), context.trace.strings
    return Answer(
        {
            "kind": texts(event_kinds(context), found.kind),
            "name": texts(strings, found.name),
            "iteration": _known(found.iteration),
            "start_ns": found.start,
            "time_us": (found.start - context.trace.window_start_ns) / 1000,
            "duration_us": (found.end - found.start) / 1000,
            "thread": _known(found.thread),
            "device": _known(found.device),
            "stream": _known(found.stream),
            "op": texts(strings, found.op),
        },
        notes,
    )


def _known(values: Ints) -> pa.Array:
    return pa.array(values, mask=values == NOTHING)
