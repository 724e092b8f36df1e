"""Shared memory of a target: a memfd whose content is the input, drained twice."""

import fcntl
import os
import struct
from collections.abc import Iterator

from kineto_agent.protocol import arena
from kinetod.captures.target.record_spool import ArenaReader, BadArena

MOST_BYTES = 1 << 22
BUFFERS, BUFFER_BYTES, STRINGS_BYTES = 3, 512, 256


class Sink:
    def __init__(self) -> None:
        self.bytes = 0

    def append_buffer(self, data: memoryview, *, sequence: int, records: int) -> None:
        assert 0 <= sequence < 1 << 63 and 0 <= records <= len(data)
        self.bytes += len(bytes(data))

    def append_strings(self, data: memoryview) -> None:
        self.bytes += len(bytes(data))


def play(data: bytes) -> None:
    fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, data)
    os.ftruncate(fd, max(len(data), arena.HEADER_BYTES))
    fcntl.fcntl(fd, 1033, 0x2 | 0x4)  # F_ADD_SEALS: no shrinking, no growing
    try:
        reader = ArenaReader(fd, max_buffer_bytes=MOST_BYTES)
    except BadArena:
        return
    try:
        sink = Sink()
        reader.counts(), reader.record_bytes(), reader.clocks()
        drained = reader.drain(sink) + reader.drain(sink, target_is_dead=True)
        assert sink.bytes == drained
        assert reader.drain(Sink()) == 0
    finally:
        reader.close()


def small_arena(*, ready: int) -> bytes:
    """So many of its buffers are READY and full; its string table is half full."""
    strings_at = arena.HEADER_BYTES + BUFFERS * arena.DESCRIPTOR_BYTES
    strings_at += -strings_at % 8
    buffers_at = strings_at + STRINGS_BYTES
    total = buffers_at + BUFFERS * BUFFER_BYTES
    data = bytearray(total)
    fixed = {
        "magic": arena.MAGIC, "header_bytes": arena.HEADER_BYTES, "buffer_count": BUFFERS,
        "buffer_bytes": BUFFER_BYTES, "descriptors_offset": arena.HEADER_BYTES, "strings_offset": strings_at,
        "strings_bytes": STRINGS_BYTES, "buffers_offset": buffers_at, "total_bytes": total,
    }  # fmt: skip
    arena.FIXED.pack_into(data, 0, *(fixed[name] for name in arena.FIXED_FIELDS))
    struct.pack_into("<Q", data, arena.STRINGS_USED, STRINGS_BYTES // 2)
    for index in range(ready):
        at = arena.HEADER_BYTES + index * arena.DESCRIPTOR_BYTES
        struct.pack_into("<Q", data, at + arena.BUFFER_VALID_BYTES, BUFFER_BYTES)
        struct.pack_into("<Q", data, at + arena.BUFFER_SEQUENCE, index)
        struct.pack_into("<I", data, at, arena.READY)
    return bytes(data)


def seeds() -> Iterator[bytes]:
    """One with two full buffers and some strings, and one that is empty."""
    yield small_arena(ready=2)
    yield small_arena(ready=0)
