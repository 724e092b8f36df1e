"""The declared schema of a source's records, stated once by a vendor or a plug-in. No I/O.

Theory of operation
    A source that writes records in the format "declared/1" puts `to_json(schema)` into the metadata of its
    arena, as metadata["schema"]. The schema travels with the records and is stored beside them, so that a recording can
    be decoded without the plug-in. Everything else is derived from it: decoding, columns, Parquet, SQL tables, rows in
    Chrome and Perfetto traces, and documentation.

    types       activity types, as people request and see them. A type of Kineto ("kernel") reuses Kineto's table, with
                all its analyses; "<name>_runtime", "<name>_driver" and "<name>_sync", with the schema's own name, are
                Kineto's tables of calls and synchronizations under the vendor's name. Any other type must be called
                "<name>_<something>" and has a table of its own, whose columns are those of its track and its Cols.
    records     record layouts by kind number. A record belongs to one activity type, or to none ("": it is skipped, or
                has the clock readings of `sync`). Offsets count from the first byte of the record as the vendor defines
                it: with the framing HEADED after the two words, otherwise from its beginning.
    framing     how records follow each other in a buffer: KIND_U32    a record begins with its kind as u32, and its
                size is that of the schema HEADED each record is preceded by u32 kind and u32 bytes to the next header,
                a multiple of 8, as
                            `push` of the collector kit writes them (agent/native/kit/vendor.h)
                SIZE_FIELD  a record begins with its own size as u64 and its kind as u32, padded to a multiple of 8
                With the last two, a record may be longer than the schema says.
    clock       the clock of the times: REALTIME (Unix ns), MONOTONIC, BOOTTIME, TSC, or DEVICE, a counter of the
                device. All but REALTIME need samples: entries of SPACE_CLOCK_PAIR in the string table, or
                metadata["clocks"], a list of [Unix ns, reading], or records with `sync`.

    Fields have the codes of `struct` (b B h H i I q Q f d, little-endian) or are bytes ("16s"). Texts are keys of the
    arena's string table (a space), values of an enumeration, or bytes in the record itself, up to a NUL.

    A schema from a target is untrusted. from_json and check limit all sizes and raise ValueError, naming the place.
"""

import collections.abc
import json
import re
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple, get_args, get_origin, get_type_hints

# Converts nested NamedTuples to JSON values and back, by their annotations; the values may be untrusted. No I/O.
MAX_MEMBERS = 1024  # of a list or an object
_INT_LIMIT = 1 << 63
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,19}")


def shown(value: object) -> str:
    """The beginning of a value, for errors."""
    try:
        return repr(value)[:80]
    except (RecursionError, ValueError):  # nested too deeply; an int of thousands of digits
        return "a %s" % type(value).__name__


def plain(value: Any) -> Any:
    """The value in a form for json.dumps, without members that have their default."""
    if hasattr(value, "_field_defaults"):
        members = value._asdict().items()
        defaults = value._field_defaults
        return {key: plain(each) for key, each in members if key not in defaults or each != defaults[key]}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def typed(value: Any, kind: Any, place: str) -> Any:
    """The JSON value as the type of an annotation; a value of that type is returned unchanged. Raises ValueError.

    kind: a NamedTuple, Mapping, Tuple, str, int, float or bool, possibly nested. place: for the error.
    """
    if hasattr(kind, "_field_defaults"):
        return _named(value, kind, place)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is collections.abc.Mapping:
        return _mapping(value, parts, place)
    if origin is tuple:
        return _tuple(value, parts, place)
    if kind is float and type(value) is int:
        return float(value) if abs(value) < _INT_LIMIT else value
    if type(value) is not kind:
        raise ValueError("%s is %s; expected %s" % (place, shown(value), kind.__name__))
    return value


def _named(value: Any, kind: Any, place: str) -> Any:
    members = value._asdict() if isinstance(value, kind) else value
    hints = get_type_hints(kind)
    if not isinstance(members, dict) or not set(members) <= set(hints):
        raise ValueError("%s is %s; expected an object with %s" % (place, shown(value), ", ".join(hints)))
    missing = [name for name in hints if name not in members and name not in kind._field_defaults]
    if missing:
        raise ValueError("%s.%s is missing" % (place, missing[0]))
    return kind(**{key: typed(each, hints[key], "%s.%s" % (place, key)) for key, each in members.items()})


