"""Connections to a helper service: its queue may be full, and somebody else may listen."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos import unix_peer
from kinetod.counters import messages
from kinetod.counters.counter_client import CountersService
from kinetod.supervise.helper_connection import NotOurService, connected
from kinetod.supervise.helper_service import own_socket

KIND = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with own_socket(tmp_path / "helper.sock") as sock:
        sock.listen(0)
        yield sock


def filled(listener: socket.socket) -> list[socket.socket]:
    """Connections that nobody has accepted, as many as there is room for."""
    waiting = []
    while True:
        sock = socket.socket(socket.AF_UNIX, KIND)
        waiting.append(sock)
        try:
            sock.connect(listener.getsockname())
        except BlockingIOError:
            return waiting


def test_a_service_whose_queue_is_full_is_waited_for(listener: socket.socket) -> None:
    async def run() -> None:
        waiting = filled(listener)
        connecting = asyncio.create_task(CountersService(Path(listener.getsockname())).connect())
        await asyncio.sleep(0)  # its first attempt finds the queue full
        assert not connecting.done()
        listener.setblocking(False)
        accepted = [listener.accept()[0] for _ in waiting[1:]]
        with await connecting as ours:
            theirs, _ = listener.accept()
            ours.send(b"x")
            assert theirs.recv(1) == b"x"
        for sock in (*waiting, *accepted, theirs):
            sock.close()

    asyncio.run(run())


def test_a_socket_of_somebody_else_is_refused_and_closed(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = os.geteuid() + 1
    monkeypatch.setattr(unix_peer, "credentials", lambda _sock: (1, stranger, stranger))
    with pytest.raises(NotOurService, match=f"the socket belongs to uid {stranger}, which is neither root nor") as told:
        asyncio.run(connected(Path(listener.getsockname())))
    assert told.value.uid == stranger
    theirs, _ = listener.accept()
    with theirs:
        assert theirs.recv(1) == b""


def test_a_service_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(connected(tmp_path / "none.sock"))


def test_what_cannot_be_decoded_is_quoted_in_part_and_printable() -> None:
    packet = messages.encode(messages.ListGpus())[:6] + b'{"type":"' + b"\\u0007A" * 2000 + b'"}'
    with pytest.raises(messages.BadCounterMessage, match="a message that cannot be decoded: ") as told:
        messages.request(packet)
    assert len(str(told.value)) < 600 and str(told.value).isprintable()
