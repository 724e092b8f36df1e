import fcntl
import os
import struct
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from kineto_agent.protocol import arena
from kineto_agent.protocol.records import SPACE_PYTHON_CODE, SPACE_THREAD_NAME
from kineto_agent.sources import arena_writer
from kineto_agent.sources.arena_writer import BUFFER_BYTES, ArenaWriter
from kineto_agent.sources.interface import SourceCounts, SourceError
from kineto_agent.system import descriptors
from support.agent.agent_daemon import ArenaReader

RECORD = struct.Struct("<qIIII")
IN_A_BUFFER = 2730  # 24-byte records in 64 KiB


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    writer = ArenaWriter("test", 4 * BUFFER_BYTES, 4096)
    yield writer
    writer.close()


@pytest.fixture
def reader(writer: ArenaWriter) -> Iterator[ArenaReader]:
    reader = ArenaReader(os.dup(writer.fd))
    yield reader
    reader.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def write(writer: ArenaWriter, count: int) -> int:
    return sum(writer.append(RECORD, number, 1, 2, 3, 0) for number in range(count))


def test_the_header_describes_the_arena(writer: ArenaWriter, reader: ArenaReader) -> None:
    assert reader.fixed == {
        "magic": b"KINETOA1",
        "header_bytes": 4096,
        "buffer_count": 4,
        "buffer_bytes": 65536,
        "descriptors_offset": 4096,
        "strings_offset": 8192,
        "strings_bytes": 4096,
        "buffers_offset": 12288,
        "total_bytes": 274432,
    }
    assert len(reader.map) == 274432


def test_the_size_is_sealed(writer: ArenaWriter) -> None:
    assert fcntl.fcntl(writer.fd, 1034) == 0x1 | 0x2 | 0x4  # F_GET_SEALS: SEAL, SHRINK, GROW
    with pytest.raises(PermissionError):
        os.ftruncate(writer.fd, 0)


@pytest.mark.parametrize(("limit", "buffers"), [(0, 4), (1 << 20, 16), (1 << 40, 64)])
def test_the_limit_decides_on_the_number_of_buffers(limit: int, buffers: int) -> None:
    writer = ArenaWriter("test", limit, 4096)
    assert ArenaReader(os.dup(writer.fd)).fixed["buffer_count"] == buffers
    writer.close()


def test_records_are_seen_once_published(writer: ArenaWriter, reader: ArenaReader) -> None:
    write(writer, 3)
    assert reader.take() == []
    assert writer.counts() == SourceCounts(0, 0, 0)
    writer.publish()
    assert writer.counts() == SourceCounts(3, 72, 0)
    assert reader.take() == [b"".join(RECORD.pack(number, 1, 2, 3, 0) for number in range(3))]
    assert [reader.word(offset) for offset in (arena.RECORDS, arena.VALID_BYTES, arena.SEQUENCE)] == [3, 72, 1]


def test_publishing_nothing_changes_nothing(writer: ArenaWriter, reader: ArenaReader) -> None:
    writer.publish()
    writer.publish()
    assert reader.word(arena.SEQUENCE) == 0


def test_a_full_buffer_is_published_by_itself(writer: ArenaWriter, reader: ArenaReader) -> None:
    write(writer, IN_A_BUFFER + 1)
    assert [len(data) for data in reader.take()] == [IN_A_BUFFER * 24]


def test_without_a_free_buffer_records_are_dropped_and_counted(writer: ArenaWriter, reader: ArenaReader) -> None:
    assert write(writer, 4 * IN_A_BUFFER + 10) == 4 * IN_A_BUFFER
    assert writer.counts() == SourceCounts(4 * IN_A_BUFFER, 4 * IN_A_BUFFER * 24, 10)
    assert reader.word(arena.DROPPED) == 10


def test_a_copied_buffer_is_used_again_and_order_is_kept(writer: ArenaWriter, reader: ArenaReader) -> None:
    seen = []
    for _ in range(10):
        assert write(writer, IN_A_BUFFER) == IN_A_BUFFER
        writer.publish()
        seen += reader.take()
    assert len(seen) == 10
    assert reader.word(arena.SEQUENCE) == 10
    assert writer.counts().dropped == 0


def test_strings_are_seen_at_once(writer: ArenaWriter, reader: ArenaReader) -> None:
    assert writer.intern(7, SPACE_PYTHON_CODE, b"abc")
    assert writer.intern(8, SPACE_THREAD_NAME, b"")
    assert reader.word(arena.STRINGS_USED) == 24 + 16
    assert reader.strings() == {(3, 7): b"abc", (5, 8): b""}


def test_a_full_string_table_takes_no_more(writer: ArenaWriter, reader: ArenaReader) -> None:
    taken = sum(writer.intern(number, 3, b"x" * 80) for number in range(100))
    assert taken == 4096 // 96
    assert len(reader.strings()) == 42


def test_finishing_publishes_the_rest_and_closes(writer: ArenaWriter, reader: ArenaReader) -> None:
    write(writer, 1)
    assert reader.word(arena.CLOSED) == 0
    writer.finish()
    assert (len(reader.take()), reader.word(arena.CLOSED)) == (1, 1)


def test_what_was_published_outlives_the_writer(writer: ArenaWriter, reader: ArenaReader) -> None:
    write(writer, 2)
    writer.finish()
    writer.close()
    writer.close()
    assert len(reader.take()[0]) == 48


def test_memory_that_cannot_be_had_is_a_source_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = open_descriptors()
    with pytest.raises(SourceError, match="cannot allocate 274432 bytes of shared memory") as caught:
        ArenaWriter("test", 4 * BUFFER_BYTES, 4096)
    assert caught.value.reason_code == "NO_SHARED_MEMORY"
    assert open_descriptors() <= before  # what an earlier test has left may have gone


def test_a_python_without_memfd_create_uses_the_c_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    writer = ArenaWriter("test", 0, 4096)
    assert str(Path("/proc/self/fd/%d" % writer.fd).readlink()) == "/memfd:kineto-test (deleted)"
    assert fcntl.fcntl(writer.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    writer.close()


def test_a_forked_child_lets_go_of_the_memory(writer: ArenaWriter) -> None:
    read, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = "memfd:kineto-test" in Path("/proc/self/maps").read_text()
        os.write(write_end, b"held" if held or writer.fd >= 0 else b"free")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 10) == b"free"
    os.close(read)
    os.close(write_end)
    assert write(writer, 1) == 1


def test_a_child_that_is_forked_while_an_arena_is_made_or_closed_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses, parent = [], os.getpid()

    def forking(function: Callable[..., Any]) -> Callable[..., Any]:
        def fork_and_call(*arguments: Any) -> Any:
            if os.getpid() != parent:  # a child closes what it has inherited
                return function(*arguments)
            child = os.fork()
            if not child:
                names = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
                os._exit(any("kineto-forks" in name for name in names))
            statuses.append(os.waitpid(child, 0)[1])
            return function(*arguments)

        return fork_and_call

    monkeypatch.setattr(os, "ftruncate", forking(os.ftruncate))  # which gives the GIL away, as closing does
    made = ArenaWriter("forks", 4 * BUFFER_BYTES, 4096)
    monkeypatch.setattr(arena_writer, "close_ours", forking(descriptors.close_ours))
    made.close()
    assert statuses == [0, 0]
