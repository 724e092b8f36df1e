"""Streams rows of text to a file in bounded memory, plain or gzip-compressed.

Theory of operation
    A sink owns a few large buffers. The native codec writes rows into one of them; a full buffer is passed on. For gzip
    each buffer becomes a gzip member of its own (readers see one stream), which isal compresses in a small thread pool
    while the next buffer fills. Nothing grows with the trace.
"""

import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from isal import igzip_lib

from kineto_trace.base.array_types import AnyArray

BUFFER_BYTES = 1 << 20  # small enough to stay in the cache between writing and compressing
GZIP_LEVEL = 1  # isal's level; higher ones take twice the time to save a few per cent
GZIP_THREADS = 2


def escaped(text: str) -> bytes:
    """Returns the text escaped for a JSON string, without the quotes."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)[1:-1].encode()


def name_text(name: str) -> bytes:
    """Returns a name as Kineto writes it: / for \\, no line breaks, and "Kernel" for "kernel", which is a category."""
    return escaped("Kernel" if name == "kernel" else name.replace("\\", "/").replace("\n", ""))


class Output(Protocol):
    """The destination of a sink, for instance an unbuffered file."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes some of the bytes and returns their number."""


class RowSource(Protocol):
    """A writer of rows into a buffer, for instance a RowWriter."""

    def write(self, out: AnyArray, first: int, count: int, /) -> tuple[int, int]:
        """Writes at most `count` rows from `first` on; returns how many fitted, and their size in bytes."""


class TextSink:
    """Appends text to a file."""

    def __init__(self, file: Output, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._file = file
        self._buffer: AnyArray = np.empty(buffer_bytes, np.uint8)
        self._used = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()

    def text(self, text: bytes) -> None:
        """Appends the text unchanged."""
        rest = memoryview(text)
        while rest:
            room = min(len(rest), len(self._buffer) - self._used)
            self._buffer[self._used : self._used + room] = np.frombuffer(rest[:room], np.uint8)
            self._used += room
            rest = rest[room:]
            if self._used == len(self._buffer):
                self._flush()

    def rows(self, writer: RowSource, count: int) -> None:
        """Appends rows 0 … count - 1."""
        done = 0
        while done < count:
            rows, used = writer.write(self._buffer[self._used :], done, count - done)
            done += rows
            self._used += used
            if done < count:
                if self._used == 0:  # a single row is longer than the buffer
                    self._buffer = np.empty(2 * len(self._buffer), np.uint8)
                else:
                    self._flush()

    def _flush(self) -> None:
        if self._used:
            self._buffer = self._emit(self._buffer, self._used)
            self._used = 0

    def _emit(self, buffer: AnyArray, used: int) -> AnyArray:
        """Passes on a filled buffer; returns the one to fill next."""
        self._write(buffer[:used].data)
        return buffer

    def _write(self, data: memoryview | bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


class GzipSink(TextSink):
    """A TextSink that compresses with gzip."""

    def __init__(self, file: Output, *, buffer_bytes: int = BUFFER_BYTES, threads: int = GZIP_THREADS) -> None:
        super().__init__(file, buffer_bytes=buffer_bytes)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kineto-gzip")
        self._pending: deque[tuple[Future[bytes], AnyArray]] = deque()
        self._threads = threads

    def _emit(self, buffer: AnyArray, used: int) -> AnyArray:
        self._pending.append((self._pool.submit(gzip_member, buffer[:used].data), buffer))
        if len(self._pending) > self._threads:
            return self._collect()
        return np.empty(len(buffer), np.uint8)

    def _collect(self) -> AnyArray:
        """Writes the oldest compressed member and returns its buffer for reuse."""
        future, buffer = self._pending.popleft()
        self._write(future.result())
        return buffer

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                while self._pending:
                    self._collect()
        finally:
            self._pool.shutdown()


def gzip_member(data: bytes | memoryview) -> bytes:
    """Returns the data as one member of a gzip file."""
    compressed: bytes = igzip_lib.compress(data, GZIP_LEVEL, igzip_lib.COMP_GZIP)
    return compressed
