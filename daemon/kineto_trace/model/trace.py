"""The column model of a trace: one table of plain numpy arrays per kind of activity.

Theory of operation
    Times are Unix nanoseconds and durations nanoseconds, both int64. Names are numbers (int32) into `Trace.strings`.
    Ids keep the width that the vendor gives them. The rows of a table are in no particular order. Tables are values: no
    array changes after its table was made. model/activity_tables.py declares the tables; this module offers the
    declarations by table name. A table of a vendor's own activity type, which is not among them, has its own
    declaration (Table.declared), which is stored with it.

    A trace that was read from a file has the same tables, with the columns of ORIGIN_COLUMNS beside them
    (Table.origin): they record a row's form in the file, so that writing it back loses nothing. Flows, and events
    without a table of their own, are in the tables `flow` and `other`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import numpy as np

from kineto_trace.base.array_types import AnyArray, Ints, Ints32
from kineto_trace.base.quantities import format_duration, shortened, times
from kineto_trace.base.visible_text import one_line
from kineto_trace.model.activity_tables import STEP_PREFIX, TABLES, ActivityTable, Column, ViewerRow, tables_on
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.target_info import TargetInfo

T = TypeVar("T")
# Views use only this much of a name: strings of a trace may be arguments of megabytes, and it may have very many of
# them.
NAME_CHARS = 8192
NO_ROW = -1
UNKNOWN_STREAM = 0xFFFFFFFF  # CUPTI's own value for "no stream"

SCHEMAS = {table.name: table.columns for table in TABLES}
GPU_TABLES = tables_on(ViewerRow.GPU)
API_TABLES = tables_on(ViewerRow.CALL)
OP_TABLES = tables_on(ViewerRow.OPERATOR)
UNTIMED_TABLES = tables_on(ViewerRow.NONE)
FILE_TABLES = tables_on(ViewerRow.FILE)
COUNTER_TABLES = tables_on(ViewerRow.COUNTER)  # measured over time: their rows are not activities
DEVICE_TABLES = tables_on(ViewerRow.GPU, ViewerRow.SYNC, ViewerRow.ANNOTATION)  # rows on devices
HOST_TABLES = tables_on(ViewerRow.CALL, ViewerRow.OPERATOR, ViewerRow.MEMORY, ViewerRow.PYTHON)  # rows on threads

# Columns of every table of a trace that was read from a Chrome trace. model/activity_tables.py states which arguments
# of each kind have a column (in the schema, otherwise here) and which bit of `present` belongs to each.
ORIGIN_COLUMNS = (
    Column("pid", "int64", "as in the file; strings: TEXT_ID minus their number in Trace.strings"),
    Column("tid", "int64", "as in the file; strings as in pid"),
    Column("category", "int32", "the category as the file spells it; -1: none", text=True),
    Column(
        "present", "uint64", "bit n: the row had the n-th member of its kind, and its column has exactly that value"
    ),
    Column("args", "int32", "its other arguments as JSON members; -1: none", text=True),
    Column("members", "int32", "its members other than the arguments, as JSON members; -1: none", text=True),
    Column("place", "uint32", "number of the event in the file, from 0: HTA's figures need the order over all tables"),
)
DOUBTED = "the times of this trace cannot be trusted"  # what the note begins with on a trace with impossible times
TRUNCATED = "the file is truncated in"  # what the note begins with on a file that ends before its last activity
TEXT_ID = -(2**62)
NO_SEQUENCE = -1
NO_STRING = -1
NO_MODULE = -1
MAX_TEXT = 60
MAX_ANNOTATIONS = 1_000_000  # limit for a search for steps: milliseconds
MAX_KINDS = 6
MAX_NOTES = 5
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Lazy(Mapping[str, T]):
    """Values that are read at the first access."""

    def __init__(self, names: Iterable[str], read: Callable[[str], T]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read
        self._have: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
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


class LazyColumns(Lazy[AnyArray]):
    """Columns that are read at the first access; each has `rows` values of its type in the schema."""

    def __init__(self, names: Iterable[str], rows: int, read: Callable[[str], AnyArray]) -> None:
        super().__init__(names, read)
        self.rows = rows


@dataclass(frozen=True, slots=True)
class Table:
    """The activities of one kind. `columns` has exactly the columns of its schema, all of the same length.

    origin: empty, or at least ORIGIN_COLUMNS, of the same length. declared: of a kind that is not in SCHEMAS.
    """

    kind: str
    columns: Mapping[str, AnyArray]
    origin: Mapping[str, AnyArray] = field(default_factory=dict)
    declared: ActivityTable | None = None

    def __post_init__(self) -> None:
        schema = self.schema
        if list(self.columns) != [column.name for column in schema]:
            raise ValueError(f"{self.kind}: columns {list(self.columns)} do not match the schema")
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

    def __getitem__(self, name: str) -> AnyArray:
        return self.columns[name]

    @property
    def schema(self) -> tuple[Column, ...]:
        """Returns its columns as declared."""
        return SCHEMAS[self.kind] if self.declared is None else self.declared.columns

    def with_columns(self, columns: Mapping[str, AnyArray]) -> "Table":
        """Returns the table with these columns in place of its own of the same names."""
        return replace(self, columns={**self.columns, **columns})

    def __repr__(self) -> str:
        return f"<Table {self.kind}: {len(self):,} rows; columns: {', '.join(self.columns)}>"

    def end(self) -> Ints:
        """Returns the ends in Unix ns."""
        end: Ints = self["start"] + self["duration"]
        return end

    def take(self, rows: AnyArray) -> "Table":
        """Returns the rows at these places, or those that this mask selects."""
        if isinstance(self.columns, LazyColumns):
            count = int(np.count_nonzero(rows)) if rows.dtype == np.bool_ else len(rows)
            columns, origin = (_taken(part, rows, count) for part in (self.columns, self.origin))
            return Table(self.kind, columns, origin, self.declared)
        taken, beside = ({name: array[rows] for name, array in part.items()} for part in (self.columns, self.origin))
        return Table(self.kind, taken, beside, self.declared)


def own_tables(tables: Mapping[str, Table], *rows: ViewerRow) -> tuple[str, ...]:
    """Returns the names of the tables on these rows that the trace declares: activity types of vendors."""
    own = [tables[kind] for kind in tables if kind not in SCHEMAS]
    return tuple(table.kind for table in own if table.declared is not None and table.declared.row in rows)


def _taken(part: Mapping[str, AnyArray], rows: AnyArray, count: int) -> LazyColumns:
    return LazyColumns(list(part), count, lambda name: part[name][rows])


def make_table(
    kind: str,
    length: int,
    columns: Mapping[str, AnyArray],
    origin: Mapping[str, AnyArray] | None = None,
    declared: ActivityTable | None = None,
) -> Table:
    """Makes a table from some columns; the others are zero, or have the value that means "none"."""
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

    devices: Kineto's `deviceProperties` items, as the target provided them.
    categories: the names of tables in traces of another vendor's GPUs: {"cuda_runtime": "xpu_runtime"}.
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
        """Returns the category in files for rows of this table without a category of their own."""
        return self.categories.get(kind, kind)

    def table(self, kind: str) -> Table:
        """Returns the table of this kind, which may be empty."""
        found = self.tables.get(kind)
        return make_table(kind, 0, {}) if found is None else found

    @property
    def devices_by_number(self) -> dict[int, Mapping[str, Any]]:
        """The devices by their ids, or by their places where they have none; without those whose id is no number."""
        numbered = ((device.get("id", place), device) for place, device in enumerate(self.devices))
        return {number: device for number, device in numbered if type(number) is int}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Returns the notes that apply to every figure of this trace: losses when it was recorded or read."""
        losses = self.losses
        found = list(self.notes)
        if losses.dropped:
            lost = times(losses.dropped, "activity was", "activities were")
            found.append(f"{lost} lost in the traced process: its buffers were full")
        if losses.undecoded:
            found.append(f"{times(losses.undecoded, 'recorded activity', 'recorded activities')} could not be decoded")
        if losses.torn:
            found.append("the end of the recording was cut off")
        return tuple(found)

    @property
    def is_truncated(self) -> bool:
        """Whether its file ended before its last activity, so that whole kinds of activities may be missing."""
        return any(note.startswith(TRUNCATED) for note in self.notes)

    def __repr__(self) -> str:
        return trace_text(self)

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        return trace_html(self)


