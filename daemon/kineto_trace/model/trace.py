"""The column model of a trace: one table of plain numpy arrays per kind of activity.

Theory of operation
    Times are Unix nanoseconds and durations nanoseconds, both int64. Names are numbers (int32) into `Trace.strings`.
    Ids keep the width that the vendor gives them. The rows of a table are in no particular order. Tables are values: no
    array changes after its table was made. model/activity_tables.py declares the tables; this module offers the
    declarations by table name. A table that is not among them, of an activity type of a vendor's own, carries its
    declaration (Table.declared), which is stored with it.

    A trace that was read from a file has the same tables, with the columns of ORIGIN_COLUMNS beside them
    (Table.origin): they record what a row was like in the file, so that writing it back loses nothing. Flows, and
    whatever has no table of its own, are in the tables `flow` and `other`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.model.activity_table import ActivityTable, Column, ViewerRow
from kineto_trace.model.activity_tables import TABLES, tables_on
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace_summary import TraceSummary

NO_ROW = -1
UNKNOWN_STREAM = 0xFFFFFFFF  # CUPTI's own value for "no stream"

SCHEMAS = {table.name: table.columns for table in TABLES}
GPU_TABLES = tables_on(ViewerRow.GPU)
API_TABLES = tables_on(ViewerRow.CALL)
OP_TABLES = tables_on(ViewerRow.OPERATOR)
UNTIMED_TABLES = tables_on(ViewerRow.NONE)
FILE_TABLES = tables_on(ViewerRow.FILE)
COUNTER_TABLES = tables_on(ViewerRow.COUNTER)  # measured over time: their rows are no activities
DEVICE_TABLES = tables_on(ViewerRow.GPU, ViewerRow.SYNC, ViewerRow.ANNOTATION)  # rows on devices
HOST_TABLES = tables_on(ViewerRow.CALL, ViewerRow.OPERATOR, ViewerRow.MEMORY, ViewerRow.PYTHON)  # rows on threads

# Columns of every table of a trace that was read from a Chrome trace. model/activity_tables.py states which arguments
# of each kind have a column (in the schema, otherwise here) and which bit of `present` belongs to each.
ORIGIN_COLUMNS = (
    Column("pid", "int64", "as in the file; a text: TEXT_ID less its number in Trace.strings"),
    Column("tid", "int64", "as in the file; texts as in pid"),
    Column("category", "int32", "the category as the file spells it; -1: none", text=True),
    Column("present", "uint64", "bit n: the row had the n-th member of its kind, and its column has the very value"),
    Column("args", "int32", "its other arguments as JSON members; -1: none", text=True),
    Column("members", "int32", "its members other than the arguments, as JSON members; -1: none", text=True),
    Column(
        "place", "uint32", "number of the event in the file, from 0 on: HTA's figures need the order over all tables"
    ),
)
TEXT_ID = -(2**62)
NO_SEQUENCE = -1
NO_STRING = -1
NO_MODULE = -1


class LazyColumns(Mapping[str, npt.NDArray[Any]]):
    """Columns that are read at the first access; each has `rows` values of its type in the schema."""

    def __init__(self, names: Sequence[str], rows: int, read: Callable[[str], npt.NDArray[Any]]) -> None:
        self.rows = rows
        self._names = dict.fromkeys(names)
        self._read = read
        self._have: dict[str, npt.NDArray[Any]] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        found = self._have.get(name)
        if found is None:
            if name not in self._names:
                raise KeyError(name)
            found = self._have[name] = self._read(name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class Table:
    """The activities of one kind. `columns` has exactly the columns of its schema, all of the same length.

    origin: empty, or at least ORIGIN_COLUMNS, of the same length. declared: of a kind that is not in SCHEMAS.
    """

    kind: str
    columns: Mapping[str, npt.NDArray[Any]]
    origin: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    declared: ActivityTable | None = None

    def __post_init__(self) -> None:
        schema = self.schema
        if list(self.columns) != [column.name for column in schema]:
            raise ValueError(f"{self.kind}: columns {list(self.columns)} do not follow the schema")
        if isinstance(self.columns, LazyColumns):
            return  # their readers check them
        for column in schema:
            array = self.columns[column.name]
            if array.dtype != column.dtype or len(array) != len(self):
                raise ValueError(f"{self.kind}.{column.name}: {array.dtype} of {len(array)} rows, not {column.dtype}")
        for name, array in self.origin.items():
            if len(array) != len(self):
                raise ValueError(f"{self.kind}: origin column {name} has {len(array)} rows, not {len(self)}")

    def __len__(self) -> int:
        if isinstance(self.columns, LazyColumns):
            return self.columns.rows
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.columns[name]

    @property
    def schema(self) -> tuple[Column, ...]:
        """Its columns as they are declared."""
        return SCHEMAS[self.kind] if self.declared is None else self.declared.columns

    def with_columns(self, columns: Mapping[str, npt.NDArray[Any]]) -> "Table":
        """Returns the table with these columns in place of its own of the same names."""
        return replace(self, columns={**self.columns, **columns})

    def __repr__(self) -> str:
        return f"<Table {self.kind}: {len(self):,} rows; columns: {', '.join(self.columns)}>"

    def end(self) -> npt.NDArray[np.int64]:
        """Returns the ends in Unix ns."""
        end: npt.NDArray[np.int64] = self["start"] + self["duration"]
        return end

    def take(self, rows: npt.NDArray[Any]) -> "Table":
        """Returns the rows at these places, or those that this mask selects."""
        if isinstance(self.columns, LazyColumns):
            count = int(np.count_nonzero(rows)) if rows.dtype == np.bool_ else len(rows)
            columns, origin = (_taken(part, rows, count) for part in (self.columns, self.origin))
            return Table(self.kind, columns, origin, self.declared)
        taken, beside = ({name: array[rows] for name, array in part.items()} for part in (self.columns, self.origin))
        return Table(self.kind, taken, beside, self.declared)


def own_tables(tables: Mapping[str, Table], *rows: ViewerRow) -> tuple[str, ...]:
    """Returns the names of the tables on these rows that are declared by their trace: activity types of vendors."""
    own = [tables[kind] for kind in tables if kind not in SCHEMAS]
    return tuple(table.kind for table in own if table.declared is not None and table.declared.row in rows)


def _taken(part: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[Any], count: int) -> LazyColumns:
    return LazyColumns(list(part), count, lambda name: part[name][rows])


def make_table(
    kind: str,
    length: int,
    columns: Mapping[str, npt.NDArray[Any]],
    origin: Mapping[str, npt.NDArray[Any]] | None = None,
    declared: ActivityTable | None = None,
) -> Table:
    """Makes a table from some columns; the others are zero, or hold the value that means "none"."""
    full = {}
    for column in SCHEMAS[kind] if declared is None else declared.columns:
        array = columns.get(column.name)
        if array is None:
            array = np.full(length, NO_STRING if column.text and column.name != "name" else 0)
        full[column.name] = array.astype(column.dtype, copy=False)
    return Table(kind, full, origin or {}, declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The numbers of records that are missing from the tables, by reason."""

    dropped: int = 0  # lost in the target because the buffers were full
    undecoded: int = 0  # received by the daemon, but unreadable
    torn: int = 0  # cut off when the daemon died
    out_of_window: int = 0  # outside the wanted window


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One process during one window.

    devices: Kineto's `deviceProperties` items, as the target provided them. categories: the names of tables in traces
    of another vendor's GPUs: {"cuda_runtime": "xpu_runtime"}.
    """

    target: TargetInfo
    strings: Sequence[str]
    tables: Mapping[str, Table]
    window_start_ns: int
    window_end_ns: int
    devices: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, int] = field(default_factory=dict)  # cupti_version, cuda_runtime_version, …
    losses: Losses = Losses()
    sample_period_ns: int = 0  # period of the python_function samples; 0: no samples, or exact calls
    head: Mapping[str, str] | None = None  # of a file: its members beside traceEvents, each as JSON text
    notes: Sequence[str] = ()  # what was lost or unusual when the file was read
    coverage: Sequence[SourceCoverage] = ()  # of the sources that state it
    categories: Mapping[str, str] = field(default_factory=dict)

    def category(self, kind: str) -> str:
        """Returns what files call the rows of this table that have no category of their own."""
        return self.categories.get(kind, kind)

    def table(self, kind: str) -> Table:
        """Returns the table of this kind, which may be empty."""
        found = self.tables.get(kind)
        return make_table(kind, 0, {}) if found is None else found

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes that apply to every figure of this trace: what was lost when it was recorded or read."""
        losses = self.losses
        found = list(self.notes)
        if losses.dropped:
            found.append(f"{losses.dropped} activities were lost in the traced process: its buffers were full")
        if losses.undecoded:
            found.append(f"{losses.undecoded} recorded activities could not be decoded")
        if losses.torn:
            found.append("the end of the recording was cut off")
        return tuple(found)

    def __repr__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        return self._summary().html()

    def _summary(self) -> TraceSummary:
        annotations = self.tables.get("user_annotation")
        return TraceSummary(
            process=self.target.title,
            capture_id=self.target.capture_id,
            framework=self.target.framework,
            python_version=self.target.python_version,
            devices=[device.get("name") for device in self.devices],
            window_start_ns=self.window_start_ns,
            window_end_ns=self.window_end_ns,
            counts={
                self.category(kind): len(table)
                for kind, table in self.tables.items()
                if kind not in (*UNTIMED_TABLES, *FILE_TABLES, *COUNTER_TABLES)
            },
            annotations={} if annotations is None else annotations.columns,
            strings=self.strings,
            notes=self.remarks,
        )


class StringTable:
    """Collects the strings of a trace as text -> number."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        """strings: those that have their numbers already."""
        self.strings = list(strings)
        self._numbers = {text: number for number, text in enumerate(self.strings)}

    def add(self, text: str) -> int:
        """Returns the number of this text."""
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.strings)
            self.strings.append(text)
        return number

    def add_all(self, texts: Sequence[str]) -> npt.NDArray[np.int32]:
        """Returns the number of each text."""
        return np.array([self.add(text) for text in texts], np.int32)
