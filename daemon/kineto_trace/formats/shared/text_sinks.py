"""Streams rows of text to a file in bounded memory, plain or gzip-compressed.

Theory of operation
    A sink owns a few large buffers. Rows are written into one of them by the native codec; a full one is
    handed on. For gzip each buffer becomes a member of its own (readers see one stream), compressed by
    isal in a small pool of threads while the next buffer fills. Nothing grows with the trace.
"""

import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from isal import igzip_lib

from kineto_trace.arrays.codec import AnyArray

BUFFER_BYTES = 1 << 20  # stays in the cache between writing and compressing
GZIP_LEVEL = 1  # isal's; higher ones take twice the time for a few per cent
GZIP_THREADS = 2


def escaped(text: str) -> bytes:
    """The inside of a JSON string."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)[1:-1].encode()


def name_text(name: str) -> bytes:
    """A name as Kineto writes it: with / for \\ and without line breaks; "kernel" alone would be a category."""
    return escaped("Kernel" if name == "kernel" else name.replace("\\", "/").replace("\n", ""))


class Output(Protocol):
    """What a sink writes to: an unbuffered file, for instance."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Takes some of the bytes and says how many."""


class Rows(Protocol):
    """What writes rows into a buffer: a RowWriter, for instance."""

    def write(self, out: AnyArray, first: int, count: int, /) -> tuple[int, int]:
        """Writes rows from `first` on, at most `count`; returns how many fitted, and their bytes."""


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
        """Appends some text as it is."""
        rest = memoryview(text)
        while rest:
            room = min(len(rest), len(self._buffer) - self._used)
            self._buffer[self._used : self._used + room] = np.frombuffer(rest[:room], np.uint8)
            self._used += room
            rest = rest[room:]
            if self._used == len(self._buffer):
                self._flush()

    def rows(self, writer: Rows, count: int) -> None:
        """Appends rows 0 … count - 1."""
        done = 0
        while done < count:
            rows, used = writer.write(self._buffer[self._used :], done, count - done)
            done += rows
            self._used += used
            if done < count:
                if self._used == 0:  # one row that is longer than the buffer
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
    """The same, compressed."""

    def __init__(self, file: Output, *, buffer_bytes: int = BUFFER_BYTES, threads: int = GZIP_THREADS) -> None:
        super().__init__(file, buffer_bytes=buffer_bytes)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kineto-gzip")
        self._pending: deque[tuple[Future[bytes], AnyArray]] = deque()
        self._threads = threads

    def _emit(self, buffer: AnyArray, used: int) -> AnyArray:
        self._pending.append((self._pool.submit(_gzip, buffer[:used].data), buffer))
        if len(self._pending) > self._threads:
            return self._collect()
        return np.empty(len(buffer), np.uint8)

    def _collect(self) -> AnyArray:
        """Writes the oldest compressed member; its buffer is free again."""
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


def _gzip(data: memoryview) -> bytes:
    compressed: bytes = igzip_lib.compress(data, GZIP_LEVEL, igzip_lib.COMP_GZIP)
    return compressed