# Describes a trace in a line and as HTML for notebooks.
# Both are shown whenever somebody types the name of a trace, so nothing is analysed here: only the description of the
# trace is read, the lengths of its tables, and the starts of its training steps. A trace may come from anywhere: no
# value in it makes this fail, and every text is shortened and made safe before it is shown.
def trace_text(trace: Trace) -> str:
    """Returns the trace in one line."""
    activities = times(sum(_counts(trace).values()), "activity", "activities")
    parts = [trace.target.title, _window_text(trace), activities, _step_text(trace)]
    return f"<Trace of {', '.join(filter(None, parts))}>"


def trace_html(trace: Trace) -> str:
    """Returns an overview of the trace for notebooks."""
    from kineto_trace.base import visible_text as html

    python = f"Python {_short(trace.target.python_version)}" if trace.target.python_version else ""
    devices = [device.get("name") for device in trace.devices]
    gpus = Counter(_short(name) if isinstance(name, str) else "unnamed" for name in devices)
    facts = [
        ("capture", _short(trace.target.capture_id)),
        ("software", ", ".join(filter(None, (_short(trace.target.framework), python)))),
        ("GPUs", ", ".join(f"{count} {name}" for name, count in gpus.most_common(MAX_KINDS))),
        ("window", _window_text(trace)),
        ("steps", _step_text(trace)),
        ("activities", _kind_text(_counts(trace))),
        ("next step", 'kineto_trace.run_view("findings", trace) shows where the time goes'),
    ]
    notes = trace.remarks
    left = len(notes) - MAX_NOTES
    said = [f"note: {shortened(note, 4 * MAX_TEXT)}" for note in notes[:MAX_NOTES]]
    said += [f"and {times(left, 'more note')}"] if left > 0 else []
    known = [(name, text) for name, text in facts if text]
    return str(html.title(f"Trace of {trace.target.title}") + html.facts(known) + html.notes(said))


