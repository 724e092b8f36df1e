"""Small traces made by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import StringTable, Table, Trace, make_table

START_NS = 1_795_163_478_000_000_000
BASE_NS = 1_790_857_026_000_000_000  # of START_NS

H100 = {  # properties that occupancy needs
    "id": 0,
    "numSms": 132,
    "warpSize": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerBlock": 65536,
    "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 233472,
    "computeMajor": 9,
    "computeMinor": 0,
}


def target(**changes: Any) -> TargetInfo:
    values: dict[str, Any] = {"capture_id": "cap", "host": "host", "pid": 4242, "process_name": "python"}
    return TargetInfo(**{**values, **changes})


def table(kind: str, rows: Sequence[Mapping[str, Any]], strings: StringTable) -> Table:
    """One row per dictionary; "name" is a text, "start" is relative to START_NS; what is missing is 0.

    "inputs", "lines", "callees", "hlo", "metric" and "unit" may be texts.
    """
    columns: dict[str, Any] = {}
    for column in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(column, 0) for row in rows]
        if column == "name":
            columns[column] = strings.add_all([str(value) for value in values])
        elif column in ("inputs", "lines", "callees", "hlo", "metric", "unit") and any(
            isinstance(value, str) for value in values
        ):
            columns[column] = np.array([strings.add(value) if value else -1 for value in values])
        elif column == "start":
            columns[column] = np.array(values, np.int64) + START_NS
        else:
            columns[column] = np.array(values)
    return make_table(kind, len(rows), columns)


def trace(rows: Mapping[str, Sequence[Mapping[str, Any]]], *, length_ns: int = 1_000_000, **changes: Any) -> Trace:
    """A trace whose window begins at START_NS."""
    strings = StringTable()
    tables = {kind: table(kind, entries, strings) for kind, entries in rows.items()}
    values: dict[str, Any] = {
        "target": target(),
        "strings": tuple(strings.strings),
        "tables": tables,
        "window_start_ns": START_NS,
        "window_end_ns": START_NS + length_ns,
    }
    return Trace(**{**values, **changes})
