"""The tables that a schema declares: Kineto's with the vendor's values, and those of its own activity types."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_agent.protocol.schema import DEVICE_TRACK, DTYPES, THREAD_TRACK, TRACKS, Activity, Schema

from kineto_trace.model.activity_table import ActivityTable, Column, ViewerRow
from kineto_trace.model.activity_tables import NO_PRIORITY
from kineto_trace.model.trace import NO_STRING, SCHEMAS, UNKNOWN_STREAM, Table, make_table

Columns = dict[str, npt.NDArray[Any]]
_TRACK_COLUMNS = {
    "start": Column("start", "int64", "Unix ns"),
    "duration": Column("duration", "int64", "ns"),
    "name": Column("name", "int32", "its name", text=True),
    "thread": Column("thread", "uint32", "system thread id"),
    "device": Column("device", "uint32", "device index"),
    "context": Column("context", "uint32", "context id"),
    "stream": Column("stream", "uint32", "stream or queue"),
    "correlation": Column("correlation", "uint32", "joins calls with the activities that they caused"),
    "external_id": Column("external_id", "int64", "id of the innermost op or annotation around it; 0: none"),
}
_ROWS = {DEVICE_TRACK: ViewerRow.GPU, THREAD_TRACK: ViewerRow.CALL}
_NUMPY = {
    "i8": "int8", "u8": "uint8", "i16": "int16", "u16": "uint16", "i32": "int32", "u32": "uint32", "i64": "int64",
    "u64": "uint64", "f64": "float64", "text": "int32",
}  # fmt: skip
assert tuple(_NUMPY) == DTYPES
# Values of columns of Kineto's tables for which the records have no field, where that is not 0.
_ABSENT: Mapping[tuple[str, str], int] = {
    ("kernel", "priority"): NO_PRIORITY,
    ("cuda_sync", "device"): -1,
    ("cuda_sync", "stream"): UNKNOWN_STREAM,
    ("cuda_sync", "wait_on_stream"): -1,
    ("cuda_sync", "wait_on_correlation"): -1,
}


def own_table(name: str, activity: Activity) -> ActivityTable:
    """Returns the declaration of the table of an activity type of the schema's own."""
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
    """Returns the table of these pieces, one for each kind of record; a column that a piece lacks has its default."""
    joined: Columns = {}
    rows = sum(len(piece["start"]) for piece in pieces)
    for column in SCHEMAS[kind] if declared is None else declared.columns:
        absent = _ABSENT.get((kind, column.name), NO_STRING if column.text else 0)
        parts = [_fitting(piece, column, absent) for piece in pieces]
        joined[column.name] = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, column.dtype), *parts])
    return make_table(kind, rows, joined, declared=declared)


def _fitting(piece: Columns, column: Column, absent: int) -> npt.NDArray[Any]:
    dtype = np.dtype(column.dtype)
    values = piece.get(column.name)
    if values is None:
        return np.full(len(piece["start"]), absent).astype(dtype)
    return values.astype(dtype, copy=False)
