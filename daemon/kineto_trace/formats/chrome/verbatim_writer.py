"""Writes a trace that was read from a Chrome trace back as one: the same events and members, in the same order.

Theory of operation
    A row's `present` mask (model/activity_tables.py) marks its members that are in columns; the other members are the
    texts origin["args"] and origin["members"]. Rows of one kind with the same mask share a form: a list of literals and
    columns. All forms go through the native writer together, in the order of the rows' places in the file, so that the
    cost is that of writing the text. Read as JSON, a written event equals the original: numbers have the same values
    (their texts may differ: 0.8 and 0.800), and members may be in another order. Parts that were repaired on reading
    are now valid. Writing a trace twice gives the same bytes.

    Rows that were not in the file (Table.origin is empty) have no such form; formats/chrome/chrome_writer.py writes
    traces with such rows.

Folds fields whose value is the same in all rows into the literals: rows have fewer fields, the text is the same.

Most traces have many such fields: process, device, context, category, and everything that is 0 throughout.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from kineto_trace.arrays.codec import (
    REAL,
    SIGNED,
    TEXT,
    TIME,
    UNSIGNED,
    WHOLE,
    Field,
    Interner,
    MixedWriter,
    PreparedTexts,
)
from kineto_trace.base.array_types import AnyArray, Flags, UInts32
from kineto_trace.formats.chrome.counter_tracks import SHOWN, CounterTrack, hardware_tracks, write_counters
from kineto_trace.formats.text_sinks import TextSink, escaped
from kineto_trace.model import activity_tables as bits
from kineto_trace.model.activity_tables import BOOL, COUNTER, FIRST_ARG_BIT, KINDS, MEMORY, Arg
from kineto_trace.model.target_info import base_ns
from kineto_trace.model.trace import TEXT_ID, Table, Trace

_LAST = "traceName"  # Kineto's last member
_OPERATIONS = {bits.U64: UNSIGNED, bits.U32: UNSIGNED, bits.U16: UNSIGNED, bits.F64: REAL}
_FALSE_TRUE = PreparedTexts([b"false", b"true"])
_PHASES = PreparedTexts([json.dumps(chr(number)).encode() for number in range(128)])
Columns = Mapping[str, AnyArray]
_PHASES_OF_TABLES = {MEMORY: b'"ph":"i"', COUNTER: b'"ph":"C"'}
_MAX_FOLDED = 64  # forms of one table; checking the rows of each form takes a pass over the table
_FREE_BIT = 62  # this bit and the next one of masks: whether a row has other arguments, and other members
_SAMPLE = 64  # values compared first: few varying columns pass this check


class _Words:
    """The trace's strings as JSON. names: with their quotes; fragments: members with a leading comma."""

    def __init__(self, strings: Sequence[str], tables: Sequence[Table]) -> None:
        names, fragments = (np.zeros(len(strings) + 1, np.bool_) for _ in range(2))
        for table in tables:
            _mark(names, _names(table))
            _mark(names, table.origin["category"])
            for ids in (table.origin["pid"], table.origin["tid"], _member_id(table)):
                if ids is not None:
                    _mark(names, TEXT_ID - ids[ids <= TEXT_ID])
            _mark(fragments, table.origin["members"])
            _mark(fragments, _other_args(table))
        self.names = PreparedTexts(
            [b'"' + escaped(text) + b'"' if used else b"" for text, used in zip(strings, names.tolist(), strict=False)]
        )
        self.fragments = PreparedTexts(
            [
                text.encode("utf-8", "replace") if used else b""
                for text, used in zip(strings, fragments.tolist(), strict=False)
            ]
        )


