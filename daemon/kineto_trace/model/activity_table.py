"""What the declaration of one table of a trace consists of."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from kineto_agent.protocol.schema import RESERVED_COLUMNS, TRACKS

from kineto_trace.model.event_kinds import Arg


class Column(NamedTuple):
    """One column of a table. text: its values are numbers into Trace.strings; -1: none."""

    name: str
    dtype: str
    meaning: str
    text: bool = False


class ViewerRow(Enum):
    """Where a viewer shows the activities of a table."""

    OPERATOR = auto()  # on their thread: they have ids, and contain what happens inside them
    ANNOTATION = auto()  # around the GPU work on the row of a stream
    GPU = auto()  # GPU work, on the row of its stream
    PYTHON = auto()  # on their thread
    OVERHEAD = auto()  # on a row of the profiler's own
    SYNC = auto()  # on a row beside that of the stream
    CALL = auto()  # on their thread: they cause GPU work
    MEMORY = auto()  # on their thread, without duration
    FILE = auto()  # where the file has them; only in traces that were read from a file
    NONE = auto()  # nowhere: they have no time
    COUNTER = auto()  # as a value over time, beside the streams of their GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityTable:
    """One table, named after its category in Kineto's traces.

    categories: lower-case categories of the complete events that are read into it; *_text: all categories with this
    ending. A category belongs to the first table that names it, in the order of ViewerRow.
    """

    name: str
    row: ViewerRow
    meaning: str
    columns: tuple[Column, ...]
    arguments: tuple[Arg, ...] = ()
    categories: tuple[str, ...] = ()


# ------------------------------------------------------------ tables of activity types that a trace declares itself

OWN_ROWS = (ViewerRow.GPU, ViewerRow.CALL)
OWN_NAME = re.compile(r"[a-z][a-z0-9]*_[a-z0-9_]{1,62}")
LEAST_COLUMNS = {
    "start": "int64",
    "duration": "int64",
    "name": "int32",
    "correlation": "uint32",
    "external_id": "int64",
}
ROW_COLUMNS = {
    ViewerRow.GPU: {**LEAST_COLUMNS, "device": "uint32", "context": "uint32", "stream": "uint32"},
    ViewerRow.CALL: {**LEAST_COLUMNS, "thread": "uint32"},
}
# What queries add to each table. Columns of the other track are forbidden to plug-ins only: rocm_memory has a device.
_ADDED_COLUMNS = RESERVED_COLUMNS.difference(*TRACKS.values())
_NO_ARGUMENTS = frozenset(("start", "duration", "name", "thread", "external_id"))
_COLUMN = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DTYPE = re.compile(r"u?int(8|16|32|64)|float64")
_MAX_MEANING = 400


def arguments_of(table: ActivityTable) -> tuple[Column, ...]:
    """Returns the columns of such a table that are arguments of its rows in files."""
    return tuple(column for column in table.columns if column.name not in _NO_ARGUMENTS)


def vendor_columns(table: ActivityTable) -> frozenset[str]:
    """Returns the columns of such a table that the vendor has declared: the names say nothing of what they mean."""
    return frozenset(column.name for column in table.columns) - ROW_COLUMNS[table.row].keys()


def declared_to_json(table: ActivityTable) -> dict[str, Any]:
    """Returns the declaration of a table for json.dumps."""
    columns = [column._asdict() for column in table.columns]
    return {"row": table.row.name, "meaning": table.meaning, "columns": columns}


def declared_from_json(name: str, value: Any) -> ActivityTable:
    """Returns what declared_to_json made of the table of this name, checked. Raises ValueError."""
    _need(OWN_NAME.fullmatch(name) is not None, f"{name!r:.80} is not a name of an activity type")
    _need(isinstance(value, Mapping), "it is no object")
    row = {row.name: row for row in OWN_ROWS}.get(value.get("row"))
    _need(row is not None and _is_meaning(value.get("meaning")), "row or meaning")
    entries = value.get("columns")
    _need(isinstance(entries, list) and all(_is_column(entry) for entry in entries), "columns")
    columns = tuple(Column(**entry) for entry in entries)
    types = {column.name: column.dtype for column in columns}
    assert row is not None
    _need(not types.keys() & _ADDED_COLUMNS, "columns")
    _need(len(types) == len(columns) and ROW_COLUMNS[row].items() <= types.items(), "columns")
    _need(next(column for column in columns if column.name == "name").text, "columns")
    return ActivityTable(name=name, row=row, meaning=value["meaning"], columns=columns)


def _is_column(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or set(entry) != set(Column._fields):
        return False
    name, dtype, meaning, text = (entry[field] for field in Column._fields)
    return (
        isinstance(name, str)
        and _COLUMN.fullmatch(name) is not None
        and isinstance(dtype, str)
        and _DTYPE.fullmatch(dtype) is not None
        and _is_meaning(meaning)
        and isinstance(text, bool)
        and (not text or dtype == "int32")
    )


def _is_meaning(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= _MAX_MEANING and text.isprintable()


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"the declaration of its columns has an invalid value: {what}")
