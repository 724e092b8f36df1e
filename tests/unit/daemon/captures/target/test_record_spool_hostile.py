"""An arena whose target writes what it wants, whenever it wants."""

import ctypes
import fcntl
import gc
import mmap
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kineto_agent.protocol import arena
from kinetod.captures.target.record_spool import MAX_BUFFER_BYTES, ArenaReader, BadArena
from support.machine.usage import rss_bytes

BUFFER_BYTES, BUFFERS, STRINGS_BYTES = 64 << 10, 32, 64 << 10
STRINGS_AT = 8192
BUFFERS_AT = STRINGS_AT + STRINGS_BYTES


class Sink:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.sequences: list[int] = []
        self.records: list[int] = []
        self.strings_bytes = 0

    def append_buffer(self, data: memoryview, *, sequence: int, records: int) -> None:
        self.sizes.append(len(bytes(data)))
        self.sequences.append(sequence)
        self.records.append(records)

    def append_strings(self, data: memoryview) -> None:
        self.strings_bytes += len(bytes(data))


def hostile_arena(buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS) -> int:
    """A memfd with a good header, all buffers READY and full, the strings as well, and nothing but holes in them."""
    total = BUFFERS_AT + buffers * buffer_bytes
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, total)
    fixed = {
        "magic": arena.MAGIC, "header_bytes": arena.HEADER_BYTES, "buffer_count": buffers, "buffer_bytes": buffer_bytes,
        "descriptors_offset": arena.HEADER_BYTES, "strings_offset": STRINGS_AT, "strings_bytes": STRINGS_BYTES,
        "buffers_offset": BUFFERS_AT, "total_bytes": total,
    }  # fmt: skip
    os.pwrite(fd, arena.FIXED.pack(*(fixed[name] for name in arena.FIXED_FIELDS)), 0)
    os.pwrite(fd, struct.pack("<Q", STRINGS_BYTES), arena.STRINGS_USED)
    for index in range(buffers):
        make_ready(fd, index, buffer_bytes)
    fcntl.fcntl(fd, 1033, 0x2 | 0x4)  # F_ADD_SEALS: no shrinking, no growing
    return fd


def make_ready(fd: int, index: int, valid_bytes: int = BUFFER_BYTES) -> None:
    at = arena.HEADER_BYTES + index * arena.DESCRIPTOR_BYTES
    os.pwrite(fd, struct.pack("<Q", valid_bytes), at + arena.BUFFER_VALID_BYTES)
    os.pwrite(fd, struct.pack("<Q", index), at + arena.BUFFER_SEQUENCE)
    os.pwrite(fd, struct.pack("<I", arena.READY), at)


@contextmanager
def meanwhile(work: Callable[[random.Random], None]) -> Iterator[None]:
    """Repeats some work in a thread."""
    stop, chance = threading.Event(), random.Random(15)

    def repeat() -> None:
        while not stop.is_set():
            work(chance)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_an_arena_that_is_rewritten_while_it_is_read_gives_bounded_data_and_no_error() -> None:
    fd = hostile_arena()
    reader, sink = ArenaReader(os.dup(fd), max_buffer_bytes=1 << 30), Sink()

    def rewrite(chance: random.Random) -> None:
        os.pwrite(fd, chance.randbytes(STRINGS_AT), 0)
        os.pwrite(fd, b"\xff" * STRINGS_AT, 0)
        for index in range(BUFFERS):
            make_ready(fd, index, chance.choice([0, 1, BUFFER_BYTES, 1 << 40, (1 << 64) - 1]))

    with meanwhile(rewrite):
        turn = 0
        while turn < 300 or not sink.sizes:  # the other thread may write nothing during 300 turns
            turn += 1
            reader.drain(sink, target_is_dead=turn % 2 == 0)
            assert reader.counts().records < 1 << 63
            reader.record_bytes()
            reader.clocks()
    reader.close()
    os.close(fd)
    assert max(sink.sizes) <= BUFFER_BYTES
    assert all(0 <= number < 1 << 63 for number in (*sink.sequences, *sink.records))
    assert sink.strings_bytes <= STRINGS_BYTES


def test_a_header_that_is_rewritten_after_the_first_look_moves_nothing() -> None:
    fd = hostile_arena()
    reader, sink = ArenaReader(os.dup(fd), max_buffer_bytes=1 << 30), Sink()
    os.pwrite(fd, b"\xff" * arena.FIXED.size, 0)
    assert reader.drain(sink) == BUFFERS * BUFFER_BYTES + STRINGS_BYTES
    assert sink.sizes == [BUFFER_BYTES] * BUFFERS
    reader.close()
    os.close(fd)