class _Forms:
    """Collects the forms of all tables."""

    def __init__(self, words: _Words, base: int) -> None:
        self.forms: list[list[Field]] = []
        self._words = words
        self._base = base

    def add(self, table: Table) -> UInts32:
        """Returns the number of each row's form."""
        masks, forms = Interner(), Interner()
        other = _other_args(table)
        rest = (other >= 0).astype(np.uint64) | (table.origin["members"] >= 0).astype(np.uint64) << np.uint64(1)
        mask = masks.intern(table.origin["present"] ^ rest << np.uint64(_FREE_BIT))
        form, keys, first = mask, masks.keys(), len(self.forms)
        category = table.origin["category"]
        if "phase" in table.columns or (category != category[:1]).any():
            # The output does not need the split, but rows of one category have more members in common.
            split = mask.astype(np.uint64) << np.uint64(40) | (category + 1).astype(np.uint64)
            if "phase" in table.columns:
                split |= table.columns["phase"].astype(np.uint64) << np.uint64(32)
            form = forms.intern(split)
            keys = keys[(forms.keys() >> np.uint64(40)).astype(np.int64)]
        found = [self._form(table, key & ~(3 << _FREE_BIT), key >> _FREE_BIT & 3, other) for key in keys.tolist()]
        if len(found) <= _MAX_FOLDED:
            rows = [np.flatnonzero(form == number) for number in range(len(found))] if len(found) > 1 else [None]
            found = [folded(fields, own) for fields, own in zip(found, rows, strict=True)]
        self.forms += found
        return form + np.uint32(first)

    def _form(self, table: Table, present: int, rest: int, other: AnyArray) -> list[Field]:
        members = _Members()
        columns, origin, words = table.columns, table.origin, self._words
        if present & bits.PHASE:
            if "phase" in columns:
                members.add(b'"ph":', TEXT, columns["phase"], _PHASES)
            else:
                members.literal(_PHASES_OF_TABLES.get(table.kind, b'"ph":"X"'))
        if present & bits.CATEGORY:
            members.add(b'"cat":', TEXT, origin["category"], words.names)
        if present & bits.NAME:
            members.add(b'"name":', TEXT, _names(table), words.names)
        for name, has, is_text in (("pid", bits.PID, bits.PID_TEXT), ("tid", bits.TID, bits.TID_TEXT)):
            if present & has:
                self._id(members, name, origin[name], bool(present & is_text))
        self._time(members, present, ("ts", bits.TS, bits.TS_INTEGER, bits.TS_REAL), columns["start"], origin)
        self._time(members, present, ("dur", bits.DUR, bits.DUR_INTEGER, bits.DUR_REAL), columns["duration"], origin)
        if present & bits.ID:
            ids = _member_id(table)
            ids = np.zeros(len(table), np.int64) if ids is None else ids
            self._id(members, "id", ids, bool(present & bits.ID_TEXT))
        for has, text in ((bits.BP_E, b'"bp":"e"'), (bits.S_T, b'"s":"t"'), (bits.S_G, b'"s":"g"')):
            if present & has:
                members.literal(text)
        if present & bits.ARGS:
            members.open(b'"args":{')
            for place, arg in enumerate(KINDS[table.kind]):
                if present >> (FIRST_ARG_BIT + place) & 1:
                    _argument(members, arg, table)
            if rest & 1:
                members.add(b"", TEXT, other, words.fragments)
            members.close()
        if rest & 2:
            members.add(b"", TEXT, origin["members"], words.fragments)
        return [*members.fields, Field(members.pending + b"},\n")]

    def _id(self, members: "_Members", name: str, column: AnyArray, is_text: bool) -> None:
        key = b'"%s":' % name.encode()
        if is_text:
            members.add(key, TEXT, (TEXT_ID - column).astype(np.uint32), self._words.names)
        else:
            members.add(key, SIGNED, column)

    def _time(
        self, members: "_Members", present: int, what: tuple[str, int, int, int], column: AnyArray, origin: Columns
    ) -> None:
        name, has, integer, real = what
        if not present & has:
            return
        key = b'"%s":' % name.encode()
        if present & real:
            members.add(key, REAL, origin[f"{name}_real"])
        else:
            base = self._base if has == bits.TS else 0
            members.add(key, WHOLE if present & integer else TIME, column, base=base)


class _Members:
    """Collects the fields of one form. Literals wait for the next value, so that a row has few fields."""

    def __init__(self) -> None:
        self.fields: list[Field] = []
        self.pending = b"{"
        self._comma = b""

    def add(
        self, key: bytes, operation: int, column: AnyArray, texts: PreparedTexts | None = None, *, base: int = 0
    ) -> None:
        """Adds a member whose value is in a column."""
        self.fields.append(Field(self.pending + self._comma + key, operation, column, texts, base))
        self.pending, self._comma = b"", b","

    def literal(self, text: bytes) -> None:
        """Adds a member that is the same in all rows."""
        self.pending += self._comma + text
        self._comma = b","

    def open(self, text: bytes) -> None:
        """Begins a member that is an object."""
        self.pending += self._comma + text
        self._comma = b""

    def close(self) -> None:
        """Ends that object."""
        self.pending += b"}"
        self._comma = b","


def is_verbatim(trace: Trace) -> bool:
    """Returns whether all activities of the trace have the origin columns of their file.

    Samples of counters may have been recorded beside the file.
    """
    return trace.head is not None and all(
        table.origin or not len(table) or table.kind == COUNTER for table in trace.tables.values()
    )


def write_verbatim(trace: Trace, sink: TextSink, tracks: Sequence[CounterTrack] = ()) -> None:
    """Writes the whole file into the sink: head, counters that are not in the trace, events, Kineto's last member."""
    head = trace.head or {}
    begin_file(head, sink)
    if _of_file(trace):  # otherwise a comma would be the last one
        beside = () if trace.table(COUNTER).origin else hardware_tracks(trace)
        write_counters(chain(beside, tracks), trace, base_ns(head, []), sink)
    write_events(trace, base_ns(head, []), sink)
    end_file(head, sink)


def begin_file(head: Mapping[str, str], sink: TextSink) -> None:
    """Writes the part of the file before the events."""
    sink.text(b"{\n")
    for name, text in head.items():
        if name != _LAST:
            sink.text(_member(name, text) + b",\n")
    sink.text(b'"traceEvents": [\n')


