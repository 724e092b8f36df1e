"""The socket that agents connect to: connections, frames, file descriptors. It does not interpret messages.

Theory of operation
    One non-blocking SOCK_SEQPACKET listener on the event loop. The kernel identifies each connection's peer when it is
    accepted (`identity.identify`); nothing that a peer sends changes its identity.

    A peer can hurt only itself:
    - a connection that has not said Hello within HANDSHAKE_S is closed, and one user may have at most
      MAX_SILENT_PER_UID of those, and MAX_PER_UID in all unless it is root; once there are MAX_CONNECTIONS, the user
      with most of them makes room for one with fewer, whose newest connection is closed;
    - per wake-up of the loop, a connection is read at most READ_BUDGET times before the others;
    - a connection that sends more than FRAMES_PER_SECOND (with a burst) is not read for a while, so that
      its own socket fills up;
    - up to SEND_QUEUE_FRAMES frames are queued for a peer that does not read, then it is closed;
    - a frame that is too long, has too many descriptors, or is not a known message ends the connection;
      unexpected descriptors are closed (`unix_sockets`);
    - for each user and kind of event, LOG_BURST lines a minute are logged, further ones are counted.

    A removed socket is created again (`mend`); agents keep trying and find it.

    The death of the process (pidfd readable) also ends the connection: a forked child may hold the other end open.
    Frames that the process sent before it died are still delivered.

    The channel of a live attach is such a connection as well (`adopt`): a socketpair created by the target, so that the
    kernel's credentials of its other end are the target's.
"""

import asyncio
import collections
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kineto_agent.protocol import wire
from kineto_protos import unix_peer

from kinetod.attach.attach_types import AttachCode, Attached, AttachError, replaced
from kinetod.base import metrics
from kinetod.base.errors import StartError
from kinetod.base.logs import Tally, text_lines
from kinetod.base.unix_sockets import close_strangers, descriptors, descriptors_space, is_memfd, listen_at
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import Identity, ProcessKey, Unidentified, identify

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_CONNECTIONS = 8192
MAX_PER_UID = 4096  # root's include those of all containers: there may be as many as possible at all
MAX_SILENT_PER_UID = 1024  # all agents of a host may reconnect at once after a restart
BACKLOG = 4096
ACCEPT_BUDGET = 64
READ_BUDGET = 16
LAST_READ_BUDGET = 1024
FRAMES_PER_SECOND = 200.0
FRAMES_BURST = 1000.0
SEND_QUEUE_FRAMES = 64
RETRY_ACCEPT_S = 0.2
LOG_PERIOD_S, LOG_BURST = 60.0, 20
_INT = struct.Struct("i")


class ConnectionHandler(Protocol):
    """Handles events of a connection. Called on the event loop; must not block or raise."""

    def on_message(self, connection: "Connection", message: wire.Message, fd: int | None) -> None:
        """One valid frame. The handler owns `fd`."""

    def on_version_mismatch(self, connection: "Connection", theirs: int) -> None:
        """The peer speaks another protocol version; its frames are no longer read."""

    def on_close(self, connection: "Connection", reason: str) -> None:
        """The connection is closed (once). From here on the handler owns `connection.identity`."""


