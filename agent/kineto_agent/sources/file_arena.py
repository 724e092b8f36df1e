"""Sends one file through an arena (FILE_FORMAT, TORCH_PROFILER_FORMAT): its bytes, in order, in buffers of 1 MiB.

Theory of operation
    A file arrives at once, when a session stops, and may be larger than the arena. The writer therefore waits for the
    daemon to set buffers FREE, at most PATIENCE_S for each: for a daemon that copies it waits as long as necessary, for
    one that is gone or stuck only once. Then the rest of the file is not written, since a file with a hole is worth no
    more than a truncated one. The missing part is counted: `lost_bytes`, and one dropped record, which marks the file
    as truncated.

    A record is a buffer. Descriptors are read into the mapping by os.readv and bytes are written into the memfd by
    os.pwrite: both release the GIL. `write` makes it a file object: a pickler writes its frames of 64 KiB through it,
    and the program gets the GIL in between.
"""

import os
import time
from typing import Union

from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_agent.sources.interface import SourceCounts

BUFFER_BYTES = 1 << 20
PATIENCE_S = 2.0  # without a free buffer
_POLL_S = 0.01  # the daemon copies every 100 ms


class FileArena:
    """The arena of one file. Every method but `counts` belongs to one thread at a time."""

    def __init__(self, name: str, buffer_limit_bytes: int, patience_s: float = PATIENCE_S) -> None:
        """Create the arena. Raises SourceError."""
        self._writer = ArenaWriter(name, buffer_limit_bytes, 0, BUFFER_BYTES)
        self._patience_s = patience_s
        self._dropped = False
        self.fd = self._writer.fd
        self.written_bytes = 0
        self.lost_bytes = 0

    def copy_from(self, source: Union[int, bytes, bytearray, memoryview]) -> int:
        """Append bytes, or everything that can be read from a descriptor. Returns the bytes written. Raises OSError."""
        if isinstance(source, int):
            return self._copy_descriptor(source)
        with memoryview(source).cast("B") as data:
            return self._copy_bytes(data)

    def write(self, data: Union[bytes, bytearray, memoryview]) -> int:
        """Like `copy_from`, as a file object: reports all bytes as written; see `lost_bytes`."""
        self.copy_from(data)
        return len(data)

    def counts(self) -> SourceCounts:
        """What lies in READY buffers; dropped is 1 if the file is truncated."""
        return self._writer.counts()

    def finish(self) -> None:
        """Counts of READY buffers; dropped is 1 if the file is truncated."""
        self._writer.finish()

    def close(self) -> None:
        """Release the memory. The daemon keeps its own mapping."""
        self._writer.close()
        self.fd = -1

    def mark_cut(self) -> None:
        """Mark the file as truncated: nothing more of it follows."""
        if not self._dropped:
            self._dropped = True
            self._writer.drop()

    def _copy_descriptor(self, descriptor: int) -> int:
        total = 0
        while self._wait_for_room():
            room = self._writer.room()
            assert room is not None  # just waited for
            with room:
                size = os.readv(descriptor, [room])
            if not size:
                return total
            self._took(size)
            total += size
        while True:  # only to count what is lost
            size = len(os.read(descriptor, BUFFER_BYTES))
            if not size:
                return total
            self.lost_bytes += size
            self.mark_cut()

    def _copy_bytes(self, data: memoryview) -> int:
        total = 0
        while total < len(data):
            if not self._wait_for_room():
                self.lost_bytes += len(data) - total
                self.mark_cut()
                break
            with data[total:] as rest:
                size = self._writer.write_through(rest)
            self._took(size)
            total += size
        return total

    def _took(self, size: int) -> None:
        self._writer.filled(size)
        self.written_bytes += size

    def _wait_for_room(self) -> bool:
        """Wait until a buffer is free. Returns False if the file is truncated instead."""
        deadline = time.monotonic() + self._patience_s
        while not self._dropped:
            room = self._writer.room()
            if room is not None:
                room.release()
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return False
