"""sources/file_arena.py: a file larger than the arena arrives whole, and a cut one is known to be cut."""

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_agent.sources.file_arena import BUFFER_BYTES, FileArena
from kinetod.captures.arena_reader import ArenaReader

SMALL = 4 * BUFFER_BYTES  # the least that an arena has


class Sink:
    """Collects what a reader copies."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, bytes]] = []

    def append_buffer(self, data: memoryview, *, sequence: int, records: int) -> None:
        assert records == 1
        self.buffers.append((sequence, bytes(data)))

    def append_strings(self, data: memoryview) -> None:
        raise AssertionError("a file has no strings")

    def file(self) -> bytes:
        assert [sequence for sequence, _ in self.buffers] == list(range(len(self.buffers)))
        return b"".join(data for _, data in self.buffers)


@pytest.fixture
def arena() -> Iterator[FileArena]:
    made = FileArena("test", SMALL, patience_s=0.05)
    yield made
    made.close()


@pytest.fixture
def reader(arena: FileArena) -> Iterator[ArenaReader]:
    made = ArenaReader(os.dup(arena.fd), max_buffer_bytes=SMALL)
    yield made
    made.close()


def test_bytes_arrive_in_order(arena: FileArena, reader: ArenaReader) -> None:
    data = os.urandom(BUFFER_BYTES + 12345)
    assert arena.copy_from(data[:100]) == 100
    assert arena.copy_from(memoryview(data)[100:]) == len(data) - 100
    arena.finish()
    sink = Sink()
    reader.drain(sink)
    assert sink.file() == data
    assert arena.counts() == (2, len(data), 0)
    assert (arena.written_bytes, arena.lost_bytes) == (len(data), 0)


def test_a_file_larger_than_the_arena_waits_for_the_daemon(tmp_path: Path) -> None:
    data = os.urandom(11 * BUFFER_BYTES + 7)
    (tmp_path / "file").write_bytes(data)
    arena = FileArena("test", SMALL, patience_s=60)
    reader = ArenaReader(os.dup(arena.fd), max_buffer_bytes=SMALL)
    sink = Sink()

    def write() -> None:
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        arena.copy_from(descriptor)
        os.close(descriptor)
        arena.finish()

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        reader.drain(sink)
    writer.join()
    reader.drain(sink)
    assert sink.file() == data
    assert arena.counts() == (12, len(data), 0)
    reader.close()
    arena.close()


def test_a_file_that_nobody_takes_is_cut_and_tells_how_much(arena: FileArena, reader: ArenaReader) -> None:
    data = bytes(6 * BUFFER_BYTES)
    assert arena.copy_from(data) == 4 * BUFFER_BYTES
    arena.copy_from(b"more")
    arena.finish()
    assert arena.lost_bytes == 2 * BUFFER_BYTES + 4
    assert arena.counts() == (4, 4 * BUFFER_BYTES, 1)
    assert reader.counts().dropped == 1


def test_nothing_follows_a_cut_even_if_there_is_room_again(arena: FileArena, reader: ArenaReader) -> None:
    arena.copy_from(bytes(5 * BUFFER_BYTES))
    reader.drain(Sink())
    assert arena.copy_from(b"more") == 0


def test_a_descriptor_that_nobody_takes_is_cut_and_tells_how_much(arena: FileArena, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5 * BUFFER_BYTES + 3))
    with (tmp_path / "file").open("rb") as file:
        assert arena.copy_from(file.fileno()) == 4 * BUFFER_BYTES
    assert arena.lost_bytes == BUFFER_BYTES + 3


def test_a_full_arena_is_no_cut_if_the_file_ends_there(arena: FileArena, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4 * BUFFER_BYTES))
    with (tmp_path / "file").open("rb") as file:
        assert arena.copy_from(file.fileno()) == 4 * BUFFER_BYTES
    assert arena.counts().dropped == arena.lost_bytes == 0


def test_a_pickler_writes_through_it(arena: FileArena, reader: ArenaReader) -> None:
    value = [{"number": number, "text": "x" * 50} for number in range(20_000)]
    pickle.Pickler(arena, protocol=4).dump(value)
    arena.finish()
    sink = Sink()
    reader.drain(sink)
    assert pickle.loads(sink.file()) == value


def test_an_empty_file_has_no_buffers(arena: FileArena, reader: ArenaReader) -> None:
    arena.copy_from(b"")
    arena.finish()
    assert arena.counts() == (0, 0, 0)
