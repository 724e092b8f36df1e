"""Writes an arena in pure Python, for sources whose records are made in Python.

Theory of operation
    `kineto_agent.protocol.arena` gives the layout and the states of a buffer. There is one writer thread. A record goes
    into the current (LOANED) buffer. `publish` makes that buffer READY; a full one is published automatically. The
    daemon sets READY buffers to FREE when it has copied them; the lowest FREE one is taken next, so that few
    pages are touched while the daemon keeps up. Without a FREE buffer a record is dropped and counted.

    Words that the daemon reads are stored through memoryviews of their own width: one store each. Data covered by a
    READY state or `strings_used` must be visible before it; taking and releasing a lock is the barrier (needed on ARM,
    free on x86).

    A forked child closes what it inherited; otherwise the memory would live as long as the child.

    The memfd is sealed against every change of its size before anybody else gets it.
"""

import _thread
import contextlib
import fcntl
import mmap
import os
import struct
from typing import Optional, Set

from kineto_agent.protocol import arena
from kineto_agent.sources.interface import SourceCounts, SourceError
from kineto_agent.system.descriptors import NOBODY, close_ours, identity, memfd

BUFFER_BYTES = 64 * 1024
MIN_BUFFERS = 4
MAX_BUFFERS = 64
_F_ADD_SEALS = 1033  # Linux; named in fcntl only if its headers had it when Python was built
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 0x1, 0x2