class Connection:
    """The connection to one peer."""

    def __init__(
        self,
        sock: socket.socket,
        identity: Identity,
        handler: ConnectionHandler,
        on_end: Callable[["Connection"], None],
        tally: Tally,
        *,
        attached: Attached | None = None,
        handshake_s: float | None = None,
    ) -> None:
        self.identity = identity
        self.attached = attached  # how the agent was attached; None: it connected by itself
        self.greeted = False
        self.died = False
        self.closed = False
        self._sock = sock
        self._handler = handler
        self._on_end = on_end
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._queue: collections.deque[tuple[bytes, int]] = collections.deque()  # each with a descriptor; -1: none
        self._tokens = FRAMES_BURST
        self._tokens_at = self._loop.time()
        self._handshake_s = HANDSHAKE_S if handshake_s is None else handshake_s
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._handshake_s, self._handshake_late)
        self._loop.add_reader(sock.fileno(), self._readable)
        if identity.pidfd is not None:
            self._loop.add_reader(identity.pidfd, self._process_died)

    def __str__(self) -> str:
        return f"agent of process {self.identity.pid} (uid {self.identity.uid})"

    def note(self, what: str, text: str, level: int = logging.WARNING) -> None:
        """Logs an event of this peer, or counts it with those of its user's other connections."""
        self._tally.note((self.identity.uid, what), {"text": f"{self} {text}", "level": level})

    def accept_handshake(self) -> None:
        """Ends the handshake deadline: the peer has sent Hello."""
        self.greeted = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send(self, message: wire.Message, fd: int = -1) -> bool:
        """Sends or queues one frame. False if the connection is closed, possibly because its queue is full.

        fd: a descriptor to send along, which the caller keeps open; -1: none.
        """
        if self.closed:
            return False
        frame = wire.encode(message)
        if not self._queue and self._try_send(frame, fd):
            return not self.closed
        if len(self._queue) >= SEND_QUEUE_FRAMES:
            metrics.LINK_REFUSALS.labels("slow_reader").inc()
            self.close("it is not reading its messages")
            return False
        self._queue.append((frame, fd))
        self._loop.add_writer(self._sock.fileno(), self._writable)
        return True

    def _try_send(self, frame: bytes, fd: int = -1) -> bool:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(fd))] if fd >= 0 else []
        try:
            self._sock.sendmsg([frame], passed, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            if exc.errno in (errno.ENOBUFS, errno.ENOMEM):
                return False
            self.close("the link broke: " + os.strerror(exc.errno or 0))
        return True

    def _writable(self) -> None:
        while self._queue and not self.closed:
            if not self._try_send(*self._queue[0]):
                return
            if self._queue:
                self._queue.popleft()
        if not self.closed:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(READ_BUDGET):
            if self.closed or not self._read_one():
                return
            if not self._take_token():
                return

    def _take_token(self) -> bool:
        now = self._loop.time()
        self._tokens = min(FRAMES_BURST, self._tokens + (now - self._tokens_at) * FRAMES_PER_SECOND) - 1
        self._tokens_at = now
        if self._tokens >= 0 or self.closed:
            return True
        self.note("throttled", "sends too many frames and is now read more slowly")
        metrics.LINK_THROTTLED.inc()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(0.5, self._resume_reading)
        return False

    def _resume_reading(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def _read_one(self) -> bool:
        """Reads one frame; False if there is none or the connection has ended."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            space = descriptors_space(self.identity.uid)
            data, ancillary, msg_flags, _ = self._sock.recvmsg(wire.MAX_FRAME_BYTES, space, flags)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self.close("the link broke: " + os.strerror(exc.errno or 0))
            return False
        fds = descriptors(ancillary)
        try:
            self._frame(data, fds, msg_flags)
        finally:
            close_strangers(fds, self.identity.uid)
        return not self.closed

    def _frame(self, data: bytes, fds: list[int], msg_flags: int) -> None:
        """Handles one packet; leaves descriptors to be closed in `fds`."""
        if not data and not fds:
            self.close("it hung up")
            return
        if msg_flags & socket.MSG_TRUNC:
            self.fail(f"a frame longer than {wire.MAX_FRAME_BYTES} bytes")
            return
        if msg_flags & socket.MSG_CTRUNC or len(fds) > 1:
            self.fail("a frame with more than one file descriptor, or with one sent before an earlier one was closed")
            return
        if fds and not is_memfd(fds[0]):
            self.fail("a file descriptor that is not a memfd")
            return
        try:
            message = wire.decode(data)
        except wire.VersionMismatch as exc:
            self._handler.on_version_mismatch(self, exc.theirs)
            return
        except wire.WireError as exc:
            self.fail(str(exc))
            return
        if bool(fds) != isinstance(message, wire.Arena):
            self.fail(f"{type(message).__name__} {'with' if fds else 'without'} a file descriptor")
            return
        self._handler.on_message(self, message, fds.pop() if fds else None)

    def fail(self, problem: str) -> None:
        """Ends a connection that breaks the protocol, telling the peer why."""
        self.note("protocol", f"broke the protocol: {problem}; its connection is closed")
        metrics.LINK_REFUSALS.labels("protocol").inc()
        self.refuse("broken protocol: " + problem[:200])

    def refuse(self, reason: str) -> None:
        """Sends Refuse and closes."""
        if not self.closed:
            self._try_send(wire.encode(wire.Refuse(reason)))
        self.close(reason)

    def _handshake_late(self) -> None:
        self._timer = None
        metrics.LINK_REFUSALS.labels("handshake").inc()
        self.refuse(f"no Hello within {self._handshake_s:g} s")

    def _process_died(self) -> None:
        self.died = True
        for _ in range(LAST_READ_BUDGET):  # a dead process sends no more, but a child may hold its socket
            if self.closed or not self._read_one():
                break
        self.close("the process ended")

    def close(self, reason: str) -> None:
        """Ends the connection and notifies the handler. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        if self.identity.pidfd is not None:
            self._loop.remove_reader(self.identity.pidfd)
        self._queue.clear()
        self._sock.close()
        self._on_end(self)
        self._handler.on_close(self, reason)


class LinkServer:
    """Accepts agents on a Unix socket."""

    def __init__(self, path: Path, handler: ConnectionHandler, *, mode: int) -> None:
        self.path = path
        self._handler = handler
        self._mode = mode
        self._listener: socket.socket | None = None
        self._connections: dict[int, dict[Connection, None]] = {}  # by user, oldest first
        self._tally = Tally(text_lines(log), period_s=LOG_PERIOD_S, burst=LOG_BURST)

    @property
    def listening(self) -> bool:
        """Whether new agents can connect."""
        return self._listener is not None and self.path.is_socket()

    def mend(self) -> list[str]:
        """Creates the socket again if it was removed; returns the remaining problems. Connected agents stay."""
        if self.listening or self._listener is None:
            return []
        old = self._listener
        try:
            self.start()
        except StartError as exc:
            return [f"agents cannot connect: the socket {self.path} is gone; {exc}"]
        log.warning("the socket %s was missing and has been recreated", self.path)
        asyncio.get_running_loop().remove_reader(old.fileno())
        old.close()
        return []

    def start(self) -> None:
        """Listens, replacing a stale socket. Raises StartError. The caller holds the lock for this path."""
        listener = listen_at(self.path, socket.SOCK_SEQPACKET, mode=self._mode, backlog=BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._acceptable)

    def _acceptable(self) -> None:
        for _ in range(ACCEPT_BUDGET):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._pause(exc)
                return
            self._accepted(sock)

    def _pause(self, exc: OSError) -> None:
        """Out of descriptors or memory: try again soon instead of spinning."""
        assert self._listener is not None
        log.error("cannot accept connections from agents: %s; retrying", exc.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(RETRY_ACCEPT_S, self._resume)  # a listener created in between is already being read

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._acceptable)

    def _accepted(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            identity = identify(sock)
        except (Unidentified, OSError) as exc:
            self._refused(sock, "unidentified", f"a connection was refused: {exc}")
            sock.close()
            return
        own = self._connections.get(identity.uid, {})
        silent = sum(not other.greeted for other in own)
        too_many = silent >= MAX_SILENT_PER_UID or (identity.uid != 0 and len(own) >= MAX_PER_UID)
        if too_many or not self._has_room(len(own)):
            text = f"process {identity.pid} (uid {identity.uid}) was refused: too many connections"
            self._refused(sock, "too_many", text)
            with contextlib.suppress(OSError):
                sock.send(wire.encode(wire.Refuse("too many connections")), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            sock.close()
            identity.close()
            return
        self._add(Connection(sock, identity, self._handler, self._ended, self._tally))

    def _has_room(self, own: int) -> bool:
        """Whether there is room for one more connection of a user who has `own`."""
        if sum(map(len, self._connections.values())) < MAX_CONNECTIONS:
            return True
        most = max(self._connections.values(), key=len)
        if len(most) <= own + 1:
            return False
        newest = next(reversed(most))
        newest.note("made_room", "was disconnected to make room for another user: there are too many connections")
        newest.refuse("too many connections")
        return True

    def _add(self, connection: Connection) -> None:
        self._connections.setdefault(connection.identity.uid, {})[connection] = None

    def _ended(self, connection: Connection) -> None:
        own = self._connections.get(connection.identity.uid, {})
        own.pop(connection, None)
        if not own:
            self._connections.pop(connection.identity.uid, None)

    def _refused(self, sock: socket.socket, why: str, text: str) -> None:
        metrics.LINK_REFUSALS.labels(why).inc()
        with contextlib.suppress(OSError):
            self._tally.note((unix_peer.credentials(sock)[1], why), {"text": text})

    def adopt(
        self,
        sock: socket.socket,
        key: ProcessKey,
        attached: Attached,
        approved: Credentials,
        *,
        handshake_s: float = HANDSHAKE_S,
        identity: Identity | None = None,
    ) -> Connection:
        """Adopts the channel of an attach as a connection; its other end must belong to the process `key`.

        approved: the credentials that the process must have; the kernel vouches for the creator of the channel, and an
        execve closes its other end. `identity` is for a channel of our own making (a proxy of the process). Takes
        ownership of the socket, even when it raises AttachError.
        """
        sock.setblocking(False)
        try:
            found = identity or identify(sock)
        except (Unidentified, OSError) as exc:
            sock.close()
            raise AttachError(AttachCode.GONE, f"process {key.pid} ended during the attach: {exc}") from exc
        if found.key != key:
            sock.close()
            found.close()
            raise AttachError(
                AttachCode.FAILED,
                f"the channel belongs to process {found.pid} (uid {found.uid}), not to process {key.pid}; nothing was "
                "traced, try again",
            )
        if (found.uid, found.gid) != (approved.uid, approved.gid):
            sock.close()
            found.close()
            raise replaced(key.pid, f"its channel was created by uid {found.uid}, gid {found.gid}")
        connection = Connection(
            sock,
            found,
            self._handler,
            self._ended,
            self._tally,
            attached=attached,
            handshake_s=handshake_s,
        )
        self._add(connection)
        return connection

    def stop_accepting(self) -> None:
        """Refuses new agents; connected ones stay."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stops accepting and closes all connections."""
        self.stop_accepting()
        for connection in [each for own in self._connections.values() for each in own]:
            connection.close("the daemon is stopping")
