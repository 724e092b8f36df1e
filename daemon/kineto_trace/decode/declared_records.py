"""Decodes records by a declared schema (kineto_agent.protocol.schema): "declared/1", and the library for vendors.

Theory of operation
    The native library finds where each record begins, by the schema's framing. Everything else is done to whole
    columns: of each kind of record, fields are gathered, times converted to Unix ns, texts numbered and handles of
    streams and contexts made small; then the kinds of one activity type become one table.

    A vendor's decoder is a schema for the library's version, plus code for what a schema cannot express: it calls
    decode_records with a function that changes the columns of each kind (Rows.columns) and may use any field of the
    records (Rows.field).

    The schema may come from the target, as the records do. Neither is trusted: no count, length, time or number of a
    text makes this code read outside a buffer, use memory out of proportion, or fail. Unreadable records are counted as
    undecoded, and a warning says why.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from kineto_agent.protocol.records import CLOCK_PAIR, DECLARED_FORMAT, SPACE_CLOCK_PAIR
from kineto_agent.protocol.schema import (
    CLOCKS_KEY,
    DEVICE,
    DEVICE_TRACK,
    DTYPES,
    MONOTONIC,
    REALTIME,
    ROLES,
    SCHEMA_KEY,
    THREAD_TRACK,
    TRACKS,
    TSC,
    Activity,
    Record,
    Schema,
    Texts,
    from_json,
)

from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Flags, Floats, Ints, Ints32
from kineto_trace.decode.activity_names import demangle
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.record_set import RecordSet, Rows, count_text, read_records
from kineto_trace.model.activity_tables import NO_PRIORITY, ActivityTable, Column, ViewerRow
from kineto_trace.model.trace import NO_STRING, SCHEMAS, UNKNOWN_STREAM, StringTable, Table, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT = DECLARED_FORMAT
_HANDLES = ("device", "context", "stream")
_LARGEST_PLAIN = (1 << 19) - 1  # larger values are handles: rows of viewers have numbers below a million

Amend = Callable[[RecordSet], None]
Numbers = Ints32
MAX_OTHER_TEXTS = 4096  # of one field: further values that nothing stands for share one text
MAX_INLINE_TEXTS = 1 << 18  # of one field: further ones share one text
MAX_TEXT_BYTES = 16 * 1024
_MANY = "…"
Columns = dict[str, AnyArray]
_TRACK_COLUMNS = {
    "start": Column("start", "int64", "Unix ns"),
    "duration": Column("duration", "int64", "ns"),
    "name": Column("name", "int32", "its name", text=True),
    "thread": Column("thread", "uint32", "system thread id"),
    "device": Column("device", "uint32", "device index"),
    "context": Column("context", "uint32", "context id"),
    "stream": Column("stream", "uint32", "stream or queue"),
    "correlation": Column("correlation", "uint32", "links calls to the activities that they caused"),
    "external_id": Column("external_id", "int64", "id of the innermost op or annotation around it; 0: none"),
}
_ROWS = {DEVICE_TRACK: ViewerRow.GPU, THREAD_TRACK: ViewerRow.CALL}
_NUMPY = {
    "i8": "int8", "u8": "uint8", "i16": "int16", "u16": "uint16", "i32": "int32", "u32": "uint32", "i64": "int64",
    "u64": "uint64", "f64": "float64", "text": "int32",
}  # fmt: skip
AFTER_NS = 600 * 10**9  # a recording may continue for seconds after the window: a later end is impossible
BEFORE_NS = 366 * 24 * 3600 * 10**9  # a start longer than this before the window is impossible
_MAX_DEVICES = 256
_ALL_DEVICES = -1
Pair = tuple[int, int]  # Unix ns, reading
LATEST_NS = 1 << 62  # in the year 2116: later times, and readings, are impossible
MAX_SAMPLES = 65_536
_LEAST_APART_NS = 10_000_000  # samples are accurate to a microsecond: the rate cannot be determined from nearer ones
_GREATEST_DRIFT = 0.01  # of a clock that counts ns
_HEADER_READINGS = {TSC: 1, MONOTONIC: 2}  # places in the samples of the arena's header


# Converts the times of declared records from their clock to Unix time.
# A source provides samples of its clock, each a pair of Unix ns and a reading. Between two samples a straight line
# converts readings, so that offset and drift are the measured ones, and a step of the system's clock affects only the
# times around it. Before the first and after the last sample the line through both of them continues. A single sample
# gives the offset; a tick then has its nominal length.
# Samples may be wrong. Those that do not ascend with the others are dropped, and a rate that no clock of this kind can
# have is replaced by the nominal one, with a warning.
class ClockLine(NamedTuple):
    """A clock: readings at some moments, ascending, Unix ns then, and the rates between, before and after them."""

    reading: Ints
    unix: Ints
    rate: Floats  # ns per tick; one entry more than readings

    def to_unix(self, readings: Ints) -> Ints:
        """Converts readings from 1 to LATEST_NS; results are clamped to the range of Unix time."""
        after = np.searchsorted(self.reading, readings, "right")
        from_sample = np.maximum(after - 1, 0)
        far = (readings - self.reading[from_sample]) * self.rate[after]
        near = np.clip(np.rint(far), -LATEST_NS, LATEST_NS).astype(np.int64)
        unix: Ints = np.clip(self.unix[from_sample] + near, 0, LATEST_NS)
        return unix


def line_of(pairs: Iterable[Pair], *, nominal_ns: float, free: bool) -> tuple[ClockLine | None, str]:
    """Returns the clock of these samples (None if none is usable) and what is wrong with them ("" if nothing).

    nominal_ns: length of a tick.
    free: any rate is possible.
    """
    known = _ascending(pairs)
    if not known:
        return None, ""
    unix, reading = (np.array(column, np.int64) for column in zip(*known, strict=True))
    rate = np.full(len(known) + 1, nominal_ns)
    if len(known) == 1:
        return ClockLine(reading, unix, rate), ""
    rate[1:-1] = np.diff(unix) / np.diff(reading)
    rate[0] = rate[-1] = (unix[-1] - unix[0]) / (reading[-1] - reading[0])
    drift = abs(rate[0] / nominal_ns - 1)
    if not free and drift > _GREATEST_DRIFT:
        first = ClockLine(reading[:1], unix[:1], np.full(2, nominal_ns))
        return (
            first,
            f"it seems to be {100 * drift:.3g} % off, which is impossible, so only its first sample is used",
        )
    return ClockLine(reading, unix, rate), ""


def _ascending(pairs: Iterable[Pair]) -> list[Pair]:
    """Returns the samples whose two values ascend, each far enough from the previous one."""
    found: list[Pair] = []
    for unix, reading in sorted(pair for pair in pairs if all(0 < value < LATEST_NS for value in pair)):
        if not found or (unix - found[-1][0] >= _LEAST_APART_NS and reading > found[-1][1]):
            found.append((unix, reading))
    return found


def samples_of(source: RawSource, clock: str) -> list[Pair]:
    """Returns the samples of this clock that came with the records; invalid values are dropped."""
    table = source.strings.get(SPACE_CLOCK_PAIR, {})
    found = [(unix, CLOCK_PAIR.unpack(text)[0]) for unix, text in table.items() if len(text) == CLOCK_PAIR.size]
    samples = source.metadata.get(CLOCKS_KEY)
    for sample in samples if isinstance(samples, list) else ():
        if isinstance(sample, Sequence) and all(type(value) is int for value in sample):
            found.extend(_pair(sample, clock))
    return found[:: -(-len(found) // MAX_SAMPLES) or 1]


def _pair(sample: Sequence[int], clock: str) -> list[Pair]:
    if len(sample) == 2:
        return [(sample[0], sample[1])]
    place = _HEADER_READINGS.get(clock)
    return [(sample[0], sample[place])] if place is not None and len(sample) == 3 else []


def as_readings(values: AnyArray) -> Ints:
    """Returns 64-bit fields as signed numbers: values above 2^63 become negative, which is impossible."""
    readings: Ints = values.astype(np.int64)
    return readings


assert tuple(_NUMPY) == DTYPES
# Values of columns of Kineto's tables for which the records have no field, if not 0.
_ABSENT: Mapping[tuple[str, str], int] = {
    ("kernel", "priority"): NO_PRIORITY,
    ("cuda_sync", "device"): -1,
    ("cuda_sync", "stream"): UNKNOWN_STREAM,
    ("cuda_sync", "wait_on_stream"): -1,
    ("cuda_sync", "wait_on_correlation"): -1,
}


def decode(source: RawSource, strings: StringTable, window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes records whose schema came with them."""
    try:
        schema = from_json(source.metadata.get(SCHEMA_KEY))
    except ValueError as exc:
        lost = min(max(source.records, 0), source.data.nbytes)
        return Decoded(tables={}, records=0, undecoded=lost, warnings=(f"its records cannot be read: {exc}",))
    return decode_records(source, schema, strings, window)