def _mapping(value: Any, parts: Tuple[Any, ...], place: str) -> Dict[Any, Any]:
    if not isinstance(value, Mapping) or len(value) > MAX_MEMBERS:
        raise ValueError("%s is %s; expected an object with at most %d members" % (place, shown(value), MAX_MEMBERS))
    found: Dict[Any, Any] = {}
    for key, each in value.items():
        at = "%s[%s]" % (place, shown(key))
        is_number = parts[0] is int and isinstance(key, str) and _NUMBER.fullmatch(key)
        member = typed(int(key) if is_number else key, parts[0], at)
        found[member] = typed(each, parts[1], at)
    return found


def _tuple(value: Any, parts: Tuple[Any, ...], place: str) -> Tuple[Any, ...]:
    many = len(parts) == 2 and parts[1] is Ellipsis
    if not isinstance(value, (list, tuple)) or (len(value) > MAX_MEMBERS if many else len(value) != len(parts)):
        raise ValueError("%s is %s; expected a list%s" % (place, shown(value), "" if many else " of %d" % len(parts)))
    kinds = parts[:1] * len(value) if many else parts
    return tuple(typed(each, kind, "%s[%d]" % (place, at)) for at, (each, kind) in enumerate(zip(value, kinds)))


VERSION = 1  # of the JSON form
SCHEMA_KEY, CLOCKS_KEY = "schema", "clocks"  # of an arena's metadata

KIND_U32, HEADED, SIZE_FIELD = "kind_u32", "headed", "size_field"
FRAMINGS = (KIND_U32, HEADED, SIZE_FIELD)
REALTIME, MONOTONIC, BOOTTIME, TSC, DEVICE = "realtime", "monotonic", "boottime", "tsc", "device"
CLOCKS = (REALTIME, MONOTONIC, BOOTTIME, TSC, DEVICE)
NO_SPACE = -1

# Where a viewer shows the activities of a custom type, and the columns that a track adds to each of its tables.
DEVICE_TRACK, THREAD_TRACK = "device", "thread"
TRACKS: Mapping[str, Tuple[str, ...]] = {
    DEVICE_TRACK: ("start", "duration", "name", "device", "context", "stream", "correlation", "external_id"),
    THREAD_TRACK: ("start", "duration", "name", "thread", "correlation", "external_id"),
}
# Names that columns of a custom type may not have: columns of any track, and those that queries add to each table.
RESERVED_COLUMNS = frozenset(
    (
        *TRACKS[DEVICE_TRACK],
        *TRACKS[THREAD_TRACK],
        "args",
        "duration_ns",
        "end_ns",
        "inputs",
        "rank",
        "start_ns",
        "trace",
    )
)
# Facts that a record can have about its activity besides time and name. Each role fills the column of the same name.
ROLES = ("correlation", "thread", "device", "context", "stream")

_GRAPH = {"graph_id": "u32", "graph_node_id": "u64", "channel": "u32", "channel_type": "u32"}
_SHAPE = {"%s_%s" % (what, axis): "i32" for what in ("grid", "block") for axis in "xyz"}
_SHARED = {"registers": "u16", "static_shared_memory": "i32", "dynamic_shared_memory": "i32"}
_PEERS = {"%s_%s" % (end, what): "u32" for end in ("src", "dst") for what in ("device", "context")}
_COPY_KINDS = {"copy_kind": "u8", "src_kind": "u8", "dst_kind": "u8", "peer": "u8"}
_WAIT = {"event": "u32", "wait_on_stream": "i64", "wait_on_correlation": "i64"}
# Types of Kineto that records can have: the roles of their tables, and the columns that Cols can fill.
# tests/unit/trace/decode/test_kineto_types.py compares them with the tables.
TYPES_OF_KINETO: Mapping[str, Tuple[Tuple[str, ...], Mapping[str, str]]] = {
    "kernel": (
        ("correlation", "device", "context", "stream"),
        {**_SHAPE, **_SHARED, "queued": "u64", "priority": "i32", **_GRAPH},
    ),
    "gpu_memcpy": (("correlation", "device", "context", "stream"), {"bytes": "u64", **_COPY_KINDS, **_PEERS, **_GRAPH}),
    "gpu_memset": (("correlation", "device", "context", "stream"), {"bytes": "u64", "memory_kind": "u16", **_GRAPH}),
    "cuda_runtime": (("correlation", "thread"), {"cbid": "u32"}),
    "cuda_driver": (("correlation", "thread"), {"cbid": "u32"}),
    "cuda_sync": (("correlation", "device", "context", "stream"), {"type": "u32", **_WAIT}),
    "overhead": ((), {"kind": "u32"}),
}
# Suffixes of a vendor's names for Kineto's tables.
VENDOR_TYPES = {"runtime": "cuda_runtime", "driver": "cuda_driver", "sync": "cuda_sync"}
# Schema names that would make a type's name equal to that of an existing table, view or database object.
RESERVED_NAMES = frozenset(
    (
        "annotation", "blocked", "call", "child", "collective", "comm", "counter", "counters", "cpu", "critical",
        "cuda", "data", "diff", "distributed", "duckdb", "event", "flame", "flops", "frequent", "gpu", "graph", "hlo",
        "hot", "idle", "information", "kernel", "kernels", "kineto", "launch", "memory", "module", "not", "op",
        "operator", "pg", "process", "profiler", "python", "queue", "rank", "sm", "sql", "sqlite", "step", "temporal",
        "tensor", "thread", "time", "user",
    )
)  # fmt: skip

