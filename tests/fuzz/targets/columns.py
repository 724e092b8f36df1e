"""A stored trace that somebody else has made: trace.json, three tables and the texts; all of it is read."""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from kineto_trace.errors import SpoolError
from kineto_trace.store.parquet_folder import load_columns, save_columns
from support.counters.trace_samples import hostile_samples
from support.trace_files.perfetto_traces.samples import SMALL
from support.trace_files.traces import trace

from fuzz import mutate
from fuzz.parts import changed_json, joined, parted

FILES = ("trace.json", "kernel.parquet", "cpu_op.parquet", "strings.parquet", "counter.parquet")
MOST_ROWS = 100_000  # a file may claim as many as it likes; how much memory reading them takes is not promised
_folder = Path(tempfile.mkdtemp(prefix="fuzz-columns-"))


def play(data: bytes) -> None:
    for name, content in zip(FILES, parted(data, len(FILES)), strict=True):
        (_folder / name).write_bytes(content)
    if _claims_too_much():
        return
    try:
        found = load_columns(_folder)
        for table in found.tables.values():
            for columns in (table.columns, table.origin):
                for name in columns:
                    assert isinstance(columns[name], np.ndarray) and len(columns[name]) == len(table)
        assert all(isinstance(text, str) for text in found.strings)
    except SpoolError:
        return


def _claims_too_much() -> bool:
    try:
        document = json.loads((_folder / FILES[0]).read_bytes())
        claims = [document["strings"]["count"], *(entry["rows"] for entry in document["tables"].values())]
        return any(claim > MOST_ROWS for claim in claims)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def mutated(data: bytes, rng: random.Random) -> bytes:
    """What trace.json says, or bytes of another file."""
    parts = parted(data, len(FILES))
    at = rng.choice((0, 0, 1, 2, 3, 4))
    parts[at] = mutate.damaged(parts[at], rng) if at else changed_json(parts[at], rng)
    return joined(*parts)


def seeds() -> Iterator[bytes]:
    """One with all files, one with the older way to keep texts."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-columns-seed-"))
    tables = {name: SMALL[name] for name in ("kernel", "cpu_op")} | {"counter": hostile_samples()}
    save_columns(trace(tables), folder)
    contents = [(folder / name).read_bytes() if (folder / name).exists() else b"" for name in FILES]
    yield joined(*contents)
    document = json.loads(contents[0])
    document |= {"format_version": 2, "strings": ["a", "b"], "tables": list(document["tables"])}
    yield joined(json.dumps(document).encode(), *contents[1:])
