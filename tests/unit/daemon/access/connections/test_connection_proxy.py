"""The front between clients and a server of the test that echoes."""

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from kinetod.access.connections import connection_proxy as front_module
from kinetod.access.connections import proxied_connection as joined_module
from kinetod.access.connections.connection_limits import BURST_CALLS_S, CALLS_A_REQUEST, NEXT_CALLS_S
from kinetod.access.connections.connection_proxy import PLAIN_SOCKET, ConnectionProxy, Listener, PrivateFolder
from kinetod.access.connections.proxied_connection import HEADERS, PREFACE
from kinetod.access.peers import Peer, UnknownPeer
from kinetod.base.errors import StartError
from kinetod.config.addresses import ListenAddress
from kinetod.permissions.role_policy import Via
from support.machine.descriptors import open_files
from support.waiting import scaled, soon

DEADLINE_S = scaled(10)
LOOPBACK = ListenAddress(host="127.0.0.1", port=0)
FAR = Peer(via=Via.TLS, address="192.0.2.7")


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
        listener = Listener(address=ListenAddress(path=self.path))
        self.front = ConnectionProxy(
            [listener],
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
        peer_limits = self.front.peer_limits
        assert not (self.front._silent or self.front._named or peer_limits._open or peer_limits._speaking), (
            "it is still counted"
        )
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


def test_who_may_not_connect_is_sent_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Peer] = []

    async def run() -> None:
        async with Parts(tmp_path, lets_in=lambda peer: peer.uid == 12345) as parts:
            monkeypatch.setattr(parts.front.peer_limits, "opened", counted.append)
            answer, writer = await parts.said(b"a")
            async with closing(writer):
                assert answer == b""
            assert parts.names == []
            assert parts.front._open == set()
            assert counted == []
            ours, theirs = socket.socketpair()
            with theirs:  # who has no uid is identified later, by a certificate or a token
                ours.setblocking(False)
                parts.front._admit(ours, Listener(address=LOOPBACK, tls=True), FAR)
                assert counted == [FAR]

    asyncio.run(run())
    assert f"uid {os.getuid()} is not allowed to connect" in caplog.text


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


def test_who_has_spoken_is_not_closed_for_those_that_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "MAX_SILENT_PER_PEER", 2)

    async def run() -> None:
        async with Parts(tmp_path) as parts:
            reader, writer = await parts.connect()
            writer.write(b"a")
            assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"a"
            silent = [await parts.connect() for _ in range(5)]
            for old, _ in silent[:3]:
                assert await asyncio.wait_for(old.read(), DEADLINE_S) == b""
            writer.write(b"b")
            assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"b"
            async with closing(writer, *(each for _, each in silent)):
                pass

    asyncio.run(run())


