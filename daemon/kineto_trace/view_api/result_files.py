"""Answers of analyses as files: CSV, JSON and Parquet.

CSV has a header with the unit of each column unless its name ends in it; a missing value is an empty field, a list is
JSON text. Spreadsheets treat a text that begins with = + - @ as a formula, which may call others: such a text gets an
apostrophe in front, as OWASP advises, unless it is a number; control characters are escaped. JSON and Parquet have
texts unchanged. CSV cannot hold notes. JSON has the notes and the type, unit and meaning of every column beside the
rows. Parquet has them as metadata: `unit` and `meaning` of each column, `view` and `notes` of the file.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.base.visible_text import in_json, visible
from kineto_trace.errors import FormatError
from kineto_trace.view_api.result import Result, ResultColumn

_UNIT_ENDINGS = {"%": "pct", "GB/s": "gb_s"}  # units as spelled in names; others unchanged
_LISTS = ("ints", "texts")
_FORMULA = re.compile(r"[\s]*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")  # also as full-width characters
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def write_result(result: Result, path: Path, format_name: str = "") -> int:
    """Writes one result in this format, by default the one of the suffix of the path.

    Returns the number of bytes written. The file appears completely or not at all. Raises FormatError for a format that
    does not exist, OSError if the path cannot be written.
    """
    name = format_name or path.suffix.removeprefix(".")
    content = FORMATS.get(name)
    if content is None:
        raise FormatError(f"unknown result format {name!r}; available: {', '.join(FORMATS)}")
    data = content(result)
    write_atomically(path, data)
    return len(data)


def csv_bytes(result: Result) -> bytes:
    """Returns the result as CSV in UTF-8, with lines ended by a line feed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_harmless(header(column)) for column in result.columns)
    writer.writerows(zip(*(_csv_values(result, column) for column in result.columns), strict=True))
    return text.getvalue().encode("utf-8", "replace")


def header(column: ResultColumn) -> str:
    """Returns the name of a column, with its unit unless the name ends in it."""
    ending = _UNIT_ENDINGS.get(column.unit, column.unit)
    if not column.unit or column.name == ending or column.name.endswith(f"_{ending}"):
        return column.name
    return f"{column.name} [{column.unit}]"


def _csv_values(result: Result, column: ResultColumn) -> list[Any]:
    values = result.values(column.name)
    if column.type in _LISTS:
        return [None if value is None else in_json(json.dumps(value, ensure_ascii=False)) for value in values]
    if column.type == "bool":
        return [None if value is None else str(value).lower() for value in values]
    if column.type == "text":
        return [None if value is None else _harmless(str(value)) for value in values]
    return values


def _harmless(text: str) -> str:
    """Makes a text safe: not a formula for spreadsheets, and without control characters for terminals."""
    shown = visible(text)
    return f"'{shown}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else shown


def json_value(result: Result) -> dict[str, Any]:
    """Returns the result as plain values. Values that are missing or not finite are None."""
    columns = {column.name: _plain(result.values(column.name), column) for column in result.columns}
    names = list(columns)
    return {
        "view": result.view,
        "columns": [column._asdict() for column in result.columns],
        "notes": list(result.notes),
        "rows": [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)],
    }


def _plain(values: list[Any], column: ResultColumn) -> list[Any]:
    if column.type != "float":
        return values
    return [value if value is None or math.isfinite(value) else None for value in values]


def json_bytes(result: Result) -> bytes:
    """Returns the result as one JSON object with one line per row."""
    value = json_value(result)
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in value.pop("rows"))
    head = json.dumps(value, ensure_ascii=False, indent=1)[:-2]
    return f'{head},\n "rows": [\n{rows}\n]}}\n'.encode("utf-8", "replace")


def parquet_bytes(result: Result) -> bytes:
    """Returns the result as a Parquet file."""
    about = {"view": result.view, "notes": json.dumps(list(result.notes), ensure_ascii=False)}
    table = result.table.replace_schema_metadata({**(result.table.schema.metadata or {}), **about})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


FORMATS: Mapping[str, Callable[[Result], bytes]] = {"csv": csv_bytes, "json": json_bytes, "parquet": parquet_bytes}
