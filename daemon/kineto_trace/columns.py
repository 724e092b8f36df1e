"""Stored columns: one Parquet file per kind of activity, and trace.json for what belongs to all of them.

Times, correlations and places are delta-encoded, everything is compressed with zstd at level 1: about eight
bytes an activity, and reading back gives the same arrays. Names are numbers into the strings of the trace.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kineto_trace.errors import SpoolError
from kineto_trace.files import atomic_file, write_atomically
from kineto_trace.model import SCHEMAS, Losses, Table, Trace
from kineto_trace.target import TargetInfo

FORMAT_VERSION = 2  # 2: operators and external ids
TRACE_FILE = "trace.json"
COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1
ROW_GROUP_ROWS = 1 << 20
# Columns that grow steadily or by small steps; the others are dictionary-encoded.
DELTA_COLUMNS = frozenset(
    {"start", "duration", "correlation", "queued", "parent", "bytes", "graph_node_id"}
    | {"id", "external_id", "sequence", "op", "address", "total_allocated"}
)


def save_columns(trace: Trace, directory: Path) -> list[Path]:
    """Writes all tables of a trace, each file as a whole. Returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [_save_table(table, directory / f"{kind}.parquet") for kind, table in trace.tables.items()]
    description = {
        "format_version": FORMAT_VERSION,
        "target": json.loads(trace.target.to_json()),
        "strings": list(trace.strings),
        "tables": list(trace.tables),
        "window_start_ns": trace.window_start_ns,
        "window_end_ns": trace.window_end_ns,
        "devices": [dict(device) for device in trace.devices],
        "versions": dict(trace.versions),
        "losses": asdict(trace.losses),
        "sample_period_ns": trace.sample_period_ns,
    }
    path = directory / TRACE_FILE
    write_atomically(path, json.dumps(description).encode())
    return [*files, path]


def _save_table(table: Table, path: Path) -> Path:
    delta = {name: "DELTA_BINARY_PACKED" for name in table.columns if name in DELTA_COLUMNS}
    with atomic_file(path) as file:
        pq.write_table(
            pa.table({name: pa.array(column) for name, column in table.columns.items()}),
            file,
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=[name for name in table.columns if name not in delta],
            column_encoding=delta,
            row_group_size=ROW_GROUP_ROWS,
        )
    return path


def load_columns(directory: Path) -> Trace:
    """Reads back what save_columns wrote. Raises SpoolError."""
    try:
        values = json.loads((directory / TRACE_FILE).read_bytes())
        if values["format_version"] != FORMAT_VERSION:
            raise SpoolError(
                f"{directory}: columns of format {values['format_version']}, this version reads {FORMAT_VERSION}: "
                "use the kinetod that stored them, or record again"
            )
        tables = {kind: _load_table(kind, directory / f"{kind}.parquet") for kind in values["tables"]}
        return _trace(values, tables)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as exc:
        raise SpoolError(f"cannot read the columns in {directory}: {exc}") from exc


def _load_table(kind: str, path: Path) -> Table:
    stored = pq.read_table(path)
    return Table(kind, {column.name: stored[column.name].to_numpy() for column in SCHEMAS[kind]})


def _trace(values: Mapping[str, Any], tables: Mapping[str, Table]) -> Trace:
    return Trace(
        target=TargetInfo.from_json(json.dumps(values["target"])),
        strings=tuple(values["strings"]),
        tables=tables,
        window_start_ns=values["window_start_ns"],
        window_end_ns=values["window_end_ns"],
        devices=tuple(values["devices"]),
        versions=values["versions"],
        losses=Losses(**values["losses"]),
        sample_period_ns=values["sample_period_ns"],
    )
