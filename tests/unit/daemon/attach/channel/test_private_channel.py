"""Finding the channel that a target has opened. The targets are this process and small children of it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kineto_agent
import kinetod
import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Deadline
from kinetod.attach.channel.private_channel import await_channel
from kinetod.processes import credentials
from support.waiting import scaled

NOBODY = 65534


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    opened: list[int] = []
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def offer(descriptors: list[int], token: int, number: int) -> None:
    descriptors.append(os.memfd_create(f"kineto-{token}-{number}"))


def test_the_named_end_is_taken(descriptors: list[int]) -> None:
    token = time.time_ns()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        offer(descriptors, token, theirs.fileno())
        with await_channel(os.getpid(), token, Deadline(5)) or pytest.fail() as taken:
            theirs.close()
            taken.send(b"hello")
            assert ours.recv(10) == b"hello"
            assert not taken.get_inheritable()


def test_a_channel_that_was_made_as_another_user_is_none(descriptors: list[int]) -> None:
    token = time.time_ns()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        offer(descriptors, token, theirs.fileno())
        own = credentials.read(os.getpid())
        (await_channel(os.getpid(), token, Deadline(5), own) or pytest.fail()).close()
        other = replace(own, uids=(own.uid + 1,) * 4)
        with pytest.raises(AttachError, match=f"its channel was created by uid {own.uid}") as caught:
            await_channel(os.getpid(), token, Deadline(5), other)
    assert caught.value.code is AttachCode.REPLACED


def test_one_look_is_taken_even_without_time() -> None:
    begin = time.monotonic()
    assert await_channel(os.getpid(), 1, Deadline(0)) is None
    assert time.monotonic() - begin < scaled(10)


def test_the_wait_ends_with_the_deadline() -> None:
    begin = time.monotonic()
    assert await_channel(os.getpid(), 1, Deadline(0.1)) is None
    assert 0.1 <= time.monotonic() - begin < scaled(10)


def test_a_channel_of_another_token_is_not_taken(descriptors: list[int]) -> None:
    offer(descriptors, 12, 0)
    assert await_channel(os.getpid(), 1, Deadline(0)) is None


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_of_another_kind_is_no_channel(descriptors: list[int], kind: socket.SocketKind) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        offer(descriptors, 5, theirs.fileno())
        with pytest.raises(AttachError, match="not its own") as caught:
            await_channel(os.getpid(), 5, Deadline(0))
    assert caught.value.code is AttachCode.FAILED


def test_a_file_is_no_channel(descriptors: list[int]) -> None:
    offer(descriptors, 5, 0)
    descriptors.append(os.open("/dev/null", os.O_RDONLY))
    offer(descriptors, 6, descriptors[-1])
    with pytest.raises(AttachError, match="is not a socket") as caught:
        await_channel(os.getpid(), 6, Deadline(0))
    assert caught.value.code is AttachCode.FAILED


def test_a_number_that_names_nothing_has_been_closed_by_the_program(descriptors: list[int]) -> None:
    offer(descriptors, 5, 99999)
    with pytest.raises(AttachError, match="it closes descriptors that it did not open") as caught:
        await_channel(os.getpid(), 5, Deadline(0))
    assert caught.value.code is AttachCode.UNSUITABLE


def test_a_socket_that_another_process_made_is_no_channel(descriptors: list[int]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        name = f"import os; os.memfd_create('kineto-7-{theirs.fileno()}'); input()"
        command = [sys.executable, "-c", name]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])
        with child, pytest.raises(AttachError, match=f"not its own .created by process {os.getpid()}"):
            await_channel(child.pid, 7, Deadline(20))


def test_a_process_that_has_ended_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(AttachError, match=f"process {child.pid} has ended") as caught:
        await_channel(child.pid, 1, Deadline(5))
    assert caught.value.code is AttachCode.GONE


def test_a_process_that_ends_meanwhile_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert await_channel(child.pid, 1, Deadline(0)) is None
        child.stdin.close()
        with pytest.raises(AttachError) as caught:
            await_channel(child.pid, 1, Deadline(20))
    assert caught.value.code is AttachCode.GONE


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_process_of_another_user_is_not_permitted(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from kinetod.attach.channel.private_channel import await_channel\n"
        "from kinetod.attach.attach_types import AttachError, Deadline\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "try: await_channel(int(sys.argv[1]), 1, Deadline(1))\n"
        "except AttachError as exc: print(exc.code.value, exc.reason)\n"
    )
    roots = [str(Path(package.__path__[0]).parent) for package in (kineto_agent, kinetod)]
    done = subprocess.run(
        [sys.executable, "-c", code, str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.stdout.startswith(f"ATTACH_NOT_PERMITTED process {os.getpid()}: /proc/{os.getpid()}/fd cannot be read")
    assert "run kinetod as root or as the owner" in done.stdout
