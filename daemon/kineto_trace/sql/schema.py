"""The tables of SQL over traces: names, columns, units and meanings.

Theory of operation
    There are three kinds of tables. Activities: one per kind of the column model (kineto_trace.model.trace), those of
    vendors' own types in the traces that declare them, and `events`, which concatenates all of them. Traces: `traces`,
    `devices`. Analyses: one per registered view, with the columns of the view's result for its default options.

    In tables of activities names are texts instead of numbers, times have their unit in their name (start_ns,
    duration_ns, end_ns), and special numbers of the model (NO_PRIORITY, -1: none, …) are NULL. Columns that relate a
    row to others (op, launch_ns, …) are computed when a query uses them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pyarrow as pa

from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.errors import QueryError
from kineto_trace.model.activity_tables import (
    DTYPES,
    KINDS,
    NO_PRIORITY,
    OWN_ROWS,
    TABLES,
    ActivityTable,
    Column,
    vendor_columns,
)
from kineto_trace.model.trace import (
    API_TABLES,
    COUNTER_TABLES,
    GPU_TABLES,
    SCHEMAS,
    UNKNOWN_STREAM,
    UNTIMED_TABLES,
    Trace,
    own_tables,
)
from kineto_trace.view_api.result import ARROW_TYPES

TEXT = pa.string()
NAMES = pa.dictionary(pa.int32(), pa.string())  # texts that repeat
_SQL_TYPES = {
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
    pa.uint32(): "UINTEGER",
    pa.uint64(): "UBIGINT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    TEXT: "VARCHAR",
    NAMES: "VARCHAR",
}
Group = Literal["activities", "traces", "views"]


class SqlColumn(NamedTuple):
    """One column. unit: "ns", "us", "%", "bytes", …; "" for plain values."""

    name: str
    arrow: pa.DataType
    unit: str
    meaning: str

    @property
    def type(self) -> str:
        """Returns its type in SQL."""
        if pa.types.is_list(self.arrow):
            return f"{_SQL_TYPES[self.arrow.value_type]}[]"
        return _SQL_TYPES[self.arrow]


@dataclass(frozen=True, slots=True)
class SqlTable:
    """A table that queries can name. group: whether it has activities, the traces, or the result of a view."""

    name: str
    group: Group
    description: str
    columns: tuple[SqlColumn, ...]

    @property
    def summary(self) -> str:
        """Returns the first line of the description."""
        return self.description.partition("\n")[0]

    @property
    def schema(self) -> pa.Schema:
        """Returns its schema for Arrow."""
        return pa.schema([pa.field(column.name, column.arrow) for column in self.columns])


WHICH = (
    SqlColumn("rank", pa.int64(), "", "rank of the process in its job"),
    SqlColumn("trace", NAMES, "", "name of the file, folder or capture that it comes from"),
)
END = SqlColumn("end_ns", pa.int64(), "ns", "Unix time at which it ended")
ARGS = SqlColumn("args", NAMES, "", "traces read from files: arguments without a column of their own, as a JSON object")
_RENAMED = {
    "start": SqlColumn("start_ns", pa.int64(), "ns", "Unix time at which it began"),
    "duration": SqlColumn("duration_ns", pa.int64(), "ns", "how long it took"),
    "name": SqlColumn("name", NAMES, "", "its name"),
    "queued": SqlColumn("queued_ns", pa.uint64(), "ns", "Unix time when it entered the command buffer"),
    "category": SqlColumn("category", NAMES, "", "category as recorded in the file"),
    "phase": SqlColumn("phase", NAMES, "", "the event's phase in the file: X complete, i instant, s and f flow, …"),
    "inputs": SqlColumn("inputs", NAMES, "", "its inputs as a JSON object with Kineto's members (Input Dims, …)"),
    "lines": SqlColumn(
        "lines",
        NAMES,
        "",
        "if sampled: its self samples by line and state, such as `43: 12 running, 3 idle; 51: 2 running`",
    ),
    "callees": SqlColumn(
        "callees",
        NAMES,
        "",
        "if sampled: its self samples at calls of C functions: `43 pickle.dumps: 12 running; 51 .tolist: 2 running`",
    ),
    "hlo": SqlColumn(
        "hlo",
        NAMES,
        "",
        "JAX: the HLO instruction that it ran, as a JSON object with hlo_op, hlo_module, op_name and source",
    ),
    "module": SqlColumn("module", pa.int32(), "", "calls of nn.Module: the module's number"),
}
# Column of the model -> the values that mean "none".
_NONE_AS_0 = ("line", "correlation", "external_id", "graph_id", "graph_node_id", "queued", "torch_thread",
              "forward_thread", "storage")  # fmt: skip
_NONE_BELOW_0 = ("name", "category", "inputs", "lines", "callees", "hlo", "sequence", "wait_on_stream",
                 "wait_on_correlation", "total_allocated", "total_reserved", "parent", "module", "metric",
                 "unit")  # fmt: skip
MISSING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_NONE_AS_0, (0,)),
    **dict.fromkeys(_NONE_BELOW_0, (-1,)),
    "priority": (NO_PRIORITY,),
    "value": (),  # NaN
}
MISSING_OF_KIND: dict[tuple[str, str], tuple[int, ...]] = {
    ("cuda_sync", "stream"): (UNKNOWN_STREAM,),
    ("cuda_sync", "device"): (-1,),
    ("cpu_instant_event", "device"): (-1,),
    ("cpu_instant_event", "thread"): (0,),
    ("overhead", "thread"): (0,),
}
_SPECIAL = re.compile(r"; (?:0|-1|NaN|NO_[A-Z]+|UNKNOWN_[A-Z]+): [^;]*$")  # in meanings: values that are NULL here
_UNITS = {"bytes": "bytes", "total_allocated": "bytes", "total_reserved": "bytes"}
_UNITS |= {"static_shared_memory": "bytes", "dynamic_shared_memory": "bytes"}

OP = SqlColumn(
    "op",
    NAMES,
    "",
    "name of the innermost operator around the call that caused it, otherwise of the innermost annotation; in CUDA "
    "graphs, of the operator that captured it, if that is known",
)
OP_ID = SqlColumn("op_id", pa.int64(), "", "id in cpu_op of the operator around the call")
LAUNCH = SqlColumn("launch_ns", pa.int64(), "ns", "Unix time at which the call that caused it began")
DEPTH = SqlColumn("depth", pa.int32(), "", "number of operators around it on its thread")
PARENT_ID = SqlColumn("parent_id", pa.int64(), "", "id of the innermost operator around it")
SELF = SqlColumn("self_ns", pa.int64(), "ns", "time during which no operator inside it ran")
ROW = SqlColumn("row", pa.int64(), "", "row number within its trace; `parent` refers to it")

EVENTS = SqlTable(
    "events",
    "activities",
    "All activities of all kinds in one table.\n\nColumns that do not apply to a kind are NULL: host "
    "activities have no device, GPU activities no thread. The ends of flows are only in the table `flow`, samples of "
    "hardware counters only in `counter`.",
    (
        *WHICH,
        SqlColumn("kind", NAMES, "", "name of the table with all of its columns: kernel, cpu_op, …"),
        _RENAMED["name"],
        _RENAMED["start"],
        END,
        _RENAMED["duration"],
        SqlColumn("thread", pa.uint32(), "", "system thread id"),
        SqlColumn("device", pa.int64(), "", "device index"),
        SqlColumn("stream", pa.int64(), "", "CUDA stream"),
        SqlColumn("correlation", pa.uint32(), "", "joins GPU activities with the calls that caused them"),
        ARGS,
    ),
)
EVENT_KINDS = tuple(kind for kind in SCHEMAS if kind not in (*UNTIMED_TABLES, *COUNTER_TABLES, "flow"))
TRACES = SqlTable(
    "traces",
    "traces",
    "One row per trace: which process, and when.",
    (
        *WHICH,
        SqlColumn("host", TEXT, "", "host name"),
        SqlColumn("pid", pa.int64(), "", "process id"),
        SqlColumn("process_name", TEXT, "", "name of the process"),
        SqlColumn("framework", TEXT, "", "torch version, if known"),
        SqlColumn("world_size", pa.int64(), "", "number of ranks in the job"),
        SqlColumn("window_start_ns", pa.int64(), "ns", "Unix time at which the trace begins"),
        SqlColumn("window_end_ns", pa.int64(), "ns", "Unix time at which it ends"),
        SqlColumn("activities", pa.int64(), "", "rows of `events`"),
        SqlColumn("notes", pa.list_(TEXT), "", "what was lost, or unusual, when the trace was read"),
    ),
)
DEVICES = SqlTable(
    "devices",
    "traces",
    "The GPUs that the traces describe, one row per trace and GPU.",
    (
        *WHICH,
        SqlColumn("device", pa.int64(), "", "device index"),
        SqlColumn("name", TEXT, "", "its name"),
        SqlColumn("memory_bytes", pa.int64(), "bytes", "its memory"),
        SqlColumn("compute_major", pa.int64(), "", "compute capability, major number"),
        SqlColumn("compute_minor", pa.int64(), "", "compute capability, minor number"),
        SqlColumn("multiprocessors", pa.int64(), "", "streaming multiprocessors"),
        SqlColumn("properties", TEXT, "", "all properties as a JSON object"),
    ),
)


def file_columns(kind: str) -> tuple[SqlColumn, ...]:
    """Returns arguments of files that the model keeps as numeric columns (ORIGIN_COLUMNS and similar ones)."""
    known = {column.name for column in SCHEMAS[kind]}
    found = {}
    for argument in KINDS.get(kind, ()):
        for name in argument.columns:
            if name not in known:
                unit = "GB/s" if name == "bandwidth" else ""
                meaning = f'traces read from files: the argument "{argument.key}"'
                found[name] = SqlColumn(name, pa.from_numpy_dtype(DTYPES[argument.type]), unit, meaning)
    return tuple(found.values())


def computed_columns(kind: str) -> tuple[SqlColumn, ...]:
    """Returns the columns of this kind that relate its rows to others."""
    if kind in GPU_TABLES:
        return (OP, OP_ID, LAUNCH)
    if kind in API_TABLES:
        return (OP, OP_ID)
    if kind == "cpu_op":
        return (PARENT_ID, DEPTH, SELF)
    return (ROW,) if kind == "python_function" else ()


def declares(table: ActivityTable, column: str, arrow: pa.DataType) -> bool:
    """Returns whether queries find such a column in a table that a trace declares itself."""
    return any(own.name == column and own.arrow == arrow for own in _activities(table).columns)


def _activities(table: ActivityTable) -> SqlTable:
    kind, own = table.name, []
    vendors = frozenset[str]() if kind in SCHEMAS else vendor_columns(table)
    for column in table.columns:
        own.append(_own_column(column) if column.name in vendors else _column(kind, column))
        if column.name == "duration":
            own.append(END)
    if kind in SCHEMAS:
        own += [*computed_columns(kind), *file_columns(kind), ARGS]
    return SqlTable(kind, "activities", table.meaning, (*WHICH, *own))


def _column(kind: str, column: Column) -> SqlColumn:
    special = column.name in MISSING or (kind, column.name) in MISSING_OF_KIND
    meaning = _SPECIAL.sub("", column.meaning) if special else column.meaning
    arrow = NAMES if column.text else pa.from_numpy_dtype(column.dtype)
    if (kind, column.name) == ("counter", "name"):
        return SqlColumn(column.name, arrow, "", meaning)
    return _RENAMED.get(column.name, SqlColumn(column.name, arrow, _UNITS.get(column.name, ""), meaning))


def _own_column(column: Column) -> SqlColumn:
    return SqlColumn(column.name, NAMES if column.text else pa.from_numpy_dtype(column.dtype), "", column.meaning)


def _view(name: str) -> SqlTable:
    found = VIEWS[name]
    own = tuple(SqlColumn(c.name, ARROW_TYPES[c.type], c.unit, c.meaning) for c in found.result_columns)
    columns = own if found.reduce else (*WHICH, *own[1:])
    return SqlTable(name, "views", found.description, columns)


def declared_tables(traces: Iterable[Trace]) -> list[ActivityTable]:
    """Returns the tables that the traces declare themselves. The first declaration of a name counts."""
    found: dict[str, ActivityTable] = {}
    for trace in traces:
        for kind in own_tables(trace.tables, *OWN_ROWS):
            declared = trace.table(kind).declared
            if declared is not None:
                found.setdefault(kind, declared)
    return list(found.values())


def table_with_rows(name: str, traces: Iterable[Trace]) -> str:
    """Returns which table has the rows that files call `name`, for people; "" if the traces have none of them.

    Calls and synchronizations of every vendor are in Kineto's tables. A file does not declare a vendor's own types, so
    their rows are in `other` after reading one.
    """
    shared = f"cuda_{name.rpartition('_')[2]}"
    if shared in ("cuda_runtime", "cuda_driver", "cuda_sync"):
        return f"calls and synchronizations of every vendor are in the CUDA tables: query {shared}"
    for trace in traces:
        numbers = trace.table("other")["category"]
        if name in trace.strings and (numbers == trace.strings.index(name)).any():
            return (
                f"a file does not declare a vendor's own types: their rows are in `other` (WHERE category = '{name}'); "
                "open the capture by its id, or as a folder of columns, to get the table"
            )
    return ""


def sql_tables(declared: Iterable[ActivityTable] = ()) -> dict[str, SqlTable]:
    """Returns all tables by name: activities, traces, then views by name. declared: by the traces themselves."""
    own = [_activities(table) for table in declared]
    tables = [EVENTS, *map(_activities, TABLES), *own, TRACES, DEVICES]
    tables += [_view(name) for name in sorted(VIEWS)]
    return {table.name: table for table in tables}


def find_table(name: str, declared: Iterable[ActivityTable] = ()) -> SqlTable:
    """Returns the table with this name. Raises QueryError."""
    tables = sql_tables(declared)
    if name not in tables:
        raise QueryError(f"no table is called {name!r}; available: {', '.join(tables)}")
    return tables[name]