MAX_TYPES, MAX_RECORDS, MAX_FIELDS, MAX_COLUMNS = 32, 64, 128, 48
MAX_RECORD_BYTES, MAX_BYTES_FIELD = 16384, 256
MAX_VALUES, MAX_TEXT = MAX_MEMBERS, 200  # entries of one enumeration; characters of a text
MAX_KIND = (1 << 32) - 2  # the largest number marks texts among pushed records
MAX_JSON_BYTES = 48 * 1024  # the frame of an arena also has the source's other metadata
_MAX_SPACE = (1 << 32) - 1
_VALUE_LIMIT = 1 << 63

_WIDTHS = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8}
_INTEGERS = "bBhHiIqQ"
_BYTES = re.compile(r"([1-9][0-9]{0,2})s")
_NAME = re.compile(r"[a-z][a-z0-9]{1,15}")
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]{0,39}")
DTYPES = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f64", "text")


class Texts(NamedTuple):
    """The texts that an integer field represents.

    space: its value is a key in this space of the string table; NO_SPACE: none. values: an enumeration.
    otherwise: the text for values without one; "{}" in it stands for the value. "": `<field> <value>`.
    demangle: texts of the space are mangled C++ names.
    """

    space: int = NO_SPACE
    values: Mapping[int, str] = {}
    otherwise: str = ""
    demangle: bool = False


class Col(NamedTuple):
    """A column of an activity type.

    name: of the column. dtype: one of DTYPES; "" for columns of Kineto's tables. meaning: for people, with the unit;
    "" for columns of Kineto's tables. field: of the records; "": as the column. A record without that field yields 0,
    or no text. texts: of a column of the type "text", unless its field has bytes.
    """

    name: str
    dtype: str = ""
    meaning: str = ""
    field: str = ""
    texts: Texts = Texts()


class Activity(NamedTuple):
    """An activity type. track: DEVICE_TRACK or THREAD_TRACK; "" for types of Kineto's. meaning: for people."""

    columns: Tuple[Col, ...] = ()
    track: str = ""
    meaning: str = ""


class Record(NamedTuple):
    """The layout of one kind of record, and the meaning of its fields.

    size        bytes: exact with the framing KIND_U32, otherwise the least
    fields      name -> (code, byte offset)
    time        fields with the start and the end; ("start", "") for an activity without a length
    length      the second field of `time` has the duration, in the same unit, not the end
    name        the integer field that identifies the name, or bytes; "": every activity has the name `texts.otherwise`
    texts       the texts that the field `name` stands for
    constants   columns that have the same value in all records of this kind
    sync        of records without a type: fields with a reading of the clock DEVICE, and Unix ns at that moment
    clock       the clock of these times, if it is not the schema's
    correlation, thread, device, context, stream
                fields that fill the columns of the same names; "": none. Streams and contexts may be handles: where
                their values have more than 19 bits, they are numbered in the order of their first records.
    """

    type: str
    size: int
    fields: Mapping[str, Tuple[str, int]]
    time: Tuple[str, str] = ("start", "end")
    length: bool = False
    name: str = ""
    texts: Texts = Texts()
    correlation: str = ""
    thread: str = ""
    device: str = ""
    context: str = ""
    stream: str = ""
    constants: Mapping[str, int] = {}
    sync: Tuple[str, str] = ("", "")
    clock: str = ""


