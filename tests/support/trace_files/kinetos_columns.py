"""A trace that Kineto wrote, as our columns: its GPU rows and calls here, its operators by the daemon's own decoder.

Nothing that Kineto found out about how rows belong together is taken over: external ids are left to our analysis.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from kineto_trace.decode.iterations import whole_extent
from kineto_trace.decode.torch import kineto_json
from kineto_trace.model.activity_tables import NO_PRIORITY
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, StringTable, Table, Trace, make_table
from kineto_trace.open.raw_target import relate
from kineto_trace.spool.raw_records import Chunk, RawSource

Rows = Sequence[Mapping[str, Any]]
# Column of the table -> Kineto's argument
_COMMON = {"correlation": "correlation"}
_GPU = _COMMON | {"device": "device", "context": "context", "stream": "stream"}
_ARGUMENTS = {
    "kernel": _GPU | {"registers": "registers per thread", "dynamic_shared_memory": "shared memory"},
    "gpu_memcpy": _GPU | {"bytes": "bytes"},
    "gpu_memset": _GPU | {"bytes": "bytes"},
    "cuda_runtime": _COMMON | {"cbid": "cbid"},
    "cuda_driver": _COMMON | {"cbid": "cbid"},
}


def source_of(data: bytes, metadata: Mapping[str, Any]) -> RawSource:
    """A file of torch's profiler as the daemon has it, in memory."""
    return RawSource(
        source="torch_ops",
        format=kineto_json.FORMAT,
        metadata=dict(metadata),
        record_bytes={},
        records=0,
        dropped=0,
        data=memoryview(data),
        chunks=(Chunk(sequence=0, records=0, offset=0, size=len(data)),),
        strings={},
        torn=0,
    )


def trace_of(document: Mapping[str, Any]) -> Trace:
    """The trace with everything that the daemon finds out about it."""
    strings = StringTable()
    tables = dict(kineto_json.decode(source_of(json.dumps(document).encode(), {}), strings).tables)
    base = int(document["baseTimeNanoseconds"])
    for kind in (*GPU_TABLES, *API_TABLES):
        rows = [row for row in document["traceEvents"] if row.get("cat") == kind and row["ph"] == "X"]
        tables[kind] = _table(kind, rows, base, strings)
    related = relate(tables, strings)
    start, end = whole_extent(related)
    pid = next(row["pid"] for row in document["traceEvents"] if row.get("cat") == "cpu_op")
    return Trace(
        target=TargetInfo(capture_id="c", host="h", pid=pid, process_name="python3", rank=0, world_size=1),
        strings=tuple(strings.strings),
        tables=related,
        window_start_ns=start,
        window_end_ns=end,
        devices=tuple(document["deviceProperties"]),
    )


def _table(kind: str, rows: Rows, base_ns: int, strings: StringTable) -> Table:
    columns: dict[str, Any] = {
        column: np.array([row["args"].get(argument, 0) for row in rows])
        for column, argument in _ARGUMENTS[kind].items()
    }
    columns["start"] = np.array([round(row["ts"] * 1000) for row in rows], np.int64) + base_ns
    columns["duration"] = np.array([round(row["dur"] * 1000) for row in rows], np.int64)
    columns["name"] = strings.add_all([row["name"] for row in rows])
    if kind in API_TABLES:
        columns["thread"] = np.array([row["tid"] for row in rows])
    if kind == "kernel":
        for what in ("grid", "block"):
            for place, axis in enumerate("xyz"):
                columns[f"{what}_{axis}"] = np.array([row["args"][what][place] for row in rows])
        columns["priority"] = np.full(len(rows), NO_PRIORITY)
    return make_table(kind, len(rows), columns)
