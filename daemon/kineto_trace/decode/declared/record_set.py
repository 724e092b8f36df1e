"""Finds the records in a source's buffers by a declared schema, kind by kind, and counts what cannot be read."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_agent.protocol.schema import HEADED, KIND_U32, MAX_KIND, SIZE_FIELD, Record, Schema

from kineto_trace.arrays import codec, record_walk
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.record_walk import LEAST_RECORD_BYTES, Places, find_records, gather
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import RawSource

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_FRAMINGS = {KIND_U32: record_walk.BY_KIND, HEADED: record_walk.BY_HEAD, SIZE_FIELD: record_walk.BY_SIZE}
_TEXT_KIND = MAX_KIND + 1  # texts that travel with pushed records: the kit has put them into the string table
_SHOWN = 5


@dataclass(slots=True)
class Rows:
    """The records of one kind that could be read, as columns.

    columns: of its activity's table; a decoder may replace them and add others. Empty for records without a type.
    """

    kind: int
    record: Record
    columns: dict[str, Array]
    _data: Bytes
    _begin: Ints

    def __len__(self) -> int:
        return len(self._begin)

    def field(self, name: str) -> Array:
        """Returns the values of a field of the schema: numbers, or bytes without trailing NULs."""
        code, offset = self.record.fields[name]
        dtype = np.dtype("S" + code[:-1] if code.endswith("s") else "<" + code)
        return gather(self._data, self._begin, offset, dtype)

    def keep(self, chosen: Mask) -> None:
        """Leaves out the other records."""
        self._begin = self._begin[chosen]
        self.columns = {name: column[chosen] for name, column in self.columns.items()}


@dataclass(slots=True)
class RecordSet:
    """All records of a source by kind. Declared kinds of which there are no records have rows, too."""

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
            self.warnings.append(counted(records, why))

    def typed(self) -> list[Rows]:
        """Returns the rows of all kinds that belong to an activity type."""
        return [rows for rows in self.rows.values() if rows.record.type]


def counted(records: int, what: str) -> str:
    """Returns "1 record …" or "2 records …"."""
    return f"{records} record {what}" if records == 1 else f"{records} records {what}"


def read_records(source: RawSource, schema: Schema, strings: StringTable) -> RecordSet:
    """Finds all records. Their columns are still empty."""
    found = RecordSet(schema, source, strings)
    data = np.frombuffer(source.data, np.uint8) if source.data.nbytes else np.empty(0, np.uint8)
    sizes = {kind: record.size for kind, record in schema.records.items()}
    if schema.framing == KIND_U32:  # as the collector has seen them: they say where the next record is
        sizes |= {kind: size for kind, size in source.record_bytes.items() if size >= LEAST_RECORD_BYTES}
    buffers = [(chunk.offset, chunk.size) for chunk in source.chunks]
    places, ends = find_records(data, buffers, _FRAMINGS[schema.framing], sizes)
    if schema.framing == HEADED:
        places = _without_texts(places)
    found.records = len(places.kind)
    _count_stops(found, ends)
    for kind, begin in _by_kind(found, places, sizes):
        found.rows[kind] = Rows(kind, schema.records[kind], {}, data, begin)
    return found


def _without_texts(places: Places) -> Places:
    texts = places.kind == _TEXT_KIND
    return Places(*(column[~texts] for column in places)) if texts.any() else places


def _by_kind(found: RecordSet, places: Places, sizes: dict[int, int]) -> Iterator[tuple[int, Ints]]:
    """Yields every declared kind with the places of its records, and counts those that are not to be read."""
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
        found.lose(cut, f"of kind {kind} with less than the {record.size} bytes of the schema")
        yield kind, places.begin[fits]
    if rest.any():
        kinds = unique_values(places.kind[rest]).tolist()
        shown = ", ".join(map(str, kinds[:_SHOWN])) + (", …" if len(kinds) > _SHOWN else "")
        found.lose(int(np.count_nonzero(rest)), f"of kinds that the schema does not declare ({shown})")


def _count_stops(found: RecordSet, ends: list[codec.BufferResult]) -> None:
    """Counts what lies behind the places at which buffers cannot be read any further."""
    stops: dict[str, int] = {}
    smallest = min(record.size for record in found.schema.records.values())
    for chunk, end in zip(found.source.chunks, ends, strict=True):
        if end.status != codec.OK:
            most = max(1, (chunk.size - end.consumed) // smallest)
            found.undecoded += min(max(1, chunk.records - end.records), most)
            what = "a cut record" if end.status == codec.TORN else f"a record of unknown kind {end.kind}"
            stops[what] = stops.get(what, 0) + 1
    found.warnings.extend(
        f"{count} buffers could not be read past {what}" for what, count in list(stops.items())[:_SHOWN]
    )