class Schema(NamedTuple):
    """Everything that a source declares. tick_ns: nominal length of one tick of the clock DEVICE."""

    name: str
    types: Mapping[str, Activity]
    records: Mapping[int, Record]
    framing: str = KIND_U32
    clock: str = REALTIME
    tick_ns: float = 1.0

    def check(self) -> None:
        """Raises ValueError, which says what is wrong, where, and what to do."""
        typed(self, Schema, "schema")
        size = len(json.dumps(plain(self)))
        if size > MAX_JSON_BYTES:
            raise ValueError(
                "schema %s: its JSON has %d bytes, but at most %d fit into a frame; shorten its texts"
                % (shown(self.name), size, MAX_JSON_BYTES)
            )
        for problem in _problems(self):
            raise ValueError("schema %s: %s" % (shown(self.name), problem))

    def table(self, type_name: str) -> str:
        """The table of one of its types: Kineto's, or one of its own with the type's name."""
        return table_of(self.name, type_name)


def table_of(name: str, type_name: str) -> str:
    """The table that holds an activity type of the schema of this name."""
    prefix, _, ending = type_name.partition("_")
    return VENDOR_TYPES.get(ending, type_name) if prefix == name else type_name


def width(code: str) -> int:
    """The bytes of a field with this code; 0: there is no such code."""
    found = _BYTES.fullmatch(code)
    if found:
        return int(found.group(1)) if int(found.group(1)) <= MAX_BYTES_FIELD else 0
    return _WIDTHS.get(code, 0)


# ------------------------------------------------------------ what can be wrong


def _problems(schema: Schema) -> Iterator[str]:
    """Yields all problems, ordered so that later checks can rely on the absence of earlier ones."""
    if not _NAME.fullmatch(schema.name):
        yield "its name must be 2 to 16 lower-case letters and digits and begin with a letter; choose another"
    if schema.name in RESERVED_NAMES:
        yield "its name is reserved (docs/record-schemas.md lists the reserved names); choose another"
    if schema.framing not in FRAMINGS:
        yield "there is no framing %s; choose one of %s" % (shown(schema.framing), ", ".join(FRAMINGS))
    if schema.clock not in CLOCKS:
        yield "there is no clock %s; choose one of %s" % (shown(schema.clock), ", ".join(CLOCKS))
    if not 1e-6 <= schema.tick_ns <= 1e9:
        yield "tick_ns is %r; a tick is 1e-6 to 1e9 ns long" % schema.tick_ns
    if not 1 <= len(schema.types) <= MAX_TYPES or not 1 <= len(schema.records) <= MAX_RECORDS:
        yield "it has %d types and %d records; declare 1 to %d types and 1 to %d records" % (
            len(schema.types), len(schema.records), MAX_TYPES, MAX_RECORDS,
        )  # fmt: skip
    tables: Dict[str, str] = {}
    for name, activity in schema.types.items():
        place = "types[%s]" % shown(name)
        other = tables.setdefault(schema.table(name), name)
        if other != name:
            yield "%s: it has the same table as %s; declare only one of them" % (place, shown(other))
        for problem in _type_problems(schema, name, activity):
            yield "%s%s" % (place, problem)
    for kind, record in schema.records.items():
        for problem in _record_problems(schema, kind, record):
            yield "records[%s]%s" % (shown(kind), problem)


