"""All timed events of a trace as one set of columns, with their calls, operators and iterations."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kineto_trace.model.activity_table import OWN_ROWS, ViewerRow
from kineto_trace.model.activity_tables import tables_on
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, UNKNOWN_STREAM, Table, own_tables
from kineto_trace.structure.activity_links import call_owners, calls, gpu, owners, steps

NOTHING = -1
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

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events in no particular order (Unix ns); NOTHING where a value does not apply.

    kind: number into event_kinds(). call: place of the call that launched GPU work. op: name (number of a string) of
    the operator or annotation that launched or called. iteration: number of the step in which the event, or its call,
    began.
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

    def take(self, rows: npt.NDArray[np.generic]) -> "EventColumns":
        """Returns some of them; calls still count in the whole."""
        return EventColumns(*(getattr(self, field.name)[rows] for field in fields(self)))


def event_kinds(context: Context) -> tuple[str, ...]:
    """Returns the kinds of events that this trace may have: KINDS, and its vendor's own types."""
    return (*KINDS, *own_tables(context.trace.tables, *OWN_ROWS))


def event_columns(context: Context) -> EventColumns:
    """Returns the events of all tables with times, except flows and what is in no table of its own."""
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
