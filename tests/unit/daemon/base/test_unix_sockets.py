"""Descriptors of strangers, and sockets that were left behind."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kineto_protos import unix_peer
from kinetod.base import unix_sockets
from kinetod.base.errors import StartError
from support.waiting import until

ADA, BOB = 61001, 61002
TURNS = """
import asyncio, ctypes, selectors, signal
from kinetod.base.unix_sockets import BriefTurns
while_waiting, wait = [], selectors.EpollSelector.select
def noted(self, timeout=None):
    while_waiting.append(signal.getitimer(signal.ITIMER_REAL))
    return wait(self, timeout)
selectors.EpollSelector.select = noted
async def turn():
    assert ctypes.CDLL(None).pause() == -1  # waits for a signal
    await asyncio.sleep(0)
loop = asyncio.SelectorEventLoop(BriefTurns())
loop.run_until_complete(turn())
loop.close()
assert set(while_waiting) == {(0.0, 0.0)} == {signal.getitimer(signal.ITIMER_REAL)}, while_waiting
"""


def test_what_waits_in_a_turn_of_the_loop_is_interrupted_and_nothing_else() -> None:
    subprocess.run([sys.executable, "-c", TURNS], check=True)


def test_what_strangers_pass_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close

    def noted(fd: int) -> None:
        closed.append(fd)
        close(fd)

    monkeypatch.setattr(os, "close", noted)
    ends = os.pipe()
    passed = [os.memfd_create("one"), ends[0], os.memfd_create("other"), ends[1]]
    unix_sockets.close_strangers(passed, uid=ADA)
    until(lambda: unix_sockets.descriptors_space(ADA), "descriptors of this user are taken again")
    assert sorted(closed) == sorted(passed)


def test_while_a_descriptor_of_a_user_does_not_close_none_of_theirs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    may_close, ends, close = threading.Event(), os.pipe(), os.close
    monkeypatch.setattr(os, "close", lambda fd: (may_close.wait(), close(fd)))
    unix_sockets.close_strangers(ends, uid=ADA)
    assert [unix_sockets.descriptors_space(uid) > 0 for uid in (ADA, BOB)] == [False, True]
    may_close.set()
    until(lambda: unix_sockets.descriptors_space(ADA), "descriptors of this user are taken again")


def test_so_many_users_have_a_thread_that_closes_and_shared_memory_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    monkeypatch.setattr(unix_sockets, "_closing", set(range(unix_sockets.MAX_CLOSING - 1)))
    unix_sockets.close_strangers([os.memfd_create("m")], uid=ADA)
    assert unix_sockets.descriptors_space(ADA) > 0
    fd = os.open("/dev/null", os.O_RDONLY)
    for uid in (ADA, BOB):
        unix_sockets.close_strangers([fd], uid)
        assert unix_sockets.descriptors_space(uid) == 0
    assert started == [f"closing for uid {ADA}"]
    os.close(fd)


def test_descriptors_are_what_came_as_such() -> None:
    seven = (7).to_bytes(4, sys.byteorder)
    came = [
        (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, seven * 3),
        (socket.IPPROTO_IP, socket.SCM_RIGHTS, seven),
        (socket.SOL_SOCKET, socket.SCM_RIGHTS, seven * 2 + b"cut"),
    ]
    assert unix_sockets.descriptors(came) == [7, 7]


def test_packets_are_waited_for_and_so_is_room_for_them() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setblocking(False)
        with ours, theirs:
            received = asyncio.create_task(unix_sockets.receive(ours, 16))
            await asyncio.sleep(0)
            with Path("/dev/null").open("rb") as file:
                await unix_sockets.send(theirs, b"a packet", [file.fileno()], 60)
            packet, (fd,) = await received
            assert (packet, os.fstat(fd).st_rdev) == (b"a packet", Path("/dev/null").stat().st_rdev)
            os.close(fd)
            with contextlib.suppress(BlockingIOError):
                while theirs.send(b"x" * 1000):
                    pass
            with pytest.raises(TimeoutError):
                await unix_sockets.send(theirs, b"late", [], 0.001)
            sent = asyncio.create_task(unix_sockets.send(theirs, b"last", [], 60))
            await asyncio.sleep(0)
            while (await unix_sockets.receive(ours, 1000))[0] != b"last":
                pass
            await sent

    asyncio.run(run())


def test_shared_memory_is_told_from_files(tmp_path: Path) -> None:
    ends = os.pipe()
    sealed, open_to_seals = os.memfd_create("a"), os.memfd_create("b", os.MFD_ALLOW_SEALING)
    assert [unix_sockets.is_memfd(fd) for fd in (sealed, open_to_seals, *ends)] == [True, True, False, False]
    for fd in (sealed, open_to_seals, *ends):
        os.close(fd)
    assert not unix_sockets.is_memfd(sealed)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_a_socket_is_removed_once_nobody_has_it_open(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(str(path))
        if kind != socket.SOCK_DGRAM:
            sock.listen()
        with pytest.raises(StartError, match="something is already listening on"):
            unix_sockets.remove_stale_socket(path)
    unix_sockets.remove_stale_socket(path)
    assert not path.exists()
    unix_sockets.remove_stale_socket(path)


@pytest.mark.parametrize(
    "make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("other")], ids=["file", "folder", "link to a socket"]
)
def test_what_is_no_socket_stays(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "other"))
    make(path)
    with pytest.raises(StartError, match="exists but is not a socket"):
        unix_sockets.remove_stale_socket(path)
    assert os.path.lexists(path)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_socket_is_open_to_those_whom_its_mode_names(tmp_path: Path, mode: int) -> None:
    old_mask, path = os.umask(0o027), tmp_path / "s"
    try:
        for _ in range(2):  # the second one takes the place of one that was left
            with unix_sockets.listen_at(path, socket.SOCK_SEQPACKET, mode=mode, backlog=1) as listener:
                assert (path.stat().st_mode & 0o777, listener.get_inheritable()) == (mode, False)
                with pytest.raises(BlockingIOError):
                    listener.accept()
        with pytest.raises(StartError, match="/none/s: No such file or directory"):
            unix_sockets.listen_at(tmp_path / "none/s", socket.SOCK_STREAM, mode=mode, backlog=1)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(old_mask)


@pytest.mark.parametrize("taken", [True, False])
def test_descriptors_are_refused_where_none_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    refusing: list[int] = []
    monkeypatch.setattr(unix_peer, "refuse_descriptors", lambda sock: refusing.append(sock.fileno()))
    path = tmp_path / "s"
    with unix_sockets.listen_at(path, socket.SOCK_STREAM, mode=0, backlog=1, takes_descriptors=taken) as listener:
        assert refusing == [] if taken else [listener.fileno()]


def test_a_socket_that_cannot_be_tried_stays(tmp_path: Path) -> None:
    folder = tmp_path / ("f" * 100)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(folder):
        sock.bind("s")
    with pytest.raises(StartError, match=r"f/s is in use: AF_UNIX path too long"):
        unix_sockets.remove_stale_socket(folder / "s")
    assert (folder / "s").is_socket()