_open: "Set[ArenaWriter]" = set()


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _fitting(buffer_bytes: int, limit_bytes: int) -> int:
    """The largest buffer size with which the minimum number of buffers stays within the limit."""
    pages = min(buffer_bytes, limit_bytes // MIN_BUFFERS) // arena.PAGE_BYTES
    return max(pages, 1) * arena.PAGE_BYTES


class ArenaWriter:
    """One arena and its writer, at most twice the limit. Every method but `counts` belongs to one thread at a time."""

    def __init__(
        self, name: str, buffer_limit_bytes: int, strings_bytes: int, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.buffer_bytes = buffer_bytes = _fitting(buffer_bytes, buffer_limit_bytes)
        self._count = min(max(buffer_limit_bytes // buffer_bytes, MIN_BUFFERS), MAX_BUFFERS)
        self._strings_offset = _round_up(arena.HEADER_BYTES + self._count * arena.DESCRIPTOR_BYTES, arena.PAGE_BYTES)
        self._strings_bytes = _round_up(min(strings_bytes, buffer_limit_bytes), arena.PAGE_BYTES)
        self._buffers_offset = self._strings_offset + self._strings_bytes
        self.total_bytes = self._buffers_offset + self._count * buffer_bytes
        self.fd, self._identity = -1, NOBODY
        try:
            self.fd = memfd("kineto-" + name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
            self._identity = identity(self.fd)
            _open.add(self)  # before anything that releases the GIL: a forked child then closes it
            os.ftruncate(self.fd, self.total_bytes)
            self._map = mmap.mmap(self.fd, self.total_bytes)
            self._write_fixed_header()
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
        except Exception as exc:  # an audit hook of the program may raise anything
            close_ours(self.fd, self._identity)
            _open.discard(self)
            reason = "cannot allocate %d bytes of shared memory for the records: %s" % (self.total_bytes, exc)
            raise SourceError("NO_SHARED_MEMORY", reason) from exc
        self._bytes = memoryview(self._map)
        self._words32 = self._bytes[: self._strings_offset].cast("I")
        self._words64 = self._bytes[: self._strings_offset].cast("Q")
        self._barrier = _thread.allocate_lock()
        self._current = -1  # the LOANED buffer
        self._fill = 0  # bytes in it
        self._fill_records = 0
        self._strings_used = 0
        self._ready_records = self._ready_bytes = self._dropped = self._sequence = 0

    def _write_fixed_header(self) -> None:
        arena.FIXED.pack_into(
            self._map, 0, arena.MAGIC, arena.HEADER_BYTES, self._count, self.buffer_bytes, arena.HEADER_BYTES,
            self._strings_offset, self._strings_bytes, self._buffers_offset, self.total_bytes,
        )  # fmt: skip

    # ------------------------------------------------------------ writing

    def append(self, layout: struct.Struct, *values: int) -> bool:
        """Write one record into the current buffer. Returns False if it was dropped because no buffer is free."""
        if not self.has_room(layout.size):
            self.drop()
            return False
        offset = self._buffers_offset + self._current * self.buffer_bytes + self._fill
        layout.pack_into(self._bytes, offset, *values)
        self._fill += layout.size
        self._fill_records += 1
        return True

    def has_room(self, size: int) -> bool:
        """Whether a record of `size` bytes can be written now."""
        if self._current >= 0 and self._fill + size > self.buffer_bytes:
            self.publish()
        return self._current >= 0 or self._borrow()

    def room(self) -> Optional[memoryview]:
        """The rest of the current buffer, never empty, for the caller to fill and release; None: no buffer is free."""
        if self._current >= 0 and self._fill >= self.buffer_bytes:
            self.publish()
        if self._current < 0 and not self._borrow():
            return None
        start = self._buffers_offset + self._current * self.buffer_bytes
        return self._bytes[start + self._fill : start + self.buffer_bytes]

    def write_through(self, data: memoryview) -> int:
        """Write as much of the data as fits into `room()`, without the GIL. The caller then calls `filled`.

        Keeps the GIL if the program has closed the descriptor: its number may now belong to a file of the program.
        """
        offset = self._buffers_offset + self._current * self.buffer_bytes + self._fill
        with data[: self.buffer_bytes - self._fill] as part:
            if identity(self.fd) == self._identity:
                return os.pwrite(self.fd, part, offset)
            self._bytes[offset : offset + len(part)] = part
            return len(part)

    def filled(self, size: int, records: int = 0) -> None:
        """Note that `size` bytes of `room()` are written. records: in them; 0: the buffer counts as one record."""
        self._fill += size
        self._fill_records = self._fill_records + records if records else 1

    def intern(self, key: int, space: int, text: bytes) -> bool:
        """Add one entry to the string table, visible to the daemon at once. Returns False if the table is full."""
        head = arena.STRING_ENTRY.size
        size = _round_up(head + len(text), 8)
        if self._strings_used + size > self._strings_bytes:
            return False
        offset = self._strings_offset + self._strings_used
        arena.STRING_ENTRY.pack_into(self._bytes, offset, key, space, len(text))
        self._bytes[offset + head : offset + head + len(text)] = text
        self._strings_used += size
        self._fence()
        self._words64[arena.STRINGS_USED // 8] = self._strings_used
        return True

    def drop(self) -> None:
        """Count one record that could not be written."""
        self._dropped += 1
        self._words64[arena.DROPPED // 8] = self._dropped

    def publish(self) -> None:
        """Make the current buffer READY, if it holds anything."""
        if self._current < 0 or self._fill == 0:
            return
        self._ready_records += self._fill_records
        self._ready_bytes += self._fill
        words, base = self._words64, arena.HEADER_BYTES + self._current * arena.DESCRIPTOR_BYTES
        words[(base + arena.BUFFER_VALID_BYTES) // 8] = self._fill
        words[(base + arena.BUFFER_SEQUENCE) // 8] = self._sequence
        words[(base + arena.BUFFER_RECORDS) // 8] = self._fill_records
        self._sequence += 1
        words[arena.RECORDS // 8] = self._ready_records
        words[arena.VALID_BYTES // 8] = self._ready_bytes
        words[arena.SEQUENCE // 8] = self._sequence
        self._fence()
        self._set_state(self._current, arena.READY)
        self._current, self._fill, self._fill_records = -1, 0, 0

    def finish(self) -> None:
        """Publish the rest and mark the arena as closed."""
        self.publish()
        self._fence()
        self._words64[arena.CLOSED // 8] = 1

    def counts(self) -> SourceCounts:
        """Records and bytes in READY buffers, and records dropped."""
        return SourceCounts(self._ready_records, self._ready_bytes, self._dropped)

    def close(self) -> None:
        """Release the memory. The daemon has its own descriptor."""
        if self.fd < 0:
            return
        close_ours(self.fd, self._identity)  # a child forked in between has it open
        _open.discard(self)
        self.fd = -1
        for view in (self._words32, self._words64, self._bytes):
            view.release()
        self._map.close()

    # ------------------------------------------------------------ buffers

    def _borrow(self) -> bool:
        for index in range(self._count):
            if self._words32[self._state_word(index)] == arena.FREE:
                self._fence()
                self._set_state(index, arena.LOANED)
                self._current = index
                return True
        return False

    def _set_state(self, index: int, state: int) -> None:
        self._words32[self._state_word(index)] = state

    def _state_word(self, index: int) -> int:
        return (arena.HEADER_BYTES + index * arena.DESCRIPTOR_BYTES + arena.STATE) // 4

    def _fence(self) -> None:
        with self._barrier:
            pass


def close_left(descriptor: int) -> None:
    """Close the arena with this descriptor, if its owner has not and no thread writes into it any more."""
    for writer in [writer for writer in _open if writer.fd == descriptor]:
        writer.close()


def _close_all_in_child() -> None:
    for writer in list(_open):
        # A thread that no longer exists was creating it, or was in the middle of a write.
        with contextlib.suppress(AttributeError, BufferError, OSError):
            writer.close()


os.register_at_fork(after_in_child=_close_all_in_child)