def decode_records(
    source: RawSource,
    schema: Schema,
    strings: StringTable,
    window: DecodeWindow = EVERYTHING,
    amend: Amend | None = None,
) -> Decoded:
    """Decodes all buffers of a source by a checked schema; texts go into `strings`.

    amend: changes the columns of the records before they become tables.
    """
    found = read_records(source, schema, strings)
    clocks = Clocks(found)
    for rows in found.typed():
        fill_times(found, rows, clocks, window)
        _fill_columns(found, rows)
    for role in _HANDLES:
        _number_handles(found, role)
    if amend is not None:
        amend(found)
    declared = schema_tables(schema)
    pieces: dict[str, list[Columns]] = {kind: [] for kind in declared}
    for rows in found.typed():
        pieces[schema.table(rows.record.type)].append(rows.columns)
    return Decoded(
        tables={kind: join_columns(kind, declared[kind], columns) for kind, columns in pieces.items()},
        records=found.records,
        undecoded=found.undecoded,
        warnings=tuple(found.warnings),
        metadata={key: value for key, value in source.metadata.items() if key != SCHEMA_KEY},
        categories={schema.table(name): name for name in schema.types if schema.table(name) != name},
    )


def _fill_columns(found: RecordSet, rows: Rows) -> None:
    """Adds the columns that the schema maps fields to. Handles keep their own values for now."""
    record, columns = rows.record, rows.columns
    if record.name:
        columns["name"] = texts_of(rows.field(record.name), record.name, record.texts, found.source, found.strings)
    else:
        number = found.strings.add(record.texts.otherwise) if len(rows) else 0
        columns["name"] = np.full(len(rows), number, np.int32)
    for role in ROLES:
        if name := getattr(record, role):
            columns[role] = rows.field(name)
    for name, value in record.constants.items():
        columns[name] = np.full(len(rows), value)
    for column in found.schema.types[record.type].columns:
        name = column.field or column.name
        if name in record.fields:
            values = rows.field(name)
            is_text = column.dtype == "text"
            columns[column.name] = (
                texts_of(values, name, column.texts, found.source, found.strings) if is_text else values
            )