def test_holes_in_an_arena_become_no_memory_of_the_daemon() -> None:
    fd = hostile_arena()
    reader, sink = ArenaReader(os.dup(fd), max_buffer_bytes=1 << 30), Sink()
    before = os.fstat(fd).st_blocks
    assert reader.drain(sink) == BUFFERS * BUFFER_BYTES + STRINGS_BYTES
    assert os.fstat(fd).st_blocks == before
    reader.close()
    os.close(fd)


def test_of_a_large_buffer_nothing_is_kept_for_the_next_one() -> None:
    readers = [
        ArenaReader(hostile_arena(buffer_bytes=MAX_BUFFER_BYTES, buffers=1), max_buffer_bytes=MAX_BUFFER_BYTES)
        for _ in range(4)
    ]
    before = rss_bytes(os.getpid())
    for reader in readers:
        assert reader.drain(Sink()) == MAX_BUFFER_BYTES + STRINGS_BYTES
    assert rss_bytes(os.getpid()) - before < MAX_BUFFER_BYTES
    for reader in readers:
        reader.close()


def test_one_buffer_is_no_larger_than_what_the_daemon_makes_room_for() -> None:
    with pytest.raises(BadArena, match="its buffer size is out of range"):
        ArenaReader(hostile_arena(buffer_bytes=MAX_BUFFER_BYTES + 4096, buffers=1), max_buffer_bytes=1 << 40)


def test_an_arena_leaves_no_descriptor_behind() -> None:
    gc.collect()  # what other tests have left
    before = len(list(Path("/proc/self/fd").iterdir()))
    ArenaReader(hostile_arena(), max_buffer_bytes=1 << 30).close()
    with pytest.raises(BadArena):
        ArenaReader(hostile_arena(), max_buffer_bytes=1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_page_of_a_target_is_mapped() -> None:
    reader = ArenaReader(hostile_arena(), max_buffer_bytes=1 << 30)
    reader.drain(Sink())
    assert "memfd:hostile" not in Path("/proc/self/maps").read_text()
    reader.close()


def test_huge_pages_are_refused() -> None:
    fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, 2 << 20)
    fcntl.fcntl(fd, 1033, 0x2 | 0x4)
    with pytest.raises(BadArena, match="it has huge pages"):
        ArenaReader(fd, max_buffer_bytes=1 << 30)


def test_memory_that_cannot_be_written_is_refused() -> None:
    fd = hostile_arena()
    with pytest.raises(BadArena, match="it is not open for reading and writing"):
        ArenaReader(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), max_buffer_bytes=1 << 30)
    os.close(fd)


def test_memory_that_becomes_read_only_costs_its_own_capture() -> None:
    fd = hostile_arena()
    reader = ArenaReader(os.dup(fd), max_buffer_bytes=1 << 30)
    fcntl.fcntl(fd, 1033, 0x8)  # F_SEAL_WRITE, which a mapping of ours would have prevented
    with pytest.raises(BadArena, match="a buffer cannot be returned to the process"):
        reader.drain(Sink())
    reader.close()
    os.close(fd)


def test_pages_that_the_targets_userfaultfd_holds_back_are_not_waited_for() -> None:
    fd = hostile_arena()
    length = BUFFERS_AT + BUFFERS * BUFFER_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    userfault = libc.syscall(323 if os.uname().machine == "x86_64" else 282, os.O_CLOEXEC)
    assert userfault >= 0, os.strerror(ctypes.get_errno())
    with mmap.mmap(fd, length) as mapped:
        address = ctypes.addressof(view := ctypes.c_char.from_buffer(mapped))
        fcntl.ioctl(userfault, 0xC018AA3F, struct.pack("<QQQ", 0xAA, 0, 0))  # UFFDIO_API
        fcntl.ioctl(userfault, 0xC020AA00, struct.pack("<QQQQ", address, length, 1, 0))  # REGISTER, missing pages
        reader, sink = ArenaReader(os.dup(fd), max_buffer_bytes=1 << 30), Sink()
        assert reader.drain(sink) == BUFFERS * BUFFER_BYTES + STRINGS_BYTES
        reader.close()
        os.close(userfault)
        del view
    os.close(fd)


def test_bytes_that_are_claimed_and_not_there_count_for_nothing() -> None:
    fd = hostile_arena()
    os.pwrite(fd, b"\xff" * 8, arena.VALID_BYTES)
    reader = ArenaReader(fd, max_buffer_bytes=1 << 30)
    assert reader.counts().bytes == 0
    reader.drain(Sink())
    assert reader.counts().bytes == BUFFERS * BUFFER_BYTES
    reader.close()
