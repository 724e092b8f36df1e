"""Descriptors of ours, where the program closes numbers that it did not open."""

import os
from pathlib import Path
from typing import Iterator, Tuple

import pytest
from kineto_agent.system import descriptors
from support.agent.plugins import sealed_bytes
from support.agent.stack_recorder import Recorder, prepared

Pipe = Tuple[int, int]


@pytest.fixture
def theirs() -> Iterator[Pipe]:
    """A pipe of the program."""
    reader, writer = os.pipe()
    yield (reader, writer)
    os.close(reader)
    os.close(writer)


def taken(number: int, theirs: Pipe) -> bool:
    """Whether that number still names the program's pipe; it is closed then."""
    still = os.fstat(number).st_ino == os.fstat(theirs[0]).st_ino
    os.close(number)
    return still


def test_a_number_that_the_program_has_used_anew_is_not_closed(theirs: Pipe) -> None:
    ours, other = descriptors.pipe()
    known = descriptors.identity(ours)
    os.dup2(theirs[0], ours)
    descriptors.close_ours(ours, known)
    assert taken(ours, theirs)
    descriptors.close_ours(other, known)
    assert descriptors.identity(other) == descriptors.NOBODY


def test_an_arena_made_in_c_does_not_close_what_the_program_has_put_in_its_place(theirs: Pipe) -> None:
    session = prepared()
    os.dup2(theirs[0], session.arena_fd)
    number = session.arena_fd
    session.close()
    assert taken(number, theirs)


def test_a_recording_whose_descriptors_the_program_takes_goes_on_and_touches_none(theirs: Pipe) -> None:
    recorder = Recorder()
    number = recorder.session.arena_fd
    os.dup2(theirs[1], number)
    recorder.wait(3)
    assert recorder.stop()
    recorder.close()
    os.set_blocking(theirs[0], False)
    with pytest.raises(BlockingIOError):
        os.read(theirs[0], 1)
    assert taken(number, theirs)


def test_what_stays_lies_above_the_lowest_free_number() -> None:
    lowest = os.dup(0)
    os.close(lowest)
    pipe = descriptors.pipe()
    known = descriptors.identity(pipe[0])
    again = os.dup(0)
    os.close(again)
    for number in pipe:
        descriptors.close_ours(number, known)
    assert again == lowest < min(pipe)


def test_a_file_and_a_folder_are_read_as_python_reads_them() -> None:
    assert descriptors.read_file("/proc/self/comm", 64) == Path("/proc/self/comm").read_bytes()
    assert sorted(descriptors.list_folder("/usr")) == sorted(entry.name for entry in Path("/usr").iterdir())
    with pytest.raises(FileNotFoundError):
        descriptors.read_file("/nowhere", 64)
    with pytest.raises(NotADirectoryError):
        descriptors.list_folder("/proc/self/comm")


def test_only_a_sealed_memfd_is_taken_for_what_we_were_sent() -> None:
    sent, plain = sealed_bytes(b"sent"), descriptors.memfd("plain", 3)
    reader, writer = os.pipe()
    try:
        assert descriptors.received_memfd(sent) == descriptors.identity(sent) != descriptors.NOBODY
        assert [descriptors.received_memfd(number) for number in (plain, reader, 99999)] == [descriptors.NOBODY] * 3
    finally:
        for number in (sent, plain, reader, writer):
            os.close(number)