def _number_handles(found: RecordSet, role: str) -> None:
    """Replaces the values of a role by small numbers, in all kinds of records alike."""
    having = [rows for rows in found.typed() if role in rows.columns]
    for rows, numbers in zip(having, small_numbers([rows.columns[role] for rows in having]), strict=True):
        rows.columns[role] = numbers


def small_numbers(columns: Sequence[AnyArray]) -> Sequence[AnyArray]:
    """Returns handles as numbers from 0 on, the same for equal values of all columns; small values as they are.

    A value whose bits are all set means "none", and becomes UNKNOWN_STREAM.
    """
    values = [column.astype(np.int64) for column in columns]
    none = [column == _none_of(before.dtype) for column, before in zip(values, columns, strict=True)]
    present = [column[~empty] for column, empty in zip(values, none, strict=True)]
    if any(len(part) and not 0 <= int(part.min()) <= int(part.max()) <= _LARGEST_PLAIN for part in present):
        interner = Interner()
        present = [interner.intern(part.view(np.uint64)) for part in present]
    numbers = [np.full(len(column), UNKNOWN_STREAM, np.uint32) for column in columns]
    for found, empty, part in zip(numbers, none, present, strict=True):
        found[~empty] = part
    return numbers


def _none_of(dtype: np.dtype[Any]) -> int:
    """Returns the number with all bits set, as int64 holds it."""
    return -1 if dtype.kind == "i" or dtype.itemsize == 8 else int(np.iinfo(dtype).max)


