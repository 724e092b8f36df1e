"""A directory of declared records: its schema, its checks, and the reading of its buffers."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from kineto_agent.protocol.schema import HEADED, KIND_U32, MAX_KIND, SIZE_FIELD, Record, Schema

from kineto_trace.arrays import codec
from kineto_trace.arrays.codec import BufferResult, NativeResult, load
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Flags, Ints, UInts8, UInts32
from kineto_trace.base.quantities import times
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import RawSource

Bytes = UInts8
_TEXT_KIND = MAX_KIND + 1  # texts that travel with pushed records: the kit has put them into the string table
_SHOWN = 5
BY_KIND, BY_HEAD, BY_SIZE = range(3)  # framings: KC_BY_…
_FRAMINGS = {KIND_U32: BY_KIND, HEADED: BY_HEAD, SIZE_FIELD: BY_SIZE}
LEAST_RECORD_BYTES = 8  # of a record whose size follows from its kind


@dataclass(slots=True)
class Rows:
    """The readable records of one kind, as columns.

    columns: of its activity's table; a decoder may replace them and add others. Empty for records without a type.
    """

    kind: int
    record: Record
    columns: dict[str, AnyArray]
    _data: Bytes
    _begin: Ints

    def __len__(self) -> int:
        return len(self._begin)

    def field(self, name: str) -> AnyArray:
        """Returns the values of a field of the schema: numbers, or bytes without trailing NULs."""
        code, offset = self.record.fields[name]
        dtype = np.dtype("S" + code[:-1] if code.endswith("s") else "<" + code)
        return gather(self._data, self._begin, offset, dtype)

    def keep(self, chosen: Flags) -> None:
        """Drops the other records."""
        self._begin = self._begin[chosen]
        self.columns = {name: column[chosen] for name, column in self.columns.items()}


@dataclass(slots=True)
class RecordSet:
    """All records of a source by kind. Declared kinds without records have rows, too."""

    schema: Schema
    source: RawSource
    strings: StringTable
    rows: dict[int, Rows] = field(default_factory=dict)
    records: int = 0  # found in the buffers, readable or not
    undecoded: int = 0
    warnings: list[str] = field(default_factory=list)

    def lose(self, records: int, why: str) -> None:
        """Counts records that cannot be decoded. why: which ones, as in "12 records of kind 3 without a time"."""
        if records:
            self.undecoded += records
            self.warnings.append(count_text(records, why))

    def typed(self) -> list[Rows]:
        """Returns the rows of all kinds that belong to an activity type."""
        return [rows for rows in self.rows.values() if rows.record.type]


class _Size(ctypes.Structure):
    _fields_ = codec.members(ctypes.c_uint32, "kind", "record_bytes")


class _Places(ctypes.Structure):
    _fields_ = (("capacity", ctypes.c_uint64), *codec.members(ctypes.c_void_p, "begin", "bytes", "kind"))


class Places(NamedTuple):
    """The records in the order of the buffers. begin: byte offset in the data; bytes: length; kind: of each record."""

    begin: Ints
    bytes: UInts32
    kind: UInts32


def count_text(records: int, what: str) -> str:
    """Returns "1 record …" or "2 records …"."""
    return f"{records} record {what}" if records == 1 else f"{records} records {what}"


def read_records(source: RawSource, schema: Schema, strings: StringTable) -> RecordSet:
    """Finds all records. Their columns are still empty."""
    found = RecordSet(schema, source, strings)
    data = np.frombuffer(source.data, np.uint8) if source.data.nbytes else np.empty(0, np.uint8)
    sizes = {kind: record.size for kind, record in schema.records.items()}
    if schema.framing == KIND_U32:  # sizes as the collector has seen them: they locate the next record
        sizes |= {kind: size for kind, size in source.record_bytes.items() if size >= LEAST_RECORD_BYTES}
    buffers = [(chunk.offset, chunk.size) for chunk in source.chunks]
    places, ends = find_records(data, buffers, _FRAMINGS[schema.framing], sizes)
    if schema.framing == HEADED and (texts := places.kind == _TEXT_KIND).any():
        places = Places(*(column[~texts] for column in places))
    found.records = len(places.kind)
    _count_stops(found, ends)
    for kind, begin in _by_kind(found, places, sizes):
        found.rows[kind] = Rows(kind, schema.records[kind], {}, data, begin)
    return found


def _by_kind(found: RecordSet, places: Places, sizes: dict[int, int]) -> Iterator[tuple[int, Ints]]:
    """Yields every declared kind with the places of its records, and counts records that cannot be read."""
    rest = np.ones(len(places.kind), np.bool_)
    for kind, record in found.schema.records.items():
        chosen = places.kind == kind
        rest &= ~chosen
        if found.schema.framing == KIND_U32 and sizes[kind] != record.size:
            why = f"of kind {kind} with {sizes[kind]} bytes instead of the schema's {record.size}"
            found.lose(int(np.count_nonzero(chosen)), why)
            yield kind, np.empty(0, np.int64)
            continue
        fits = chosen & (places.bytes >= record.size)
        cut = int(np.count_nonzero(chosen)) - int(np.count_nonzero(fits))
        found.lose(cut, f"of kind {kind} with fewer than the schema's {record.size} bytes")
        yield kind, places.begin[fits]
    if rest.any():
        kinds = unique_values(places.kind[rest]).tolist()
        shown = ", ".join(map(str, kinds[:_SHOWN])) + (", …" if len(kinds) > _SHOWN else "")
        found.lose(int(np.count_nonzero(rest)), f"of kinds that the schema does not declare ({shown})")


def _count_stops(found: RecordSet, ends: list[codec.BufferResult]) -> None:
    """Counts the data after the places at which buffers cannot be read any further."""
    stops: dict[str, int] = {}
    smallest = min(record.size for record in found.schema.records.values())
    for chunk, end in zip(found.source.chunks, ends, strict=True):
        if end.status != codec.OK:
            most = max(1, (chunk.size - end.consumed) // smallest)
            found.undecoded += min(max(1, chunk.records - end.records), most)
            what = "a truncated record" if end.status == codec.TORN else f"a record of unknown kind {end.kind}"
            stops[what] = stops.get(what, 0) + 1
    found.warnings.extend(
        f"{times(count, 'buffer')} could not be read past {what}" for what, count in list(stops.items())[:_SHOWN]
    )


def find_records(
    data: Bytes, buffers: Sequence[tuple[int, int]], framing: int, sizes: Mapping[int, int]
) -> tuple[Places, list[BufferResult]]:
    """Finds all records, and returns the outcome for each buffer.

    buffers: byte offset and size in `data` of each.
    sizes: bytes of a record by kind, for BY_KIND.
    """
    for offset, size in buffers:
        if not 0 <= offset <= offset + size <= len(data):
            raise IndexError(f"bytes {offset} to {offset + size} are outside the data")
    native = (_Size * max(1, len(sizes)))(*(_Size(kind, sizes[kind]) for kind in sorted(sizes)))
    counted = [_walk(data[at : at + size], framing, native, len(sizes), None) for at, size in buffers]
    total = sum(each.records for each in counted)
    found = Places(np.empty(total, np.int64), np.empty(total, np.uint32), np.empty(total, np.uint32))
    first = 0
    for (at, size), each in zip(buffers, counted, strict=True):
        rows = slice(first, first + each.records)
        part = Places(found.begin[rows], found.bytes[rows], found.kind[rows])
        room = _Places(each.records, *(array.ctypes.data for array in part))
        _walk(data[at : at + size], framing, native, len(sizes), room)
        np.add(part.begin, at, out=part.begin)
        first += each.records
    return found, counted


def _walk(data: Bytes, framing: int, sizes: Any, count: int, places: _Places | None) -> BufferResult:
    result = NativeResult()
    room = None if places is None else ctypes.byref(places)
    load().kc_walk(data.ctypes.data, data.nbytes, framing, sizes, count, room, ctypes.byref(result))
    return BufferResult(result.consumed, result.records, result.status, result.kind)


def gather(data: Bytes, begin: Ints, offset: int, dtype: np.dtype[Any]) -> AnyArray:
    """Returns the value of one field of each record: `dtype` at byte `offset` of the records that begin there."""
    if not len(begin):
        return np.empty(0, dtype)
    if int(begin.min()) + offset < 0 or int(begin.max()) + offset + dtype.itemsize > len(data):
        raise IndexError(f"a field of {dtype.itemsize} bytes at byte {offset} is outside the data")
    # Every byte is the beginning of a value: the values overlap, and are not aligned.
    values = np.ndarray((len(data) - dtype.itemsize + 1 - offset,), dtype, data, offset, (1,))
    return values[begin]
