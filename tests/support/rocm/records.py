"""Records of rocprofiler-sdk and of HIP's calls as bytes, as the collector writes them."""

import struct
from collections.abc import Iterable, Mapping
from typing import Any

from fuzz import records
from kineto_agent.protocol.records import CLOCK_PAIR, ROCPROFILER_FORMAT, SPACE_CLOCK_PAIR
from kineto_trace.decode import rocprofiler_records as kinds
from kineto_trace.spool.raw_records import Chunk, RawSource, parse_strings

from support.trace_files.h200 import string_entry

UNIX = 1_790_000_000_000_000_000  # ns, when CLOCK_BOOTTIME shows BOOT
BOOT = 5_000_000_000_000
SECOND = 1_000_000_000
HOST, GPU, OTHER_GPU = 11, 21, 22  # agent ids
AGENTS = [{"id": HOST, "gpu": 0, "ordinal": 0}, {"id": GPU, "gpu": 1, "ordinal": 0},
          {"id": OTHER_GPU, "gpu": 1, "ordinal": 1}]  # fmt: skip
LAUNCH, COPY, REGISTER = 308, 268, 3
AXPY, SUM = 0xA, 0xB  # keys of function names
TEXTS: Mapping[tuple[int, int], bytes] = {
    (kinds.SPACE_KERNEL, 7): b"_Z4axpyPfS_f.kd",
    (kinds.SPACE_FUNCTION, AXPY): b"_Z4axpyPfS_f",
    (kinds.SPACE_FUNCTION, SUM): b"_Z3sumPKfPfi",
    (kinds.SPACE_OPERATION, kinds.HIP_RUNTIME_CALL << 32 | LAUNCH): b"hipModuleLaunchKernel",
    (kinds.SPACE_OPERATION, kinds.HIP_COMPILER_CALL << 32 | REGISTER): b"__hipRegisterFunction",
    (kinds.SPACE_OPERATION, kinds.HSA_CORE << 32 | 2): b"hsa_memory_allocate",
    (SPACE_CLOCK_PAIR, UNIX): CLOCK_PAIR.pack(BOOT),
    (SPACE_CLOCK_PAIR, UNIX + 10 * SECOND): CLOCK_PAIR.pack(BOOT + 10 * SECOND),
}


def packed(kind: int, *, size: int = 0, **values: int) -> bytes:
    """One record with these values of fields, the others 0, behind its header. size: in bytes; 0: the usual one."""
    record = kinds.SCHEMA.records[kind]
    raw = bytearray(size or record.size)
    if "size" in record.fields:
        values = {"size": len(raw), "kind": kind, **values}
    for name, value in values.items():
        code, offset = record.fields[name]
        struct.pack_into("<" + code, raw, offset, value)
    return struct.pack("<II", kind, 8 + len(raw)) + bytes(raw)


def dispatch(at: int = 100, *, kernel_id: int = 7, correlation: int = 1, length: int = 50, **values: int) -> bytes:
    """A kernel of 2 x 3 blocks of 64 threads that begins `at` ns after BOOT."""
    shape = {"block_x": 64, "block_y": 1, "block_z": 1, "items_x": 128, "items_y": 3, "items_z": 1}
    times = {"start": BOOT + at, "end": BOOT + at + length}
    own = {"agent": GPU, "queue": 0x9000, "kernel_id": kernel_id, "correlation": correlation, "group_bytes": 512}
    return packed(kinds.KERNEL_DISPATCH, **{**shape, **times, **own, **values})


def call(at: int = 50, *, correlation: int = 1, **values: int) -> bytes:
    """A launch of a kernel that takes 20 ns."""
    own = {"start": BOOT + at, "end": BOOT + at + 20, "correlation": correlation, "thread": 77, "operation": LAUNCH}
    return packed(kinds.HIP_RUNTIME_CALL, **{**own, **values})


def copy(operation: int, source: int, destination: int, *, at: int = 200, correlation: int = 2) -> bytes:
    """A copy of 4 KiB that takes 30 ns."""
    return packed(
        kinds.MEMORY_COPY, start=BOOT + at, end=BOOT + at + 30, operation=operation, source=source,
        destination=destination, bytes=4096, correlation=correlation,
    )  # fmt: skip


def one_of_each() -> bytes:
    """A buffer with a record of each kind."""
    span = {"start": BOOT + 10, "end": BOOT + 20, "correlation": 9}
    return b"".join(
        (
            call(stream=0x100, function=AXPY),
            dispatch(),
            copy(2, HOST, GPU),
            packed(kinds.HIP_COMPILER_CALL, **span, thread=77, operation=REGISTER),
            packed(kinds.HSA_CORE, **span, thread=77, operation=2),
            packed(kinds.HSA_AMD_EXT, **span, thread=77, operation=3),
            packed(kinds.MEMORY_ALLOCATION, **span, thread=77, agent=GPU, address=0x7000, bytes=1 << 20, operation=1),
            packed(kinds.SCRATCH_MEMORY, **span, thread=77, agent=GPU, queue=0x9000, bytes=64, flags=1, operation=2),
        )
    )


def source_of(buffers: Iterable[bytes], texts: Mapping[tuple[int, int], bytes] = TEXTS, **metadata: Any) -> RawSource:
    """A source with these buffers."""
    parts = list(buffers)
    chunks, at = [], 0
    for number, part in enumerate(parts):
        chunks.append(Chunk(sequence=number, records=1, offset=at, size=len(part)))
        at += len(part)
    return RawSource(
        source="rocprofiler",
        format=ROCPROFILER_FORMAT,
        metadata={"rocprofiler_version": 10305, "agents": AGENTS, **metadata},
        record_bytes={},
        records=len(parts),
        dropped=0,
        data=memoryview(b"".join(parts)),
        chunks=tuple(chunks),
        strings=parse_strings(string_table(texts))[0],
        torn=0,
    )


def string_table(texts: Mapping[tuple[int, int], bytes] = TEXTS) -> bytes:
    """The entries of a string table, by space and key."""
    return b"".join(string_entry(key, space, text) for (space, key), text in texts.items())


def fuzz_source() -> records.Source:
    """The same for the fuzzing targets."""
    return records.Source(
        name="rocprofiler", format=ROCPROFILER_FORMAT,
        metadata={"rocprofiler_version": 10305, "agents": AGENTS, "activity_types": ["kernel"]}, record_bytes={},
        buffers=(one_of_each(),), strings=string_table(),
    )  # fmt: skip