def texts_of(values: AnyArray, field: str, texts: Texts, source: RawSource, strings: StringTable) -> Numbers:
    """Returns for each value of a field the number of its text in `strings`."""
    if values.dtype.kind == "S":
        return _inline(values, strings)
    interner = Interner()
    codes = interner.intern(values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else values)
    keys = interner.keys()
    wanted = (keys.view(np.int64) if values.dtype.kind == "i" else keys).tolist()
    table = source.strings.get(texts.space, {})
    found, others = [], 0
    for value, key in zip(wanted, keys.tolist(), strict=True):
        text = _decoded(table[key], texts) if key in table else texts.values.get(value)
        if text is None:
            text = _other(value if others < MAX_OTHER_TEXTS else _MANY, field, texts)
            others += 1
        found.append(strings.add(text))
    return np.array(found, np.int32).take(codes) if found else np.empty(0, np.int32)


def _decoded(text: bytes, texts: Texts) -> str:
    plain = text[:MAX_TEXT_BYTES].partition(b"\0")[0]
    return demangle(plain) if texts.demangle else plain.decode("utf-8", "replace")


def _other(value: object, field: str, texts: Texts) -> str:
    """Returns the text of a value that has none in the schema."""
    return texts.otherwise.replace("{}", str(value)) if texts.otherwise else f"{field} {value}"


def _inline(values: npt.NDArray[np.bytes_], strings: StringTable) -> Numbers:
    known, codes = np.unique(values, return_inverse=True)
    found = [
        strings.add(text.partition(b"\0")[0].decode("utf-8", "replace")) for text in known[:MAX_INLINE_TEXTS].tolist()
    ]
    if len(known) > MAX_INLINE_TEXTS:
        found += [strings.add(_MANY)] * (len(known) - MAX_INLINE_TEXTS)
    return np.array(found, np.int32).take(codes) if found else np.empty(0, np.int32)


def own_table(name: str, activity: Activity) -> ActivityTable:
    """Returns the declaration of the table of an activity type that only the schema has."""
    columns = [_TRACK_COLUMNS[column] for column in TRACKS[activity.track]]
    columns += [
        Column(column.name, _NUMPY[column.dtype], column.meaning, text=column.dtype == "text")
        for column in activity.columns
    ]
    return ActivityTable(name=name, row=_ROWS[activity.track], meaning=activity.meaning, columns=tuple(columns))


def schema_tables(schema: Schema) -> dict[str, ActivityTable | None]:
    """Returns the tables of all types of a schema by name; None for Kineto's."""
    tables: dict[str, ActivityTable | None] = {}
    for name, activity in schema.types.items():
        table = schema.table(name)
        tables[table] = None if table in SCHEMAS else own_table(name, activity)
    return tables


def join_columns(kind: str, declared: ActivityTable | None, pieces: Sequence[Columns]) -> Table:
    """Returns the table of these pieces, one per kind of record; a column that a piece lacks has its default."""
    joined: Columns = {}
    rows = sum(len(piece["start"]) for piece in pieces)
    for column in SCHEMAS[kind] if declared is None else declared.columns:
        absent = _ABSENT.get((kind, column.name), NO_STRING if column.text else 0)
        parts = [_fitting(piece, column, absent) for piece in pieces]
        joined[column.name] = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, column.dtype), *parts])
    return make_table(kind, rows, joined, declared=declared)


def _fitting(piece: Columns, column: Column, absent: int) -> AnyArray:
    dtype = np.dtype(column.dtype)
    values = piece.get(column.name)
    if values is None:
        return np.full(len(piece["start"]), absent).astype(dtype)
    return values.astype(dtype, copy=False)


