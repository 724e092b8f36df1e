"""Shared memory of a target: a memfd whose content is the input, drained twice."""

import fcntl
import os
from collections.abc import Iterator

from kineto_agent.protocol import arena
from kinetod.captures.target.arena_reader import ArenaReader, BadArena
from support.fuzz.arenas import small_arena

MOST_BYTES = 1 << 22


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


def seeds() -> Iterator[bytes]:
    """One with two full buffers and some strings, and one that is empty."""
    yield small_arena(ready=2)
    yield small_arena(ready=0)
