"""The front between clients and a server of the test that echoes."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from kinetod.access.connections import connection_proxy as front_module
from kinetod.access.connections import proxied_connection as joined_module
from kinetod.access.connections.connection_limits import BURST_CALLS_S, CALLS_A_REQUEST, NEXT_CALLS_S
from kinetod.access.connections.connection_proxy import PLAIN_SOCKET, Door, Front, PrivateFolder
from kinetod.access.connections.http2_streams import HEADERS, PREFACE
from kinetod.access.peers import Peer
from kinetod.base.errors import StartError
from kinetod.config.addresses import ListenAddress
from kinetod.permissions.role_policy import Via
from support.waiting import scaled, soon

DEADLINE_S = scaled(10)


class Parts:
    """A front at a socket, and an echo in the place of gRPC that notes who connects."""

    def __init__(
        self,
        folder: Path,
        max_per_peer: int = 100,
        lets_in: Callable[[Peer], bool] = lambda _: True,
        *,
        is_admin: Callable[[Peer], bool] = lambda _: False,
        requests_per_second: int = 10_000,
    ) -> None:
        self.path = folder / "front.sock"
        self.private = PrivateFolder(folder / "private")
        door = Door(address=ListenAddress(path=self.path))
        self.front = Front(
            [door],
            self.private,
            socket_mode=0o600,
            lets_in=lets_in,
            max_per_peer=lambda: max_per_peer,
            requests_per_second=lambda: requests_per_second,
            is_admin=is_admin,
        )
        self.names: list[str] = []
        self.echoing = 0
        self.reading = asyncio.Event()
        self.reading.set()

    async def __aenter__(self) -> "Parts":
        self.server = await asyncio.start_unix_server(self._echo, self.private.socket_path(PLAIN_SOCKET))
        await self.front.start()
        return self

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.names.append("unix-abstract:" + writer.get_extra_info("peername")[1:].decode())
        self.echoing += 1
        async with closing(writer):
            with contextlib.suppress(ConnectionError):
                while True:
                    await self.reading.wait()
                    if not (data := await reader.read(1 << 16)):
                        break
                    writer.write(data)
                    await writer.drain()
        self.echoing -= 1

    async def __aexit__(self, *_exc: object) -> None:
        self.front.close()
        await soon(lambda: not (self.front._open or self.echoing), "no connection is left")
        self.server.close()
        self.private.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_unix_connection(str(self.path)), DEADLINE_S)

    async def said(self, text: bytes) -> tuple[bytes, asyncio.StreamWriter]:
        """What comes back of a text; empty if the connection is closed."""
        reader, writer = await self.connect()
        writer.write(text)
        try:
            return await asyncio.wait_for(reader.readexactly(len(text)), DEADLINE_S), writer
        except (asyncio.IncompleteReadError, ConnectionError):
            return b"", writer


@contextlib.asynccontextmanager
async def closing(*writers: asyncio.StreamWriter) -> AsyncIterator[None]:
    yield
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def test_what_a_client_sends_arrives_and_its_name_leads_to_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            answer, writer = await parts.said(b"x" * 3_000_000)
            async with closing(writer):
                assert answer == b"x" * 3_000_000
                (name,) = parts.names
                peer = parts.front.peer(name)
                assert peer is not None
                assert (peer.via, peer.uid, peer.pid) == (Via.UNIX, os.getuid(), os.getpid())
                assert parts.front.peer("unix:") is None
            await soon(lambda: parts.front.peer(name) is None, "the connection is forgotten")

    asyncio.run(run())


def test_two_connections_have_names_that_nobody_can_guess(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            _, one = await parts.said(b"a")
            _, two = await parts.said(b"b")
            async with closing(one, two):
                assert len(set(parts.names)) == 2
                assert all(len(name.rpartition("-")[2]) == 32 for name in parts.names)

    asyncio.run(run())


def test_who_may_not_connect_is_sent_away(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path, lets_in=lambda peer: peer.uid == 12345) as parts:
            answer, writer = await parts.said(b"a")
            async with closing(writer):
                assert answer == b""
            assert parts.names == []

    asyncio.run(run())


def test_a_thousand_silent_connections_keep_nobody_out(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path, is_admin=lambda _: True) as parts:
            silent = [socket.socket(socket.AF_UNIX) for _ in range(1000)]
            for each in silent:
                each.setblocking(False)
                await asyncio.get_running_loop().sock_connect(each, str(parts.path))
            answer, writer = await parts.said(b"hello")
            async with closing(writer):
                assert answer == b"hello"
            assert len(parts.front._open) <= front_module.MAX_SILENT_PER_PEER + 2
            for each in silent:
                each.close()
            await soon(lambda: not parts.front._open, "the silent connections are gone")

    asyncio.run(run())


def test_a_silent_connection_is_closed_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_module, "FIRST_BYTE_S", 0.05)

    async def run() -> None:
        async with Parts(tmp_path) as parts:
            reader, writer = await parts.connect()
            async with closing(writer):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
            assert parts.names == []

    asyncio.run(run())


def test_a_peer_has_so_many_connections_and_gets_another_for_one_that_it_closes(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path, max_per_peer=2) as parts:
            _, one = await parts.said(b"a")
            _, two = await parts.said(b"b")
            answer, three = await parts.said(b"c")
            assert answer == b""
            async with closing(one, three):
                pass
            await soon(lambda: parts.front.crowd.speaking <= 1, "a connection is free")
            answer, four = await parts.said(b"d")
            assert answer == b"d"
            async with closing(two, four):
                pass

    asyncio.run(run())


def test_a_side_that_does_not_read_is_not_read_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            _, writer = await parts.said(b"a")
            parts.reading.clear()
            writer.transport.set_write_buffer_limits(0)
            data = bytes(1 << 20)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while True:
                    writer.write(data)
                    sent += len(data)
                    await asyncio.wait_for(writer.drain(), 0.2)
            assert sent < 10 * joined_module.HIGH_WATER_BYTES
            parts.reading.set()
            writer.transport.abort()

    asyncio.run(run())


def test_calls_beyond_what_their_maker_may_begin_arrive_later_and_whole(tmp_path: Path) -> None:
    call = bytes([0, 0, 4, HEADERS, 5, 0, 0, 0, 1]) + b"text"

    async def run() -> None:
        async with Parts(tmp_path, requests_per_second=10) as parts:
            began = time.monotonic()
            said = PREFACE + 20 * call
            answer, writer = await parts.said(said)
            async with closing(writer):
                assert answer == said
                granted_a_second = CALLS_A_REQUEST * 10
                assert time.monotonic() - began > 20 / granted_a_second - BURST_CALLS_S - NEXT_CALLS_S

    asyncio.run(run())


def test_a_socket_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            assert parts.front.mend() == []
            parts.path.unlink()
            assert parts.front.mend() == []
            answer, writer = await parts.said(b"hello")
            async with closing(writer):
                assert answer == b"hello"
            parts.path.unlink()
            parts.path.write_text("no socket")
            (problem,) = parts.front.mend()
            assert problem.startswith(f"clients cannot connect: {parts.path} is gone; ")

    asyncio.run(run())


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o755)
    with pytest.raises(StartError, match="is accessible to other users; remove it"):
        PrivateFolder(tmp_path / "private")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="cannot create the folder"):
        PrivateFolder(tmp_path / "link")


def test_a_long_folder_has_short_names(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 150)
    deep.mkdir()
    folder = PrivateFolder(deep / "private")
    assert len(folder.socket_path(PLAIN_SOCKET)) < 107
    folder.close()
    assert list(deep.iterdir()) == []