def test_the_end_closes_every_connection_and_removes_the_socket(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            speaking, speaker = await parts.connect()
            speaker.write(b"a")
            assert await asyncio.wait_for(speaking.readexactly(1), DEADLINE_S) == b"a"
            silent, other = await parts.connect()
            await soon(lambda: len(parts.front._open) == 2, "the connections are there")
            parts.front.close()
            assert not parts.path.exists()
            for reader in (speaking, silent):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
            async with closing(speaker, other):
                pass

    asyncio.run(run())


def test_a_connection_that_is_held_at_its_first_byte_is_joined_when_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            monkeypatch.setattr(parts.front.peer_limits, "joined", lambda client: client.hold())
            reader, writer = await parts.connect()
            writer.write(b"a")
            await soon(lambda: [each for each in parts.front._open if each.name], "the byte has arrived")
            (client,) = parts.front._open
            assert not client._joining
            client.release()
            assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"a"
            async with closing(writer):
                pass

    asyncio.run(run())


def test_of_many_connections_over_loopback_so_many_are_looked_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[socket.socket] = []

    async def look_up(sock: socket.socket, _door: Listener) -> None:
        looked_up.append(sock)

    async def run() -> None:
        parts = Parts(tmp_path)
        monkeypatch.setattr(parts.front, "_accept_tcp", look_up)
        for under_way, fits in ((front_module.MAX_LOOKED_UP, False), (front_module.MAX_LOOKED_UP - 1, True)):
            parts.front._looked_up = under_way
            ours, theirs = socket.socketpair()
            with ours, theirs:
                parts.front._accepted(ours, Listener(address=LOOPBACK))
                await asyncio.sleep(0)
                assert (ours.fileno() >= 0, ours in looked_up) == (fits, fits)
        parts.front.close()
        parts.private.close()

    asyncio.run(run())


def test_a_connection_that_cannot_be_taken_is_closed_and_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_arguments: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def run() -> None:
        async with Parts(tmp_path) as parts:
            monkeypatch.setattr(asyncio.get_running_loop(), "connect_accepted_socket", fail)
            reader, writer = await parts.connect()
            async with closing(writer):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""

    asyncio.run(run())


def test_silent_connections_count_as_open(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            writers = [(await parts.connect())[1] for _ in range(3)]
            await soon(lambda: len(parts.front._open) == 3, "the connections are there")
            async with closing(*writers):
                assert parts.front.peer_limits._open == {f"uid {os.getuid()}": 3}
                first = next(iter(parts.front._open))
                for _ in range(2):  # once is enough
                    parts.front.ended(first)
                    assert parts.front.peer_limits._open == {f"uid {os.getuid()}": 2}

    asyncio.run(run())


def test_a_connection_is_held_and_vouched_for_by_its_name_and_no_other(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            reader, writer = await parts.connect()
            writer.write(b"a")
            assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"a"
            (name,) = parts.names
            client = parts.front._named[name]
            parts.front.vouch("unix-abstract:kinetod-guessed", "eve")
            parts.front.hold("unix-abstract:kinetod-guessed", 100)
            assert (client.user, client._held) == ("", False)
            assert client._near.transport is not None
            assert not client._near.transport.get_extra_info("socket")._sock.getblocking()
            parts.front.vouch(name, "ada")
            parts.front.hold(name, 100)
            assert (client.user, client._held) == ("ada", True)
            writer.write(b"b")
            client._near.resume("joining")  # another reason that is gone leaves this one
            assert not client._near.transport.is_reading()
            client.release()
            assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"b"
            async with closing(writer):
                pass

    asyncio.run(run())


def test_a_connection_that_fails_is_logged_and_one_that_was_given_up_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise OSError("no memory")

    async def run() -> None:
        failing, given_up = asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(100))
        for task in (failing, given_up):
            task.add_done_callback(joined_module.log_failure)
        given_up.cancel()
        await asyncio.wait([failing, given_up])

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == ["a client's connection failed"]


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
            async with closing((await parts.connect())[1]):  # one that said nothing frees none
                await soon(lambda: len(parts.front._open) == 3, "the connection is there")
            await soon(lambda: len(parts.front._open) == 2, "it is gone")
            answer, three = await parts.said(b"c")
            assert answer == b""
            async with closing(one, three):
                pass
            await soon(lambda: parts.front.peer_limits.speaking <= 1, "a connection is free")
            answer, four = await parts.said(b"d")
            assert answer == b"d"
            async with closing(two, four):
                pass

    asyncio.run(run())


def test_a_side_that_does_not_read_is_not_read_for_until_it_does(tmp_path: Path) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            reader, writer = await parts.connect()
            writer.write(b"a")
            assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"a"
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
            for _ in range(sent // len(data)):
                await asyncio.wait_for(reader.readexactly(len(data)), DEADLINE_S)
            async with closing(writer):
                pass

    asyncio.run(run())


class OutOfDescriptors:
    """A listening socket that cannot accept the first connection at the first try."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.fileno, self.close = sock.fileno, sock.close
        self.tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._sock.accept()


def test_without_descriptors_clients_are_accepted_a_little_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front_module, "RETRY_ACCEPT_S", 0.01)

    async def run() -> None:
        async with Parts(tmp_path) as parts:
            (listener,) = parts.front._sockets
            monkeypatch.setattr(listener, "_sock", OutOfDescriptors(listener._sock))
            answer, writer = await parts.said(b"hello")
            async with closing(writer):
                assert answer == b"hello"

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept clients: Too many open files; retrying"
    ]


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
            assert problem.startswith(f"clients cannot connect: {parts.path} is gone and cannot be recreated: ")

    asyncio.run(run())


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o755)
    with pytest.raises(StartError, match="is accessible to other users; remove it"):
        PrivateFolder(tmp_path / "private")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="cannot create the folder"):
        PrivateFolder(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user: needs root")
def test_a_folder_that_another_user_has_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    os.chown(tmp_path / "private", 61001, 61001)
    with pytest.raises(StartError, match="is accessible to other users; remove it"):
        PrivateFolder(tmp_path / "private")


def test_sockets_that_were_left_behind_are_removed_at_the_start_and_all_at_the_end(tmp_path: Path) -> None:
    left = tmp_path / "private" / PLAIN_SOCKET
    left.parent.mkdir(mode=0o700)
    left.touch()
    folder = PrivateFolder(left.parent)
    assert not left.exists()
    left.touch()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_long_folder_has_short_names(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 150)
    deep.mkdir()
    folder = PrivateFolder(deep / "private")
    assert len(folder.socket_path(PLAIN_SOCKET)) < 107
    folder.close()
    assert list(deep.iterdir()) == []
    assert str(deep / "private") not in str(open_files(os.getpid()))


@pytest.mark.parametrize(
    ("listener", "via", "uid", "upstream"),
    [
        (Listener(address=LOOPBACK), Via.LOOPBACK, os.getuid(), PLAIN_SOCKET),
        (Listener(address=LOOPBACK, tls=True), Via.TLS, None, front_module.TLS_SOCKET),
        (Listener(address=LOOPBACK, tokens=True), Via.KUBERNETES, None, PLAIN_SOCKET),
        (Listener(address=LOOPBACK, tls=True, tokens=True), Via.KUBERNETES, None, front_module.TLS_TOKEN_SOCKET),
    ],
)
@pytest.mark.parametrize("room", [True, False])
def test_by_what_a_caller_over_tcp_is_known_is_the_doors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listener: Listener,
    via: Via,
    uid: int | None,
    upstream: str,
    room: bool,
) -> None:
    admitted: list[Peer] = []

    async def run() -> None:
        parts = Parts(tmp_path)
        monkeypatch.setattr(parts.front, "_admit", lambda _sock, _door, peer: admitted.append(peer))
        monkeypatch.setattr(parts.front.peer_limits, "may_open", lambda _peer: room)
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            accepted, (host, port) = server.accept()
            with accepted:
                await parts.front._accept_tcp(accepted, listener)
                assert (accepted.fileno() >= 0) is room
        address = f"{host}:{port}" if via is Via.LOOPBACK else host
        assert [(peer.via, peer.uid, peer.address) for peer in admitted] == ([(via, uid, address)] if room else [])
        assert parts.front._looked_up == 0
        client.close()
        parts.front.close()
        parts.private.close()

    asyncio.run(run())
    assert listener.upstream == upstream


def test_a_peer_that_may_open_no_more_is_closed_unheard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with Parts(tmp_path) as parts:
            monkeypatch.setattr(parts.front.peer_limits, "may_open", lambda _peer: False)
            answer, writer = await parts.said(b"a")
            async with closing(writer):
                assert (answer, parts.names, caplog.messages) == (b"", [], [])

    asyncio.run(run())


def test_a_listener_over_tcp_is_neither_mended_nor_unlinked(tmp_path: Path) -> None:
    async def run() -> None:
        parts = Parts(tmp_path)
        parts.front._listeners = [Listener(address=LOOPBACK)]
        await parts.front.start()
        assert parts.front.mend() == []
        (listening,) = parts.front._sockets
        host, port = listening._sock.getsockname()
        socket.create_connection((host, port)).close()
        with pytest.raises(StartError, match=rf"cannot listen on {host}:{port}: Address already in use;"):
            await front_module._bound(ListenAddress(host=host, port=port), 0)
        parts.front.close()
        assert parts.front._sockets == []
        parts.private.close()

    asyncio.run(run())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_an_address_of_ipv6_takes_no_ipv4() -> None:
    async def run() -> None:
        for sock in await front_module._bound(ListenAddress(host="::", port=0), 0):
            with sock:
                assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1

    asyncio.run(run())


@pytest.mark.parametrize("address", [LOOPBACK, ListenAddress(path=Path("/s"))])
def test_who_is_gone_before_being_looked_up_is_not_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: ListenAddress
) -> None:
    def nobody(*_ends: object) -> Peer:
        raise UnknownPeer("has disconnected")

    async def run() -> None:
        parts = Parts(tmp_path)
        monkeypatch.setattr(front_module, "of_local_at_once", lambda *_ends: None)
        for name in ("of_local", "of_unix"):
            monkeypatch.setattr(front_module, name, nobody)
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            accepted, _ = server.accept()
            parts.front._accepted(accepted, Listener(address=address))
            await soon(lambda: accepted.fileno() == -1, "it is closed")
        assert (parts.front._looked_up, parts.front._open) == (0, set())
        parts.front.close()
        parts.private.close()

    asyncio.run(run())
    assert caplog.messages == [f"a connection to {address} was refused: has disconnected"]
