"""Joins a client's connection to one of ours to gRPC, and holds back calls that exceed the client's limits.

Theory of operation
    The connection to gRPC is made when the first byte has arrived. From then on, what one end receives goes to the
    other; if one side does not read, we stop reading from the other. On an unencrypted connection, the calls that
    the client starts are counted by the HEADERS frames of HTTP/2 that it sends (RFC 9113, 4.1 and 6.2): those beyond
    what `connection_limits` grants wait here, at most one read of them, and nothing more is read until they have
    passed. Nothing else of HTTP/2 is examined. Anything that is not HTTP/2 passes: gRPC closes such a connection.
"""

import asyncio
import logging
import secrets
import socket
from typing import Protocol, cast

from kinetod.access.connections.connection_limits import PeerLimits
from kinetod.access.peers import Peer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9  # of a frame: 3 of length, 1 of type, 1 of flags, 4 of the stream
HEADERS = 1  # the frame type
log = logging.getLogger(__name__)
FIRST_BYTE_S = 5.0
LINGER_S = 10.0
HIGH_WATER_BYTES = 1 << 20


class Streams:
    """Counts the streams of one connection, from its first byte on."""

    def __init__(self) -> None:
        self._preface = PREFACE  # the part of it still to come
        self._foreign = False
        self._begun = b""  # of a frame's header that has not arrived completely
        self._payload = 0  # bytes of the frame's payload still to come

    def cut(self, data: bytes, most: int) -> tuple[int, int]:
        """How many bytes may pass so that at most `most` calls begin, and how many begin in them.

        These bytes count as passed: the next call takes what follows.
        """
        if self._foreign:
            return len(data), 0
        at = self._past_preface(data)
        calls, size = 0, len(data)
        while at < size and not self._foreign:
            if self._payload:
                skipped = min(self._payload, size - at)
                self._payload -= skipped
                at += skipped
                continue
            part = data[at : at + HEADER_BYTES - len(self._begun)]
            if len(self._begun) <= 3 < len(self._begun) + len(part) and part[3 - len(self._begun)] == HEADERS:
                if calls == most:
                    return at, calls
                calls += 1
            at += len(part)
            self._begun += part
            if len(self._begun) == HEADER_BYTES:
                self._payload = int.from_bytes(self._begun[:3], "big")
                self._begun = b""
        return size, calls

    def _past_preface(self, data: bytes) -> int:
        """Where the frames begin."""
        part = data[: len(self._preface)]
        self._foreign = not self._preface.startswith(part)
        self._preface = self._preface[len(part) :]
        return len(part)


class Keeper(Protocol):
    """The owner of the connections."""

    peer_limits: PeerLimits

    def spoke(self, client: "ProxiedConnection") -> bool:
        """Called at the first byte. Returns whether the connection may continue."""

    def named(self, client: "ProxiedConnection", name: str) -> None:
        """Called with the name by which gRPC will know the connection."""

    def ending(self, client: "ProxiedConnection") -> None:
        """Called when a connection is about to close."""

    def ended(self, client: "ProxiedConnection") -> None:
        """Called when a connection has closed."""


class _Half(asyncio.Protocol):
    """One of the two ends."""

    def __init__(self, client: "ProxiedConnection") -> None:
        self.client = client
        self.transport: asyncio.Transport | None = None
        self._paused: set[str] = set()  # reasons for the pause

    def pause(self, reason: str) -> None:
        """Pauses reading until every reason is resumed."""
        self._paused.add(reason)
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self, reason: str) -> None:
        """Removes a reason; reads again when none is left."""
        self._paused.discard(reason)
        if not self._paused and self.transport is not None:
            self.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        self.client.received(self, data)

    def pause_writing(self) -> None:
        self.client.other(self).pause("its other end is slow")

    def resume_writing(self) -> None:
        self.client.other(self).resume("its other end is slow")

    def connection_lost(self, _exc: Exception | None) -> None:
        self.transport = None
        self.client.half_lost(self)


