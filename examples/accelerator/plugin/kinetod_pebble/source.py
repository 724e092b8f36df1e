"""The source for Pebble: runs in the traced process, on a thread of its own. Python 3.9, standard library only."""

import ctypes
import time
from typing import Any, FrozenSet, List

from kineto_agent.sources.plugins.api import (
    DECLARED_FORMAT,
    ArenaWriter,
    SourceError,
    SourceOutcome,
    SourceRequest,
    mapped_files,
    start_thread,
)

RECORD_BYTES = 48
READ_EVERY_S = 0.02  # the library's ring has room for 65,536 records
STRINGS_BYTES = 4096  # the least: all names are in the schema


def library() -> Any:
    """The library that the program has loaded. Raises SourceError."""
    for path in mapped_files("libpebble.so"):
        return ctypes.CDLL(path)
    raise SourceError("PEBBLE", "libpebble.so is no longer mapped")


class Session:
    """One recording. A thread copies what the library has recorded into the arena, with no Python code per record."""

    format = DECLARED_FORMAT

    def __init__(self, request: SourceRequest) -> None:
        self.pebble = library()
        self.pebble.pebble_read.restype = ctypes.c_size_t
        self.pebble.pebble_dropped.restype = ctypes.c_uint64
        self.writer = ArenaWriter("pebble", request.buffer_limit_bytes, STRINGS_BYTES)
        self.arena_fd = self.writer.fd
        self.metadata = {"way": "read from libpebble"}
        self.stopping = False
        self.cpu_ns = 0

    def start(self) -> None:
        """Switch tracing on."""
        self.pebble.pebble_trace(1)
        self.thread = start_thread("kineto-pebble", self.copy)

    def copy(self) -> None:
        """Copy until the recording stops. The daemon gets what is there after each round."""
        while not self.stopping:
            time.sleep(READ_EVERY_S)
            while self.copy_once():
                pass
            self.writer.publish()
        self.cpu_ns = time.thread_time_ns()

    def copy_once(self) -> bool:
        """Fill what is left of a buffer. Returns whether there may be more; without a free buffer the ring keeps it."""
        if not self.writer.has_room(RECORD_BYTES):
            return False
        room = self.writer.room()
        assert room is not None
        with room:
            place = ctypes.c_char.from_buffer(room)  # an array type of each length would stay for ever
            records: int = self.pebble.pebble_read(ctypes.byref(place), ctypes.c_size_t(len(room) // RECORD_BYTES))
            del place
        if records:
            self.writer.filled(records * RECORD_BYTES, records)
        return records > 0

    def stop(self) -> SourceOutcome:
        """Switch tracing off and copy the rest."""
        self.pebble.pebble_trace(0)
        self.stopping = True
        self.thread.join(2.0)
        while self.copy_once():
            pass
        for _ in range(self.pebble.pebble_dropped()):
            self.writer.drop()
        self.writer.finish()
        return SourceOutcome(self.writer.counts(), {}, [], detach_ns=0, cpu_ns=self.cpu_ns)

    def close(self) -> None:
        """Free the memory."""
        self.writer.close()


class Pebble:
    """Kernels and launches, wherever the library is."""

    on_request: FrozenSet[str] = frozenset()

    def activity_types(self) -> List[str]:
        """Both, at any time."""
        return ["kernel", "pebble_runtime"]

    def prepare(self, request: SourceRequest) -> Session:
        """Make the memory. Nothing is recorded yet."""
        return Session(request)


SOURCE = Pebble()
