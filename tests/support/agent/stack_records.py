"""Recordings of Python stacks made by hand, as a sampler writes them ("python_stacks/2")."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kineto_agent.protocol.records import SPACE_PYTHON_CODE, SPACE_STACK_NODE, SPACE_THREAD_NAME, STACK_SAMPLE
from kineto_trace.spool.raw_records import Chunk, RawSource, RawWriter

from support.trace_files.h200 import string_entry

PERIOD_NS = 10_000_000  # at 100 Hz
UNKNOWN, RUNNING, WAITING, IDLE = range(4)
HAS_GIL = 0x100
_CODE = struct.Struct("<IBII")
_NODE = struct.Struct("<IIi")


class Sample(NamedTuple):
    """One sample of a thread; times in ns."""

    time: int
    thread: int
    node: int
    state: int = RUNNING
    cpu_us: int = 0

    def packed(self) -> bytes:
        """The sample as bytes of a record."""
        return STACK_SAMPLE.pack(*self)


def code(first_line: int, file: str, name: str, *, kind: int = 0, table: bytes = b"") -> bytes:
    """A code object's entry in the string table."""
    texts = file.encode(), name.encode()
    return _CODE.pack(first_line, kind, len(texts[0]), len(texts[1])) + texts[0] + texts[1] + table


def linetable(*lines: int, first_line: int) -> bytes:
    """A line table of CPython 3.10 with one instruction (two bytes) for each of these lines."""
    changes = [line - before for before, line in zip((first_line, *lines), lines, strict=False)]
    return b"".join(struct.pack("<Bb", 2, change) for change in changes)


def node(parent: int, number: int, offset: int = -1) -> bytes:
    """A stack node's entry in the string table."""
    return _NODE.pack(parent, number, offset)


def recording(
    samples: Iterable[Sample],
    *,
    codes: Mapping[int, bytes],
    nodes: Mapping[int, bytes],
    threads: Mapping[int, bytes] | None = None,
    **changes: Any,
) -> RawSource:
    """What the daemon has stored of these samples."""
    data = b"".join(sample.packed() for sample in samples)
    count = len(data) // STACK_SAMPLE.size
    values: dict[str, Any] = {
        "source": "python_stacks",
        "format": "python_stacks/2",
        "metadata": {"hz": 100},
        "record_bytes": {},
        "records": count,
        "dropped": 0,
        "data": memoryview(data),
        "chunks": (Chunk(sequence=0, records=count, offset=0, size=len(data)),),
        "strings": {
            SPACE_PYTHON_CODE: dict(codes),
            SPACE_STACK_NODE: dict(nodes),
            SPACE_THREAD_NAME: dict(threads or {7: b"MainThread"}),
        },
        "torn": 0,
    }
    return RawSource(**{**values, **changes})


def write_recording(target_dir: Path, source: RawSource) -> None:
    """Write the recording into a target's folder, as the daemon does."""
    directory = target_dir / "raw" / source.source
    with RawWriter(directory, source=source.source, format=source.format, metadata=source.metadata) as writer:
        writer.append_buffer(source.data, sequence=0, records=source.records)
        for space, entries in source.strings.items():
            for key, value in entries.items():
                writer.append_strings(string_entry(key, space, value))
        writer.finish(metadata={}, record_bytes={}, records=source.records, dropped=source.dropped)