def _type_problems(schema: Schema, name: str, activity: Activity) -> Iterator[str]:
    kineto = TYPES_OF_KINETO.get(schema.table(name))
    if kineto is None and not (name.startswith(schema.name + "_") and _IDENTIFIER.fullmatch(name)):
        yield ": it is neither one of Kineto's types (%s) nor called %s_<type> in lower case; rename it" % (
            ", ".join(TYPES_OF_KINETO), schema.name,
        )  # fmt: skip
    if kineto is None and name.endswith(("_runtime", "_driver")):
        yield ": readers would mistake it for Kineto's own calls; call it %s_runtime or %s_driver, or another name" % (
            schema.name, schema.name,
        )  # fmt: skip
    if kineto is not None and activity.track:
        yield ".track: Kineto's tables already have one; leave it out"
    if kineto is None and activity.track not in TRACKS:
        yield ".track: there is no track %s; choose one of %s" % (shown(activity.track), ", ".join(TRACKS))
    for problem in _text_problems(activity.meaning, kineto is not None):
        yield ".meaning: " + problem
    if len(activity.columns) > MAX_COLUMNS:
        yield ".columns: there are %d; declare at most %d" % (len(activity.columns), MAX_COLUMNS)
    seen = set(RESERVED_COLUMNS) if kineto is None else set()
    for column in activity.columns:
        place = ".columns[%s]: " % shown(column.name)
        for problem in _column_problems(column, None if kineto is None else kineto[1]):
            yield place + problem
        if column.name in seen:
            yield place + "the table already has a column of this name; rename it"
        seen.add(column.name)
        if column.dtype == "text" or _declares(column.texts):
            for problem in _texts_problems(column.texts):
                yield place + problem


def _column_problems(column: Col, kineto: Optional[Mapping[str, str]]) -> Iterator[str]:
    if kineto is not None:
        if column.name not in kineto:
            yield "records cannot fill a column of this name in Kineto's table; choose one of %s" % ", ".join(kineto)
        if column.dtype not in ("", kineto.get(column.name)):
            yield "Kineto's column has the type %s; leave the type out" % kineto.get(column.name)
        if _declares(column.texts):
            yield "a numeric column has no texts; leave them out"
    else:
        if not _IDENTIFIER.fullmatch(column.name):
            yield "a column's name is 1 to 40 lower-case letters, digits and _, and begins with a letter; rename it"
        if column.dtype not in DTYPES:
            yield "there is no type %s; choose one of %s" % (shown(column.dtype), ", ".join(DTYPES))
        if column.dtype != "text" and _declares(column.texts):
            yield "only a column of the type text can have texts; leave them out"
    for problem in _text_problems(column.meaning, kineto is not None):
        yield "its meaning: " + problem


def _record_problems(schema: Schema, kind: int, record: Record) -> Iterator[str]:
    if not 0 <= kind <= MAX_KIND:
        yield ": a kind is a number from 0 to %d" % MAX_KIND
    if record.type and record.type not in schema.types:
        yield ".type: %s is not declared; add it to types, or write '' for records to skip" % shown(record.type)
    least = {KIND_U32: 8, SIZE_FIELD: 12}.get(schema.framing, 1)
    if not least <= record.size <= MAX_RECORD_BYTES:
        yield ".size: it is %r; with this framing a record has %d to %d bytes" % (record.size, least, MAX_RECORD_BYTES)
    if len(record.fields) > MAX_FIELDS:
        yield ".fields: there are %d; declare at most %d" % (len(record.fields), MAX_FIELDS)
    for problem in _field_problems(record):
        yield problem
    if record.clock not in ("", *CLOCKS):
        yield ".clock: there is no clock %s; choose one of %s" % (shown(record.clock), ", ".join(CLOCKS))
    if record.type:
        for problem in _activity_problems(schema, record):
            yield problem
    for place, name in (("sync[0]", record.sync[0]), ("sync[1]", record.sync[1])):
        if any(record.sync) and not _is_time(record, name):
            yield ".%s: %s is not a field with the code q or Q" % (place, shown(name))
    if any(record.sync) and record.type:
        yield ".sync: clock readings are records without a type; write '' for the type"


def _field_problems(record: Record) -> Iterator[str]:
    ends = []
    for name, (code, offset) in record.fields.items():
        place = ".fields[%s]: " % shown(name)
        if not _IDENTIFIER.fullmatch(name):
            yield place + "a field's name is 1 to 40 lower-case letters, digits and _; rename it"
        if not width(code):
            yield place + "there is no code %s; use one of %s, or 1s to %ds" % (
                shown(code), " ".join(_WIDTHS), MAX_BYTES_FIELD,
            )  # fmt: skip
        if not 0 <= offset <= record.size - width(code):
            yield place + "bytes %r to %r are outside the record's %d bytes; correct the offset or the size" % (
                offset, offset + width(code), record.size,
            )  # fmt: skip
        ends.append((offset, offset + width(code), name))
    ends.sort()
    for (_, end, before), (begin, _, name) in zip(ends, ends[1:]):
        if begin < end:
            yield ".fields[%s] overlaps %s, which ends at byte %d; correct the offset" % (
                shown(name), shown(before), end,
            )  # fmt: skip


