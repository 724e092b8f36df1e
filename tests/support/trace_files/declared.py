"""Records of a declared accelerator as bytes, and whole targets with them."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kineto_agent.protocol.records import DECLARED_FORMAT
from kineto_agent.protocol.schema import HEADED, SCHEMA_KEY, SIZE_FIELD, Schema, to_json
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import Chunk, RawSource, RawWriter, parse_strings

from support.accelerators.npu import NAMES, NPU
from support.trace_files.h200 import string_entry

BASE = 1_790_000_000_000_000_000  # Unix ns


def sized(schema: Schema) -> Schema:
    """Returns the schema for records that begin with their size and kind."""
    records = {
        kind: record._replace(
            size=record.size + 16,
            fields={name: (code, offset + 16) for name, (code, offset) in record.fields.items() if name != "kind"},
        )
        for kind, record in schema.records.items()
    }
    return schema._replace(framing=SIZE_FIELD, records=records)


def packed(schema: Schema, kind: int, **values: Any) -> bytes:
    """Returns one record with these values of fields, the others 0, framed as the schema says."""
    record = schema.records[kind]
    raw = bytearray(record.size)
    if "kind" in record.fields and schema.framing != SIZE_FIELD:
        values = {"kind": kind, **values}
    for name, value in values.items():
        code, offset = record.fields[name]
        struct.pack_into("<" + code, raw, offset, value)
    return framed(schema, kind, bytes(raw))


def framed(schema: Schema, kind: int, record: bytes) -> bytes:
    """Returns the bytes of a record as they lie in a buffer."""
    padded = record + bytes(-len(record) % 8)
    if schema.framing == HEADED:
        return struct.pack("<II", kind, 8 + len(padded)) + padded
    if schema.framing == SIZE_FIELD:
        return struct.pack("<QI", len(record), kind) + padded[12:]
    return record


def a_record_of_each_kind(schema: Schema) -> bytes:
    """Returns a buffer; a reading of the clock DEVICE says that it shows Unix ns."""
    return b"".join(
        (
            packed(schema, 9, ticks=BASE, unix=BASE),
            packed(schema, 1, start=BASE + 5, end=BASE + 9, symbol=1, queue=1 << 40, unit=1, grid_x=3),
            packed(schema, 3, begin=BASE + 1, took=3, fn=1, tid=5, id=1),
            packed(schema, 2, start=BASE + 1, end=BASE + 5, why=1, label=b"input", load=12.5),
            packed(schema, 4, at=BASE + 9, by=5),
        )
    )


def source_of(
    schema: Schema,
    buffers: Iterable[bytes],
    *,
    strings: Mapping[tuple[int, int], bytes] = {},
    record_bytes: Mapping[int, int] = {},
    counts: Mapping[int, int] = {},
    **metadata: Any,
) -> RawSource:
    """Returns a source with these buffers. strings: by space and key; counts: records that buffers claim to have."""
    parts = list(buffers)
    entries = b"".join(string_entry(key, space, text) for (space, key), text in strings.items())
    chunks, at = [], 0
    for number, part in enumerate(parts):
        chunks.append(Chunk(sequence=number, records=counts.get(number, 1), offset=at, size=len(part)))
        at += len(part)
    return RawSource(
        source="npu",
        format=DECLARED_FORMAT,
        metadata={SCHEMA_KEY: to_json(schema), **metadata},
        record_bytes=dict(record_bytes),
        records=len(parts),
        dropped=0,
        data=memoryview(b"".join(parts)),
        chunks=tuple(chunks),
        strings=parse_strings(entries)[0],
        torn=0,
    )


def texts(strings: Any, numbers: Any) -> list[str]:
    """Returns the texts of a column of numbers."""
    return [strings[number] for number in numbers.tolist()]


def write_target(directory: Path, *, schema: Schema = NPU, rank: int = 0, source: str = "npu") -> Path:
    """Writes a target with two launches, their kernels, a wait on the second one's queue, and a mark."""
    calls = [packed(schema, 3, begin=BASE + 1000 * n, took=300, fn=1, tid=77, id=n) for n in (1, 2)]
    kernels = [
        packed(schema, 1, start=BASE + 1000 * n + 500, end=BASE + 1000 * n + 900, symbol=n, correlation=n, queue=n)
        for n in (1, 2)
    ]
    waits = [
        packed(schema, 2, start=BASE + 1600, end=BASE + 1700, why=1, label=b'first "batch"', load=12.5),
        packed(schema, 2, start=BASE + 1800, end=BASE + 1900, why=9, label=b"", load=float("nan")),
    ]
    marks = [packed(schema, 4, at=BASE + 1100, by=77)]
    records = [*calls, *kernels, *waits, *marks]
    metadata = {SCHEMA_KEY: to_json(schema), "devices": [{"id": 0, "name": "NPU 9000"}]}
    with RawWriter(directory / "raw" / source, source=source, format=DECLARED_FORMAT, metadata=metadata) as writer:
        writer.append_buffer(b"".join(records), sequence=0, records=len(records))
        writer.append_strings(string_entry(1, NAMES, b"_Z3addPf") + string_entry(2, NAMES, b"mul"))
        writer.finish(metadata={}, record_bytes={}, records=len(records), dropped=0)
    TargetInfo(
        capture_id="cap-1", host="npu-host", pid=4000, process_name="python3", rank=rank, world_size=2,
        window_start_ns=BASE, window_end_ns=BASE + 10_000, threads={77: "MainThread"}, complete=True,
    ).write(directory)  # fmt: skip
    return directory
