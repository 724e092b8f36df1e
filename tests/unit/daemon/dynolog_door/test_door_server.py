"""Connections: one request and one answer each, by who the kernel says it is; a taken port is waited for."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kinetod.access import peers
from kinetod.access.peers import Peer
from kinetod.config.addresses import ListenAddress
from kinetod.dynolog_door import door_server
from kinetod.dynolog_door.door_server import ALL, CONNECTIONS_PER_SECOND, MAX_HOLD_S, OWN, ClientLimits, DynologServer
from kinetod.dynolog_door.door_service import Answer, BadFrame
from kinetod.permissions.role_policy import Via
from support.dynolog import client, recorded
from support.waiting import soon

LOOPBACK = ListenAddress(host="127.0.0.1", port=0)


class Answering:
    """Notes who asked what."""

    def __init__(self) -> None:
        self.server: DynologServer | None = None
        self.asked: list[tuple[Any, bytes]] = []
        self.understands = True

    async def __call__(self, connection: str, body: bytes) -> Answer:
        assert self.server is not None
        self.asked.append((self.server.peer(connection), body))
        if not self.understands:
            raise BadFrame("unknown function")
        return {"status": 1}


def served(
    work: Callable[[DynologServer, Answering], Awaitable[None]], address: ListenAddress = LOOPBACK, **how: Any
) -> None:
    async def played() -> None:
        answering = Answering()
        limits = ClientLimits(lambda peer: False)
        options: dict[str, Any] = {"socket_mode": 0o600, "lets_in": lambda _peer: True, **how}
        server = answering.server = DynologServer(address, limits, **options)
        await server.start(answering)
        try:
            await work(server, answering)
        finally:
            await server.stop()

    asyncio.run(played())


def test_a_client_on_this_host_is_who_owns_its_socket() -> None:
    async def work(server: DynologServer, answering: Answering) -> None:
        (address,) = server.listening_at
        assert await asyncio.to_thread(client.asked, address, recorded.STATUS) == {"status": 1}
        ((peer, body),) = answering.asked
        assert (peer.uid, peer.via, body) == (os.getuid(), Via.DYNOLOG, recorded.STATUS[4:])

    served(work)


def test_the_kernels_table_serves_where_it_cannot_be_asked_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_ends: object) -> Any:
        raise PermissionError(1, "no AF_NETLINK")

    monkeypatch.setattr(peers, "owner_of", refused)

    async def work(server: DynologServer, answering: Answering) -> None:
        await asyncio.to_thread(client.asked, server.listening_at[0], recorded.STATUS)
        assert answering.asked[0][0].uid == os.getuid()

    served(work)


def test_a_client_on_another_host_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_server, "_is_local", lambda _near, _far: False)

    async def work(server: DynologServer, answering: Answering) -> None:
        await asyncio.to_thread(client.asked, server.listening_at[0], recorded.STATUS)
        peer = answering.asked[0][0]
        assert (peer.uid, peer.key) == (None, "127.0.0.1")

    served(work)


def test_a_unix_socket_knows_its_clients_process(tmp_path: Path) -> None:
    address = ListenAddress(path=tmp_path / "door")

    async def work(server: DynologServer, answering: Answering) -> None:
        assert await asyncio.to_thread(client.asked, str(address), recorded.STATUS) == {"status": 1}
        assert answering.asked[0][0].pid == os.getpid()
        assert server.listening_at == [str(address)]

    served(work, address)
    assert not (tmp_path / "door").exists()


def test_what_is_no_request_ends_the_connection_without_an_answer() -> None:
    async def work(server: DynologServer, answering: Answering) -> None:
        address = server.listening_at[0]
        for sent in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\0", b"\xff\xff\xff\xff{}"):
            assert await asyncio.to_thread(client.raw_answer, address, sent) == b""
        assert answering.asked == []
        answering.understands = False
        assert await asyncio.to_thread(client.raw_answer, address, recorded.STATUS) == b""

    served(work)


def test_a_request_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_server, "REQUEST_S", 0.05)

    async def work(server: DynologServer, answering: Answering) -> None:
        for begun in (b"", recorded.STATUS[:3], recorded.STATUS[:10]):
            with client.connected(server.listening_at[0]) as sock:
                sock.sendall(begun)
                assert await asyncio.to_thread(sock.recv, 1) == b""
        assert answering.asked == []

    served(work)


def test_whom_the_daemon_does_not_serve_is_not_read_from() -> None:
    async def work(server: DynologServer, answering: Answering) -> None:
        assert await asyncio.to_thread(client.raw_answer, server.listening_at[0], recorded.STATUS) == b""
        assert answering.asked == []

    served(work, lets_in=lambda _peer: False)


def test_a_taken_port_is_explained_and_opened_when_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def work(server: DynologServer, _answering: Answering) -> None:
            assert server.listening_at == []
            assert f"127.0.0.1:{port} is in use by process {os.getpid()}" in server.problem
            assert f"process {os.getpid()}" in await server.holder()
            taken.close()
            await soon(lambda: not server.problem, "the door opens")
            assert await asyncio.to_thread(client.asked, server.listening_at[0], recorded.STATUS) == {"status": 1}

        served(work, ListenAddress(host="127.0.0.1", port=port), retry_s=0.01)


def free_of_ipv4() -> socket.socket:
    """Listens at a port that nobody has at the other address of localhost."""
    while True:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", taken.getsockname()[1])).close()
            return taken
        taken.close()


def test_localhost_is_both_families_or_none() -> None:
    with free_of_ipv4() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(door_server.PortTaken):
            door_server.listening(ListenAddress(host="localhost", port=port), 0o600)
    sockets = door_server.listening(ListenAddress(host="localhost", port=port), 0o600)
    assert [sock.getsockname()[:2] for sock in sockets] == [("127.0.0.1", port), ("::1", port)]
    for sock in sockets:
        sock.close()


def test_a_host_without_ipv6_is_served_at_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_server, "_LOCALHOST", ("127.0.0.1", "2001:db8::1"))
    (sock,) = door_server.listening(ListenAddress(host="localhost", port=0), 0o600)
    sock.close()
    with pytest.raises(OSError):
        door_server.listening(ListenAddress(host="2001:db8::1", port=0), 0o600)


ADA, BOB, ROOT = (Peer(via=Via.DYNOLOG, uid=uid) for uid in (1000, 1001, 0))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def with_limits(play: Callable[[ClientLimits, Clock], None]) -> None:
    async def played() -> None:
        clock = Clock()
        play(ClientLimits(lambda peer: peer.uid == 0, clock), clock)

    asyncio.run(played())


def test_a_client_has_so_many_connections_and_may_have_another_when_one_is_closed() -> None:
    def play(limits: ClientLimits, _clock: Clock) -> None:
        assert [limits.may_open(ADA) for _ in range(OWN + 1)] == [True] * OWN + [False]
        assert limits.may_open(BOB)
        limits.closed(ADA)
        assert limits.may_open(ADA)

    with_limits(play)


def test_all_clients_together_leave_room_for_a_newcomer_and_for_root() -> None:
    def play(limits: ClientLimits, _clock: Clock) -> None:
        peers = [Peer(via=Via.DYNOLOG, address=f"192.0.2.{number}") for number in range(ALL // OWN)]
        assert all(limits.may_open(peer) for peer in peers for _ in range(OWN))
        assert not limits.may_open(peers[0])
        assert limits.may_open(BOB)
        assert not limits.may_open(BOB)  # the reserve is for who has none
        assert all(limits.may_open(ROOT) for _ in range(OWN + 1))

    with_limits(play)


def test_connections_are_made_at_a_limited_rate() -> None:
    def play(limits: ClientLimits, clock: Clock) -> None:
        def opened(peer: Peer, count: int) -> int:
            done = 0
            for _ in range(count):
                if limits.may_open(peer):
                    limits.closed(peer)
                    done += 1
            return done

        assert opened(ADA, 1000) == 4 * CONNECTIONS_PER_SECOND
        assert (opened(BOB, 10), opened(ROOT, 1000)) == (10, 1000)
        clock.now += 1
        assert opened(ADA, 1000) == CONNECTIONS_PER_SECOND

    with_limits(play)


def test_a_client_that_was_one_too_many_is_read_later_and_others_are_not() -> None:
    def play(limits: ClientLimits, clock: Clock) -> None:
        limits.hold(ADA, 0.5)
        limits.hold(ADA, 0.5)
        limits.hold(ROOT, 5)
        assert (limits.wait_s(ADA), limits.wait_s(BOB), limits.wait_s(ROOT)) == (1.0, 0.0, 0.0)
        limits.hold(ADA, 1000)
        assert limits.wait_s(ADA) == MAX_HOLD_S
        clock.now += MAX_HOLD_S
        assert limits.wait_s(ADA) == 0.0

    with_limits(play)