def _activity_problems(schema: Schema, record: Record) -> Iterator[str]:
    start, end = record.time
    for place, name in (("time[0]", start), ("time[1]", end)):
        if not _is_time(record, name) and (name or place == "time[0]"):
            yield ".%s: %s is not a field with the code q or Q" % (place, shown(name))
    activity = schema.types[record.type]
    kineto = TYPES_OF_KINETO.get(schema.table(record.type))
    roles = TRACKS[activity.track] if kineto is None else kineto[0]
    for role in ROLES:
        name = getattr(record, role)
        if name and role not in roles:
            yield ".%s: activities of the type %s have none; leave it out" % (role, shown(record.type))
        if name and not _has_code(record, name, _INTEGERS):
            yield ".%s: %s is not an integer field of the record" % (role, shown(name))
    if record.name and not _has_code(record, record.name, _INTEGERS + "s"):
        yield ".name: %s is neither an integer field nor a bytes field" % shown(record.name)
    for problem in _texts_problems(record.texts):
        yield ".texts: " + problem
    if not record.name and not record.texts.otherwise:
        yield ".name: activities need names; name a field, or give a text for all of them in texts.otherwise"
    numbers = {column.name for column in activity.columns if column.dtype != "text"}
    numbers |= {role for role in ROLES if role in roles} | (set() if kineto is None else set(kineto[1]))
    for name, value in record.constants.items():
        if name not in numbers:
            yield ".constants: %s is not a numeric column of the type %s" % (shown(name), shown(record.type))
        if not -_VALUE_LIMIT <= value < _VALUE_LIMIT:
            yield ".constants[%s]: %d does not fit into 64 bits" % (shown(name), value)
    for column in activity.columns:
        field = column.field or column.name
        codes = _INTEGERS + {"text": "s", "f64": "fd"}.get(column.dtype, "")
        if field in record.fields and not _has_code(record, field, codes):
            yield ".fields[%s]: its code does not suit the column %s of the type %s" % (
                shown(field), shown(column.name), shown(record.type),
            )  # fmt: skip


def _has_code(record: Record, field: str, codes: str) -> bool:
    return field in record.fields and record.fields[field][0][-1:] in codes


def _is_time(record: Record, field: str) -> bool:
    return _has_code(record, field, "qQ")


def _declares(texts: Texts) -> bool:
    return texts != Texts()


def _texts_problems(texts: Texts) -> Iterator[str]:
    if not NO_SPACE <= texts.space <= _MAX_SPACE:
        yield "a space is a number from 0 to %d, or NO_SPACE" % _MAX_SPACE
    if len(texts.values) > MAX_VALUES:
        yield "the enumeration has %d values; declare at most %d" % (len(texts.values), MAX_VALUES)
    if texts.values and texts.space != NO_SPACE:
        yield "texts come from a space or from an enumeration, not from both"
    for value, text in texts.values.items():
        if not -_VALUE_LIMIT <= value < 2 * _VALUE_LIMIT:
            yield "the value %d does not fit into 64 bits" % value
        for problem in _text_problems(text, False):
            yield "the text of value %d: %s" % (value, problem)
    for problem in _text_problems(texts.otherwise, True):
        yield problem


def _text_problems(text: str, may_be_empty: bool) -> Iterator[str]:
    if not text and not may_be_empty:
        yield "a text is missing; write one for people to read"
    if len(text) > MAX_TEXT or not text.isprintable():
        yield "%s is longer than %d characters or not printable" % (shown(text), MAX_TEXT)


# ------------------------------------------------------------ the JSON form


def to_json(schema: Schema) -> Dict[str, Any]:
    """The schema as a JSON object without members that have their default, for metadata[SCHEMA_KEY]."""
    return {"version": VERSION, **plain(schema)}


def from_json(value: Any) -> Schema:
    """Decodes and checks the result of to_json. Raises ValueError."""
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise ValueError("the schema is not a JSON object of version %d; update kinetod" % VERSION)
    members = {key: member for key, member in value.items() if key != "version"}
    found: Schema = typed(members, Schema, "schema")
    found.check()
    return found