def end_file(head: Mapping[str, str], sink: TextSink) -> None:
    """Writes the part of the file after the events."""
    sink.text(b"]")
    if _LAST in head:
        sink.text(b",\n" + _member(_LAST, head[_LAST]))
    sink.text(b"\n}\n")


def _member(name: str, text: str) -> bytes:
    # HTA finds the rank by a pattern that requires the space after the colon.
    return json.dumps(name).encode() + b": " + text.encode("utf-8", "replace")


def write_rows(trace: Trace, tables: Sequence[Table], base: int, sink: TextSink) -> None:
    """Writes the rows of tables that have origin columns (Table.origin), with a comma after each."""
    writer = _Forms(_Words(trace.strings, tables), base)
    for table in tables:
        form = writer.add(table)
        sink.rows(MixedWriter(writer.forms, form, np.arange(len(table), dtype=np.uint32)), len(table))


def write_events(trace: Trace, base: int, sink: TextSink) -> None:
    """Writes all events in the order of their file, without a comma after the last one."""
    tables = _of_file(trace)
    if not tables:
        return
    writer = _Forms(_Words(trace.strings, tables), base)
    form = np.concatenate([writer.add(table) for table in tables])
    row = np.concatenate([np.arange(len(table), dtype=np.uint32) for table in tables])
    order = np.argsort(np.concatenate([table.origin["place"] for table in tables]), kind="stable")
    form, row = form[order], row[order]
    last = len(order) - 1
    sink.rows(MixedWriter(writer.forms, form[:last], row[:last]), last)
    sink.rows(MixedWriter([_without_comma(writer.forms[form[last]])], np.zeros(1, np.uint32), row[last:]), 1)


def _of_file(trace: Trace) -> list[Table]:
    return [table for table in trace.tables.values() if len(table) and table.origin]


def _without_comma(form: Sequence[Field]) -> Sequence[Field]:
    return [*form[:-1], Field(form[-1].literal.removesuffix(b",\n") + b"\n")]


def _mark(marks: Flags, numbers: AnyArray) -> None:
    same = len(numbers) > 0 and bool((numbers == numbers[0]).all())
    marks[numbers[:1] if same else numbers] = True  # -1 (no string) sets the last mark


def _other_args(table: Table) -> AnyArray:
    return table.columns["inputs"] if "inputs" in table.columns else table.origin["args"]


def _names(table: Table) -> AnyArray:
    """Returns the names as in the file; those of a counter are followed by the unit."""
    return table.origin.get(SHOWN, table.columns["name"])


def _member_id(table: Table) -> AnyArray | None:
    return table.origin.get("id", table.columns["id"]) if table.kind == "flow" else table.origin.get("member_id")


def _argument(members: "_Members", arg: Arg, table: Table) -> None:
    def column(name: str) -> AnyArray:
        found = table.origin.get(name)
        found = table.columns.get(name) if found is None else found
        return table.columns["id"] if found is None else found  # for ops: their external id

    key = b"%s:" % json.dumps(arg.key).encode()
    if arg.type == BOOL:
        members.add(key, TEXT, column(arg.column), _FALSE_TRUE)
    elif arg.type == bits.I32X3:
        x, y, z = (column(name) for name in arg.columns)
        members.add(key + b"[", SIGNED, x)
        members.fields += [Field(b",", SIGNED, y), Field(b",", SIGNED, z)]
        members.pending = b"]"
    elif arg.type == bits.SIGNED_U32:
        members.add(key, SIGNED, np.ascontiguousarray(column(arg.column)).view(np.int32))
    else:
        members.add(key, _OPERATIONS.get(arg.type, SIGNED), column(arg.column))


def folded(fields: Sequence[Field], rows: AnyArray | None = None) -> list[Field]:
    """Returns a form with its constant fields folded, for these rows of the columns (None: all).

    The last field ends the row.
    """
    found: list[Field] = []
    pending = b""
    for field in fields:
        text = _constant(field, rows)
        if text is None:
            found.append(field._replace(literal=pending + field.literal))
            pending = b""
        else:
            pending += field.literal + text
    if pending:
        found.append(Field(pending))
    return found


def _constant(field: Field, rows: AnyArray | None) -> bytes | None:
    """Returns the text of a field that is the same in all rows; None if it varies or its type cannot be folded."""
    column = field.column
    if column is None or field.operation not in (TEXT, SIGNED, UNSIGNED) or not len(column):
        return None
    if rows is None:
        if (column[:_SAMPLE] != column[0]).any() or (column != column[0]).any():
            return None
        value = column[:1]
    else:
        if not len(rows) or (column[rows[:_SAMPLE]] != column[rows[0]]).any():
            return None
        value = column[rows[:1]]
        if (column[rows] != value[0]).any():
            return None
    kind = "i" if field.operation == SIGNED else "u"  # as the native code reads it
    number = int(np.ascontiguousarray(value).view(f"{kind}{value.itemsize}")[0])
    if field.operation != TEXT:
        return b"%d" % number
    if field.texts is None or number >= field.texts.count:
        return b""
    return field.texts.data[int(field.texts.ends[number]) : int(field.texts.ends[number + 1])].tobytes()