class Clocks:
    """The clocks of a set of records; those of devices by the value of the record's device field."""

    def __init__(self, found: RecordSet) -> None:
        self._found = found
        self._lines: dict[str, ClockLine | None] = {}
        self._of_device: dict[int, ClockLine] = {}
        for rows in found.rows.values():
            if any(rows.record.sync) and len(rows):
                self._add_devices(rows)

    def to_unix(self, rows: Rows, times: Ints, clock: str) -> tuple[Ints, Flags]:
        """Converts readings above 0. Returns Unix ns, and which of them have a clock."""
        if clock == REALTIME:
            return times, np.ones(len(times), np.bool_)
        if clock == DEVICE and self._of_device and _ALL_DEVICES not in self._of_device:
            return self._by_device(rows, times)
        line = self._of_device.get(_ALL_DEVICES) if clock == DEVICE else None
        line = self._sampled(clock) if line is None else line
        if line is None:
            return times, np.zeros(len(times), np.bool_)
        return line.to_unix(times), np.ones(len(times), np.bool_)

    def _by_device(self, rows: Rows, times: Ints) -> tuple[Ints, Flags]:
        device, unix, known = _devices(rows), times.copy(), np.zeros(len(times), np.bool_)
        for number, line in self._of_device.items():
            own = device == number
            unix[own] = line.to_unix(times[own])
            known |= own
        return unix, known

    def _sampled(self, clock: str) -> ClockLine | None:
        if clock not in self._lines:
            self._lines[clock] = self._line(samples_of(self._found.source, clock), clock, "")
        return self._lines[clock]

    def _add_devices(self, rows: Rows) -> None:
        """Adds the clock of each device with readings among these records."""
        reading, unix = (as_readings(rows.field(name)) for name in rows.record.sync)
        device = _devices(rows)
        for number in unique_values(device)[:_MAX_DEVICES].tolist():
            own = np.flatnonzero(device == number)
            own = own[:: -(-len(own) // MAX_SAMPLES)]
            pairs = zip(unix[own].tolist(), reading[own].tolist(), strict=True)
            line = self._line(pairs, DEVICE, f" of device {number}" if rows.record.device else "")
            if line is not None:
                self._of_device[number] = line

    def _line(self, pairs: Iterable[Pair], clock: str, whose: str) -> ClockLine | None:
        nominal = self._found.schema.tick_ns if clock == DEVICE else 1.0
        line, problem = line_of(pairs, nominal_ns=nominal, free=clock in (DEVICE, TSC))  # ticks of others are ns
        if problem:
            self._found.warnings.append(f"the clock {clock}{whose}: {problem}")
        return line


def _devices(rows: Rows) -> Ints:
    name = rows.record.device
    return rows.field(name).astype(np.int64) if name else np.full(len(rows), _ALL_DEVICES)


def fill_times(found: RecordSet, rows: Rows, clocks: Clocks, window: DecodeWindow) -> None:
    """Adds the columns start (Unix ns) and duration (ns), and drops records whose times are impossible."""
    record, kind = rows.record, f"of kind {rows.kind}"
    start, end = _readings(rows, record)
    missing = (start == 0) | (end == 0)
    impossible = ~missing & ((start < 0) | (end < 0) | (start > LATEST_NS) | (end > LATEST_NS))
    found.lose(int(np.count_nonzero(missing)), f"{kind} without a time")
    found.lose(int(np.count_nonzero(impossible)), f"{kind} with impossible times")
    usable = ~(missing | impossible)
    rows.keep(usable)
    clock = record.clock or found.schema.clock
    start, known = clocks.to_unix(rows, start[usable], clock)
    end, _ = clocks.to_unix(rows, end[usable], clock)
    found.lose(int(np.count_nonzero(~known)), f"{kind} with times of the clock {clock}, which has no samples")
    backwards = int(np.count_nonzero(known & (end < start)))
    if backwards:
        found.warnings.append(f"{count_text(backwards, kind)} with an end before the start: their duration is set to 0")
    end = np.maximum(start, end)
    far = known & _is_far(start, end, window)
    found.lose(int(np.count_nonzero(far)), f"{kind} with times far from the recording")
    rows.columns = {"start": start, "duration": end - start}
    rows.keep(known & ~far)


def _readings(rows: Rows, record: Record) -> tuple[Ints, Ints]:
    """Returns starts and ends as the clock shows them; a negative value is impossible."""
    first, last = record.time
    start = as_readings(rows.field(first))
    if not last:
        return start, start
    end = as_readings(rows.field(last))
    if not record.length:
        return start, end
    possible = (start >= 0) & (end >= 0) & (start <= LATEST_NS) & (end <= LATEST_NS)
    return start, np.where(
        start == 0, 0, np.where(possible, np.where(possible, start, 0) + np.where(possible, end, 0), -1)
    )


def _is_far(start: Ints, end: Ints, window: DecodeWindow) -> Flags:
    far: Flags = start <= 0
    if window.end_ns:
        far |= (end > window.end_ns + AFTER_NS) | (start < window.start_ns - BEFORE_NS)
    return far
