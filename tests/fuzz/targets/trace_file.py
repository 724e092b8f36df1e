"""A file that somebody calls a trace, opened as `kinetoctl` does: JSON, Perfetto's protobuf, gzip, zstd."""

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kineto_trace.errors import TraceError
from kineto_trace.open.trace_opener import open_trace
from support.counters.trace_samples import as_chrome, hostile_samples
from support.trace_files.h200 import recording
from support.trace_files.perfetto_traces.samples import SMALL, foreign, written
from support.trace_files.traces import trace

_file = Path(tempfile.mkdtemp(prefix="fuzz-trace-")) / "trace.json"


def play(data: bytes) -> None:
    _file.write_bytes(data)
    try:
        found = open_trace(_file)
        for table in found.tables.values():
            assert all(len(column) == len(table) for column in table.columns.values())
    except TraceError:
        return


def seeds() -> Iterator[bytes]:
    """One of each form."""
    kineto = recording("mlp-cupti130001").kineto
    rows = {str(row.get("cat")): row for row in kineto["traceEvents"]}
    document = json.dumps({**kineto, "traceEvents": list(rows.values())}).encode()
    yield document[:6000]
    yield gzip.compress(document, mtime=0)[:3000]
    yield foreign()
    yield written(trace(SMALL))[:4000]
    yield gzip.compress(foreign(), mtime=0)
    counters = trace({"counter": hostile_samples()})
    yield as_chrome(counters)
    yield written(counters)
