"""The socket that agents connect to: connections, frames, file descriptors. No meaning of messages here.

Theory of operation
    One non-blocking SOCK_SEQPACKET listener on the event loop. Each connection is identified by the kernel
    when it is accepted (`identity.identify`); nothing that a peer sends changes who it is.

    A peer can hurt only itself:
    - a connection that has not said Hello within HANDSHAKE_S is closed, and one user may have at most
      MAX_SILENT_PER_UID of those, and MAX_PER_UID in all unless it is root;
    - per wake-up of the loop one connection is read READ_BUDGET times, then the others have their turn;
    - a connection that sends more than FRAMES_PER_SECOND (with a burst) is not read for a while, so that
      its own socket fills up;
    - what it does not read is queued up to SEND_QUEUE_FRAMES frames, then it is closed;
    - a frame that is too long, has too many descriptors, or is not a known message ends the connection;
      descriptors that nobody asked for are closed at once.

    A socket that somebody has removed is made again (`mend`): agents try again and again, and find it.

    The death of the process (pidfd readable) ends the connection too: a forked child may hold the other
    end open. Frames that the process sent before it died are still delivered.

    The channel of a live attach is such a connection as well (`adopt`): a socketpair that the target made, so
    that the kernel's credentials of its other end are the target's.
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

from kinetod.attach.attach_types import AttachCode, Attached, AttachError, replaced
from kinetod.base import metrics
from kinetod.base.errors import StartError
from kinetod.base.unix_sockets import DESCRIPTORS_SPACE, descriptors, remove_stale_socket
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import Identity, ProcessKey, Unidentified, identify

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_CONNECTIONS = 8192
MAX_PER_UID = 4096  # root's are those of all containers too: they may be as many as there can be
MAX_SILENT_PER_UID = 1024  # a whole host of agents may come back at once after a restart
BACKLOG = 4096
ACCEPT_BUDGET = 64
READ_BUDGET = 16
LAST_READ_BUDGET = 1024
FRAMES_PER_SECOND = 200.0
FRAMES_BURST = 1000.0
SEND_QUEUE_FRAMES = 64
RETRY_ACCEPT_S = 0.2
_INT = struct.Struct("i")


class ConnectionHandler(Protocol):
    """What happens on a connection. Called on the event loop; must not block or raise."""

    def on_message(self, connection: "Connection", message: wire.Message, fd: int | None) -> None:
        """One valid frame. The handler owns `fd`."""

    def on_version_mismatch(self, connection: "Connection", theirs: int) -> None:
        """The peer speaks another protocol version; its frames are not read any more."""

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
        *,
        attached: Attached | None = None,
        handshake_s: float | None = None,
    ) -> None:
        self.identity = identity
        self.attached = attached  # how the agent got into the process; None: it came by itself
        self.greeted = False
        self.died = False
        self.closed = False
        self._sock = sock
        self._handler = handler
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._queue: collections.deque[tuple[bytes, int]] = collections.deque()  # with a descriptor, -1: without
        self._tokens = FRAMES_BURST
        self._tokens_at = self._loop.time()
        self._handshake_s = HANDSHAKE_S if handshake_s is None else handshake_s
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._handshake_s, self._handshake_late)
        self._loop.add_reader(sock.fileno(), self._readable)
        if identity.pidfd is not None:
            self._loop.add_reader(identity.pidfd, self._process_died)

    def __str__(self) -> str:
        return f"agent of process {self.identity.pid} (uid {self.identity.uid})"

    def accept_handshake(self) -> None:
        """The peer has said Hello: the handshake deadline does not apply any more."""
        self.greeted = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send(self, message: wire.Message, fd: int = -1) -> bool:
        """Sends or queues one frame. False if the connection is closed, also because this was too much for it.

        fd: a descriptor to pass with it, which stays the caller's and must stay open; -1: none.
        """
        if self.closed:
            return False
        frame = wire.encode(message)
        if not self._queue and self._try_send(frame, fd):
            return not self.closed
        if len(self._queue) >= SEND_QUEUE_FRAMES:
            metrics.link_refused("slow_reader")
            self.close("it does not read what it is sent")
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
        log.warning("%s sends too many frames; it is read more slowly", self)
        metrics.link_throttled()
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
            data, ancillary, msg_flags, _ = self._sock.recvmsg(wire.MAX_FRAME_BYTES, DESCRIPTORS_SPACE, flags)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self.close("the link broke: " + os.strerror(exc.errno or 0))
            return False
        fds = descriptors(ancillary)
        try:
            self._frame(data, fds, msg_flags)
        finally:
            for fd in fds:
                os.close(fd)
        return not self.closed

    def _frame(self, data: bytes, fds: list[int], msg_flags: int) -> None:
        """Handles one packet; leaves in `fds` the descriptors that are to be closed."""
        if not data and not fds:
            self.close("it hung up")
            return
        if msg_flags & socket.MSG_TRUNC:
            self.fail(f"a frame longer than {wire.MAX_FRAME_BYTES} bytes")
            return
        if msg_flags & socket.MSG_CTRUNC or len(fds) > 1:
            self.fail("a frame with more than one file descriptor")
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
            self.fail(f"{type(message).__name__} with {len(fds)} file descriptors")
            return
        self._handler.on_message(self, message, fds.pop() if fds else None)

    def fail(self, problem: str) -> None:
        """Ends a connection that breaks the protocol, telling the peer why."""
        log.warning("%s broke the protocol: %s; its connection is closed", self, problem)
        metrics.link_refused("protocol")
        self.refuse("broken protocol: " + problem[:200])

    def refuse(self, reason: str) -> None:
        """Sends Refuse and closes."""
        if not self.closed:
            self._try_send(wire.encode(wire.Refuse(reason)))
        self.close(reason)

    def _handshake_late(self) -> None:
        self._timer = None
        metrics.link_refused("handshake")
        self.refuse(f"no Hello within {self._handshake_s:g} s")

    def _process_died(self) -> None:
        self.died = True
        for _ in range(LAST_READ_BUDGET):  # a dead process sends no more, but a child may hold its socket
            if self.closed or not self._read_one():
                break
        self.close("the process ended")

    def close(self, reason: str) -> None:
        """Ends the connection and tells the handler. Does nothing the second time."""
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

    def __init__(self, path: Path, handler: ConnectionHandler, *, mode: int = 0o600) -> None:
        self.path = path
        self._handler = handler
        self._mode = mode
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()

    @property
    def listening(self) -> bool:
        """Whether new agents can connect."""
        return self._listener is not None and self.path.is_socket()

    def mend(self) -> list[str]:
        """Makes the socket again if somebody has removed it; says what cannot be mended. Who is connected stays."""
        if self.listening or self._listener is None:
            return []
        old = self._listener
        try:
            self.start()
        except StartError as exc:
            return [f"agents cannot connect: the socket {self.path} is gone; {exc}"]
        log.warning("the socket %s was gone; it has been made again", self.path)
        asyncio.get_running_loop().remove_reader(old.fileno())
        old.close()
        return []

    def start(self) -> None:
        """Listens, replacing a stale socket. Raises StartError. The caller holds the lock for this path."""
        remove_stale_socket(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        old_mask = os.umask(0o777 & ~self._mode)
        try:
            listener.bind(str(self.path))
            listener.listen(BACKLOG)
        except OSError as exc:
            listener.close()
            raise StartError(f"cannot listen for agents on {self.path}: {exc.strerror}") from exc
        finally:
            os.umask(old_mask)
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
        log.error("cannot accept agents: %s; trying again", exc.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(RETRY_ACCEPT_S, self._resume)  # a listener that was made meanwhile is read already

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._acceptable)

    def _accepted(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            identity = identify(sock)
        except (Unidentified, OSError) as exc:
            log.warning("a connection was refused: %s", exc)
            metrics.link_refused("unidentified")
            sock.close()
            return
        own = [other for other in self._connections if other.identity.uid == identity.uid]
        silent = sum(not other.greeted for other in own)
        too_many = silent >= MAX_SILENT_PER_UID or (identity.uid != 0 and len(own) >= MAX_PER_UID)
        if too_many or len(self._connections) >= MAX_CONNECTIONS:
            log.warning("process %d (uid %d) was refused: too many connections", identity.pid, identity.uid)
            metrics.link_refused("too_many")
            with contextlib.suppress(OSError):
                sock.send(wire.encode(wire.Refuse("too many connections")), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            sock.close()
            identity.close()
            return
        self._connections.add(Connection(sock, identity, self._handler, self._connections.discard))

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
        """Makes a connection of the channel of an attach, whose other end must be the process `key`'s.

        approved: whose process that may be; who made the channel is the kernel's word, and an execve has closed its
        other end. `identity` is for a channel of our own making (a proxy of the process). Takes the socket over, also
        when it raises AttachError.
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
            raise replaced(key.pid, f"its channel was made by uid {found.uid}, gid {found.gid}")
        connection = Connection(
            sock, found, self._handler, self._connections.discard, attached=attached, handshake_s=handshake_s
        )
        self._connections.add(connection)
        return connection

    def stop_accepting(self) -> None:
        """No new agents; those connected stay."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stops accepting and closes all connections."""
        self.stop_accepting()
        for connection in list(self._connections):
            connection.close("the daemon is stopping")
