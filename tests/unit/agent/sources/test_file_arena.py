"""sources/file_arena.py: a file larger than the arena arrives whole, and a cut one is known to be cut."""

import os
import pickle
import threading
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest
from kineto_agent.sources.file_arena import BUFFER_BYTES, FileArena
from support.agent.arenas import ArenaReader

SMALL = 4 * BUFFER_BYTES  # the least that an arena has


class Taker:
    """Takes READY buffers as the daemon does, and sets them FREE."""

    def __init__(self, arena: FileArena) -> None:
        self._reader = ArenaReader(arena.fd)
        self._parts: List[Tuple[int, bytes]] = []

    def take(self) -> None:
        """Everything that is READY now."""
        for buffer in self._reader.ready():
            assert buffer.records == 1
            self._parts.append((buffer.sequence, buffer.data))
            self._reader.free(buffer.slot)

    def file(self) -> bytes:
        """All of it, in order."""
        self.take()
        self._parts.sort()
        assert [sequence for sequence, _ in self._parts] == list(range(len(self._parts)))
        return b"".join(data for _, data in self._parts)

    def close(self) -> None:
        """Unmap."""
        self._reader.__exit__(None, None, None)


@pytest.fixture
def arena() -> Iterator[FileArena]:
    made = FileArena("test", SMALL, patience_s=0.05)
    yield made
    made.close()


@pytest.fixture
def taker(arena: FileArena) -> Iterator[Taker]:
    made = Taker(arena)
    yield made
    made.close()


def test_bytes_arrive_in_order(arena: FileArena, taker: Taker) -> None:
    data = os.urandom(BUFFER_BYTES + 12345)
    assert arena.copy_from(data[:100]) == 100
    assert arena.copy_from(memoryview(data)[100:]) == len(data) - 100
    arena.finish()
    assert taker.file() == data
    assert arena.counts() == (2, len(data), 0)
    assert (arena.written_bytes, arena.lost_bytes) == (len(data), 0)


def test_a_file_larger_than_the_arena_waits_for_the_daemon(tmp_path: Path) -> None:
    data = os.urandom(11 * BUFFER_BYTES + 7)
    (tmp_path / "file").write_bytes(data)
    arena = FileArena("test", SMALL, patience_s=60)
    taker = Taker(arena)

    def write() -> None:
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        arena.copy_from(descriptor)
        os.close(descriptor)
        arena.finish()

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        taker.take()
    writer.join()
    assert taker.file() == data
    assert arena.counts() == (12, len(data), 0)
    taker.close()
    arena.close()


def test_a_file_that_nobody_takes_is_cut_and_tells_how_much(arena: FileArena, taker: Taker) -> None:
    data = bytes(6 * BUFFER_BYTES)
    assert arena.copy_from(data) == 4 * BUFFER_BYTES
    arena.copy_from(b"more")
    arena.finish()
    assert arena.lost_bytes == 2 * BUFFER_BYTES + 4
    assert arena.counts() == (4, 4 * BUFFER_BYTES, 1)


def test_nothing_follows_a_cut_even_if_there_is_room_again(arena: FileArena, taker: Taker) -> None:
    arena.copy_from(bytes(5 * BUFFER_BYTES))
    taker.take()
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


def test_a_pickler_writes_through_it(arena: FileArena, taker: Taker) -> None:
    value = [{"number": number, "text": "x" * 50} for number in range(20_000)]
    pickle.Pickler(arena, protocol=4).dump(value)
    arena.finish()
    assert pickle.loads(taker.file()) == value


def test_an_empty_file_has_no_buffers(arena: FileArena, taker: Taker) -> None:
    arena.copy_from(b"")
    arena.finish()
    assert arena.counts() == (0, 0, 0)


def test_a_file_of_the_program_under_the_arenas_number_is_not_written(
    arena: FileArena, taker: Taker, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.write_bytes(b"of the program")
    arena.copy_from(b"first, ")
    with own.open("r+b") as file:
        os.dup2(file.fileno(), arena.fd)  # the program has closed all descriptors and opened its file
    number = arena.fd
    try:
        arena.copy_from(b"second")
        arena.finish()
        assert taker.file() == b"first, second"
        assert own.read_bytes() == b"of the program"
    finally:
        arena.close()  # leaves the number alone
        os.close(number)
