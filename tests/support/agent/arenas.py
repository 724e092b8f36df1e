"""A daemon's view of an arena: its own mapping, READY buffers, strings."""

from __future__ import annotations  # the agent's tests run under 3.9

import mmap
import os
import struct
import threading
from collections import Counter
from types import TracebackType
from typing import NamedTuple

from kineto_agent.protocol import arena
from kineto_agent.protocol.records import SPACE_CLOCK_PAIR

_KIND = struct.Struct("<I")


class Buffer(NamedTuple):
    """One READY buffer, copied."""

    slot: int
    sequence: int
    records: int
    data: bytes


class ArenaReader:
    """Maps an arena by descriptor (which it duplicates, as passing over a socket would)."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self.size = os.fstat(self._fd).st_size
        self.map = mmap.mmap(self._fd, self.size)
        self.fixed = dict(zip(arena.FIXED_FIELDS, arena.FIXED.unpack_from(self.map)))

    def __enter__(self) -> ArenaReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.map.close()
        os.close(self._fd)

    def word(self, offset: int) -> int:
        """A u64 of the header."""
        return int.from_bytes(self.map[offset : offset + 8], "little")

    def descriptor(self, index: int) -> int:
        """Offset of a buffer's descriptor."""
        return int(self.fixed["descriptors_offset"] + index * arena.DESCRIPTOR_BYTES)

    def state(self, index: int) -> int:
        """State of a buffer: FREE, LOANED, COMPLETED or READY."""
        return int.from_bytes(self.map[self.descriptor(index) : self.descriptor(index) + 4], "little")

    def states(self) -> list[int]:
        """State of each buffer."""
        return [self.state(index) for index in range(self.fixed["buffer_count"])]

    def ready(self) -> list[Buffer]:
        """READY buffers in order of their sequence numbers."""
        found = []
        for index, state in enumerate(self.states()):
            if state != arena.READY:
                continue
            at = self.descriptor(index)
            valid, sequence, records = struct.unpack_from("<QQQ", self.map, at + arena.BUFFER_VALID_BYTES)
            start = self.fixed["buffers_offset"] + index * self.fixed["buffer_bytes"]
            found.append(Buffer(index, sequence, records, self.map[start : start + valid]))
        return sorted(found, key=lambda buffer: buffer.sequence)

    def records(self) -> dict[int, list[bytes]]:
        """Records in READY buffers, by activity kind."""
        found: dict[int, list[bytes]] = {}
        for buffer in self.ready():
            for record in split(buffer, self.record_bytes()):
                found.setdefault(_KIND.unpack_from(record)[0], []).append(record)
        return found

    def free(self, index: int) -> None:
        """Set a buffer to FREE, as the daemon does once it has copied it."""
        set_free(self.map, self.descriptor(index))

    def strings(self) -> dict[tuple[int, int], str]:
        """Texts of the string table by (space, key), without those that are not text."""
        raw = self.raw_strings()
        return {key: text.decode() for key, text in raw.items() if key[0] != SPACE_CLOCK_PAIR}

    def raw_strings(self) -> dict[tuple[int, int], bytes]:
        """Entries of the string table by (space, key)."""
        found = {}
        at = self.fixed["strings_offset"]
        end = at + self.word(arena.STRINGS_USED)
        while at < end:
            key, space, length = arena.STRING_ENTRY.unpack_from(self.map, at)
            at += arena.STRING_ENTRY.size
            found[space, key] = self.map[at : at + length]
            at += (length + 7) // 8 * 8
        return found

    def record_bytes(self) -> dict[int, int]:
        """Observed record sizes by activity kind."""
        sizes = struct.unpack_from(f"<{arena.RECORD_KINDS}I", self.map, arena.RECORD_BYTES)
        return {kind: size for kind, size in enumerate(sizes) if size}


def set_free(memory: mmap.mmap, descriptor: int) -> None:
    """Set the buffer of a descriptor to FREE in one store; `struct.pack_into` clears the word and then writes it."""
    with memoryview(memory) as whole, whole.cast("I") as words:
        words[(descriptor + arena.STATE) // 4] = arena.FREE


def split(buffer: Buffer, sizes: dict[int, int]) -> list[bytes]:
    """The single records of a buffer."""
    records = []
    at = 0
    while at < len(buffer.data):
        size = sizes[_KIND.unpack_from(buffer.data, at)[0]]
        records.append(buffer.data[at : at + size])
        at += size
    return records


def count_kinds(buffers: list[Buffer], sizes: dict[int, int]) -> Counter[int]:
    """Number of records by activity kind."""
    return Counter(_KIND.unpack_from(record)[0] for buffer in buffers for record in split(buffer, sizes))


class Recycler(threading.Thread):
    """Copies READY buffers and sets them FREE until told to end, as the daemon does; only then if it is not started."""

    def __init__(self, reader: ArenaReader, period_s: float = 0.001) -> None:
        super().__init__(name="recycler", daemon=True)
        self._period_s = period_s
        self._reader = reader
        self._ended = threading.Event()
        self.taken: list[Buffer] = []

    def run(self) -> None:
        """Looks again and again until the end."""
        while not self._ended.wait(self._period_s):
            self.sweep()

    def sweep(self) -> None:
        """Take every buffer that is READY now."""
        for buffer in self._reader.ready():
            self.taken.append(buffer)
            self._reader.free(buffer.slot)

    def end(self) -> list[Buffer]:
        """Stop, take the rest and return everything."""
        self._ended.set()
        if self.ident is not None:
            self.join()
        self.sweep()
        return self.taken