def _counts(trace: Trace) -> Counter[str]:
    """Returns the activities by kind."""
    beside = (*UNTIMED_TABLES, *FILE_TABLES, *COUNTER_TABLES)
    return Counter({trace.category(kind): len(table) for kind, table in trace.tables.items() if kind not in beside})


def step_period_us(trace: Trace) -> tuple[int, float] | None:
    """Returns how many training steps began in the window, and the median time from one to the next, in us.

    None for fewer than two, and for traces with too many annotations to search quickly.
    """
    annotations = trace.tables.get("user_annotation")
    if annotations is None or not 2 <= len(annotations) <= MAX_ANNOTATIONS:
        return None
    name = annotations["name"]
    steps = [number for number in set(name.tolist()) if trace.strings[number].startswith(STEP_PREFIX)]
    start = np.array(sorted(set(annotations["start"][np.isin(name, steps)].tolist())), np.int64)
    start = start[start > trace.window_start_ns]  # a step that had begun before is cut, and its start is unknown
    return (len(start), float(np.median(np.diff(start))) / 1000) if len(start) >= 2 else None


def _step_text(trace: Trace) -> str:
    try:
        found = step_period_us(trace)
    except Exception:  # noqa: BLE001 - columns of a stored trace that are damaged or gone: whoever reads them is told
        return ""
    return f"{found[0]:,} steps began, {format_duration(1000 * found[1])} apart (median)" if found else ""


def _window_text(trace: Trace) -> str:
    start, end = trace.window_start_ns, trace.window_end_ns
    try:
        when = f" from {_EPOCH + timedelta(microseconds=start // 1000):%Y-%m-%d %H:%M:%S} UTC" if start > 0 else ""
    except OverflowError:
        when = ""
    return f"{format_duration(max(end - start, 0))}{when}"


def _kind_text(counts: Counter[str]) -> str:
    first = [(kind, count) for kind, count in counts.most_common(MAX_KINDS) if count]
    rest = counts.total() - sum(count for _, count in first)
    return ", ".join([f"{count:,} {kind}" for kind, count in first] + ([f"{rest:,} others"] if rest else []))


def _short(text: str) -> str:
    return one_line(shortened(text, MAX_TEXT))


class StringTable:
    """Collects the strings of a trace as text -> number."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        """strings: those that already have their numbers."""
        self.strings = list(strings)
        self._numbers = {text: number for number, text in enumerate(self.strings)}

    def add(self, text: str) -> int:
        """Returns the number of this text."""
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.strings)
            self.strings.append(text)
        return number

    def add_all(self, texts: Sequence[str]) -> Ints32:
        """Returns the number of each text."""
        return np.array([self.add(text) for text in texts], np.int32)