class ProxiedConnection:
    """A client's connection and ours to gRPC. in_clear: whether the client's is unencrypted."""

    def __init__(self, keeper: Keeper, peer: Peer, upstream: str, *, in_clear: bool) -> None:
        self.peer = peer
        self.name = self.user = ""
        self.counted = False
        self._keeper = keeper
        self._upstream = upstream
        self._near, self._far = _Half(self), _Half(self)
        self._streams = Streams() if in_clear else None
        self._waiting = b""  # sent by the client, not yet passed to gRPC
        self._joining = self._joined = self._held = self._ended = False
        self._timer = asyncio.get_running_loop().call_later(FIRST_BYTE_S, self.end)

    async def start(self, sock: socket.socket) -> None:
        """Waits for the first byte."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self._near, sock)
        except OSError:
            sock.close()
            self._keeper.ended(self)
            return
        if self._ended:
            self._close()

    def other(self, half: _Half) -> _Half:
        """The other end."""
        return self._far if half is self._near else self._near

    def received(self, half: _Half, data: bytes) -> None:
        """Passes what one end sent to the other."""
        if half is self._far:
            if self._near.transport is not None:
                self._near.transport.write(data)
            return
        self._waiting += data
        if self._joined:
            self._go_on()
        elif not self._ended:
            self._near.pause("joining")
            if not self.name:
                self._first_bytes()

    def _first_bytes(self) -> None:
        self._timer.cancel()
        if not self._keeper.spoke(self):
            self.end()
            return
        self.name = f"unix-abstract:kinetod-{secrets.token_hex(16)}"
        self._keeper.peer_limits.joined(self)
        self._go_on()

    def _go_on(self) -> None:
        """Connects to gRPC, or passes on waiting data, unless held."""
        if self._held or self._ended:
            return
        if self._joined:
            self._pass_on()
        elif not self._joining:
            self._joining = True
            task = asyncio.create_task(self._join())
            task.add_done_callback(log_failure)

    async def _join(self) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.bind("\0" + self.name.partition(":")[2])
            self._keeper.named(self, self.name)
            await loop.sock_connect(sock, self._upstream)
            await loop.create_unix_connection(lambda: self._far, sock=sock)
        except OSError as exc:
            log.error("cannot connect a client to gRPC: %s", exc)
            sock.close()
            self.end()
            return
        if self._ended:
            self._close()
            return
        self._joined = True
        self._near.resume("joining")
        self._go_on()

    def _pass_on(self) -> None:
        if self._far.transport is None:
            return
        peer_limits, size, calls = self._keeper.peer_limits, len(self._waiting), 0
        if self._streams is not None:
            size, calls = self._streams.cut(self._waiting, peer_limits.may_begin(self))
        self._far.transport.write(self._waiting[:size])
        self._waiting = self._waiting[size:]
        peer_limits.received(self, size, calls)
        if self._waiting:
            peer_limits.hold_back(self)

    def hold(self) -> None:
        """Stops reading from the client."""
        self._held = True
        self._near.pause("held")

    def release(self) -> None:
        """Resumes reading, unless too much data is still waiting."""
        self._held = False
        self._near.resume("held")
        self._go_on()

    def end(self) -> None:
        """Closes both ends once their pending data is sent, or after LINGER_S."""
        if self._ended:
            return
        self._ended = True
        self._timer.cancel()
        self._keeper.ending(self)
        self._close()

    def _close(self) -> None:
        open_ones = [half.transport for half in (self._near, self._far) if half.transport is not None]
        for transport in open_ones:
            transport.close()
        if open_ones:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._abort)

    def _abort(self) -> None:
        for half in (self._near, self._far):
            if half.transport is not None:
                half.transport.abort()

    def half_lost(self, half: _Half) -> None:
        """Handles one closed end. gRPC has no use for the remaining data of a client that has gone."""
        self.end()
        if half is self._near:
            self._abort()
        if self._near.transport is None and self._far.transport is None:
            self._timer.cancel()
            self._keeper.ended(self)


def log_failure(task: "asyncio.Task[None]") -> None:
    """Logs the failure of a task that nobody awaits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a client's connection failed", exc_info=error)
