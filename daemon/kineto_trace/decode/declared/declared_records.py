"""Decodes records by a declared schema (kineto_agent.protocol.schema): "declared/1", and the library for vendors.

Theory of operation
    The native library finds where each record begins, by the schema's framing. Everything else is done to whole
    columns: of each kind of record, fields are gathered, times converted to Unix ns, texts numbered and handles of
    streams and contexts made small; then the kinds of one activity type become one table.

    A vendor's decoder is a schema for the library's version, and what no schema can say: it calls decode_records with a
    function that changes the columns of each kind (Rows.columns) and may use any field of the records (Rows.field).

    The schema may come from the target, as the records do. Nothing in either is believed: no count, length, time or
    number of a text makes this code read outside a buffer, take memory out of proportion, or fail. What cannot be read
    is counted as undecoded, and a warning says why.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from kineto_agent.protocol.records import DECLARED_FORMAT
from kineto_agent.protocol.schema import ROLES, SCHEMA_KEY, Schema, from_json

from kineto_trace.arrays.codec import Interner
from kineto_trace.decode.declared.declared_tables import Columns, join_columns, schema_tables
from kineto_trace.decode.declared.record_set import Array, RecordSet, Rows, read_records
from kineto_trace.decode.declared.record_texts import texts_of
from kineto_trace.decode.declared.record_times import Clocks, fill_times
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.model.trace import UNKNOWN_STREAM, StringTable
from kineto_trace.spool.raw_records import RawSource

FORMAT = DECLARED_FORMAT
_HANDLES = ("device", "context", "stream")
_LARGEST_PLAIN = (1 << 19) - 1  # larger values of these are handles: rows of viewers have numbers below a million

Amend = Callable[[RecordSet], None]


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
    """Decodes all buffers of a source by a schema that has been checked; texts go into `strings`.

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
    """Adds the columns that the schema maps fields to. Handles still have their own values."""
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
    """Makes the values of a role small, in all kinds of records alike."""
    having = [rows for rows in found.typed() if role in rows.columns]
    for rows, numbers in zip(having, small_numbers([rows.columns[role] for rows in having]), strict=True):
        rows.columns[role] = numbers


def small_numbers(columns: Sequence[Array]) -> Sequence[Array]:
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
    """The number with all bits set, as int64 holds it."""
    return -1 if dtype.kind == "i" or dtype.itemsize == 8 else int(np.iinfo(dtype).max)
