"""The agent's end of the link: connect, check the peer, send and receive frames with descriptors.

Theory of operation
    The runner owns the poll loop; the link says what to wait for (`fileno`, `wants_write`, `retry_at_ns`)
    and never blocks, except in connect(2), for at most `_CONNECT_TIMEOUT_S`, when the daemon's backlog is full.
    A frame that the kernel does not accept at once waits in a bounded queue. Every failure ends in the same way: the
    connection is closed, `retry_at_ns` says when to try again, and LinkClosed tells the runner.

    `_socket` is what the socket module wraps. It takes 2 ms less to import, and it stays the real one when a
    program patches the socket module (gevent).

    A frame may carry one sealed memfd (wire.WITH_DESCRIPTOR), which the caller owns once it has called `descriptor`;
    otherwise it is closed with the next frame. A number that refers to anything else belongs to the program by then.

    After a live attach the link is the channel that the daemon has taken out of this process (`adopted`). There is
    nothing else to connect to, so the link ends with it.

    The link talks only to a daemon that runs as root, as the process's own user, or as the user to whom root has given
    the socket's folder in /run (the system's daemon has a user of its own): anybody can create a socket in /tmp.

    A program may close descriptors that it did not open (daemonizing does). Before each use the link checks that its
    number still refers to its socket, and abandons the number if not.
"""

import os
import struct
import time
from _socket import (
    AF_UNIX,
    CMSG_SPACE,
    MSG_CMSG_CLOEXEC,
    MSG_CTRUNC,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    MSG_TRUNC,
    SCM_RIGHTS,
    SO_PEERCRED,
    SOCK_SEQPACKET,
    SOL_SOCKET,
    socket,
)
from collections import deque
from typing import Callable, Deque, NamedTuple, NoReturn, Optional, Sequence, Tuple

from kineto_agent.protocol import wire
from kineto_agent.system.debuglog import log
from kineto_agent.system.descriptors import NOBODY, Identity, close_ours, identity, received_memfd

FIRST_BACKOFF_NS = 1_000_000_000
MAX_BACKOFF_NS = 60_000_000_000
REFUSED_BACKOFF_NS = 600_000_000_000  # a refusal does not change until something is upgraded
MAX_QUEUED_FRAMES = 256
_CONNECT_TIMEOUT_S = 1.0
_UCRED = struct.Struct("iII")  # pid, uid, gid
_INT = struct.Struct("i")
_ROOM = CMSG_SPACE(2 * _INT.size)  # one more than allowed, so that an excess is noticed


def vouched_for(path: str, uid: int, run: str = "/run") -> bool:
    """Whether the socket is in a folder of that user directly in /run, where only root creates folders.

    The same rule as `kineto_protos.endpoints`, which the agent cannot import.
    """
    folder = os.path.dirname(path)
    if os.path.dirname(folder) != run:
        return False
    try:
        parent, status = os.lstat(run), os.lstat(folder)
    except OSError:
        return False
    return status.st_uid == uid and parent.st_uid == 0 and not parent.st_mode & 0o022


class LinkClosed(Exception):
    """The connection is gone; the message says why."""


class _Queued(NamedTuple):
    frame: bytes
    descriptors: Tuple[int, ...]  # our own duplicates
    identities: Tuple[Identity, ...]  # of the files they refer to

    def are_ours(self) -> bool:
        """Whether the numbers still refer to our files."""
        return all(identity(number) == ours for number, ours in zip(self.descriptors, self.identities))

    def close(self) -> None:
        for number, ours in zip(self.descriptors, self.identities):
            close_ours(number, ours)


class _Brought(NamedTuple):
    descriptor: int
    identity: Identity


class StandingCall:
    """A blocked call into a vendor's library, as last reported to the daemon."""

    def __init__(self, session: Callable[[], Tuple[str, str]], send: Callable[[wire.Message], object]) -> None:
        """session: returns id and state of the running capture."""
        self._session, self._send = session, send
        self._told: Optional[wire.State] = None
        self._since_ns: Callable[[], int] = lambda: 0

    @property
    def stands(self) -> bool:
        """Whether the call is blocked, as far as the daemon knows."""
        return self._told is not None

    def tell(self, call: str, since_ns: Callable[[], int]) -> None:
        """Implements `interface.TellCall`."""
        told = wire.State(*self._session(), time.time_ns(), {}, call, since_ns())
        self._told, self._since_ns = (told if told.call_since_ns else None), since_ns
        self._send(told)

    def look(self) -> None:
        """Report the call's return, if it has returned."""
        told = self._told
        if told is not None and not self._since_ns():
            self._told = None
            self._send(told._replace(time_ns=time.time_ns(), call_since_ns=0))

    def tell_again(self) -> None:
        """Report a blocked call to a daemon that does not know of it."""
        if self._told is not None:
            self._send(self._told)


class Link:
    """A connection to the daemon, or the wait for the next attempt. Used by one thread."""

    def __init__(
        self,
        candidates: Callable[[], Sequence[str]],
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._candidates = candidates
        self._monotonic_ns = monotonic_ns
        self._socket: Optional[socket] = None
        self._identity = NOBODY
        self._queue: Deque[_Queued] = deque()
        self._backoff_ns = FIRST_BACKOFF_NS
        self._refused_until_ns = 0
        self.refused = False
        self.retry_at_ns = 0  # monotonic; meaningful while not connected
        self._adopted = False
        self._brought: Optional[_Brought] = None  # with the latest frame

    @classmethod
    def adopted(cls, connection: socket) -> "Link":
        """A link over a connected SOCK_SEQPACKET socket, which the link then owns."""
        link = cls(tuple)
        connection.setblocking(False)
        link._identity = identity(connection.fileno())
        link._socket = connection
        link._adopted = True
        return link

    @property
    def ended(self) -> bool:
        """Whether there will never be another connection."""
        return self._adopted and self._socket is None

    @property
    def connected(self) -> bool:
        """Whether there is a socket to wait for."""
        return self._socket is not None

    @property
    def wants_write(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._queue)

    def fileno(self) -> int:
        """The descriptor to wait for; -1 while not connected."""
        return self._socket.fileno() if self._socket is not None else -1

    # ------------------------------------------------------------ connecting

    def connect(self) -> bool:
        """Try every candidate once. Returns False if none accepts; then `retry_at_ns` is set."""
        for path in self._candidates():
            connection = self._try(path)
            if connection is not None:
                self._identity = identity(connection.fileno())
                self._socket = connection
                self.refused = False
                log("connected to %s", path)
                return True
        self._schedule_retry()
        return False

    def _try(self, path: str) -> Optional[socket]:
        connection = None
        try:
            connection = socket(AF_UNIX, SOCK_SEQPACKET)
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(path)
            _pid, uid, _gid = _UCRED.unpack(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _UCRED.size))
            if uid not in (0, os.geteuid()) and not vouched_for(path, uid):
                raise OSError("it belongs to uid %d, which is neither root nor this user" % uid)
            connection.setblocking(False)
        except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
            log("cannot connect to %s: %s", path, exc)
            if connection is not None:
                connection.close()
            return None
        return connection

    def welcomed(self) -> None:
        """Reset the back-off, because the daemon has accepted us."""
        self._backoff_ns = FIRST_BACKOFF_NS
        self._refused_until_ns = 0

    def refuse(self, reason: str) -> None:
        """Send nothing more, and retry much later, because the daemon refuses us.

        The connection stays open, if the daemon keeps it, so that it can show us as incompatible.
        """
        log("refused by the daemon: %s", reason)
        self.refused = True
        self._drop_queue()
        self._refused_until_ns = self._monotonic_ns() + REFUSED_BACKOFF_NS

    def _schedule_retry(self) -> None:
        jitter = 0.5 + os.urandom(1)[0] / 256  # 64 agents on one host must not reconnect at the same moment
        soonest = self._monotonic_ns() + int(self._backoff_ns * jitter)
        self._backoff_ns = min(self._backoff_ns * 2, MAX_BACKOFF_NS)
        self.retry_at_ns = max(soonest, self._refused_until_ns)

    def close(self, reason: str) -> None:
        """Drop the connection, if there is one, and set the time of the next attempt."""
        if self._socket is None:
            return
        log("link closed: %s", reason)
        self._let_go()
        self._schedule_retry()

    def _let_go(self) -> None:
        connection = self._socket
        if connection is None:
            return
        # socket.close() forgets the number, then releases the GIL, then closes: a child forked then would keep it.
        close_ours(connection.fileno(), self._identity)
        connection.detach()
        self._socket = None
        self._drop_queue()
        self._close_brought()

    def abandon(self) -> None:
        """Close the descriptors in a forked child, so that the daemon sees the parent's end."""
        self._let_go()

    def _is_ours(self) -> bool:
        return identity(self.fileno()) == self._identity

    def _drop_queue(self) -> None:
        while self._queue:
            self._queue.popleft().close()

    # ------------------------------------------------------------ frames

    def send(self, message: wire.Message, descriptors: Sequence[int] = ()) -> None:
        """Send or queue one message. Raises LinkClosed, and WireError for one that is too long."""
        frame = wire.encode(message)
        if self._socket is None or self.refused:
            return
        if not self._queue and self._transmit(frame, descriptors):
            return
        if len(self._queue) >= MAX_QUEUED_FRAMES:
            self._fail("the daemon is not reading: %d frames are waiting" % len(self._queue))
        copies = tuple(os.dup(descriptor) for descriptor in descriptors)
        self._queue.append(_Queued(frame, copies, tuple(identity(copy) for copy in copies)))

    def flush(self) -> None:
        """Send queued frames while the socket accepts them. Raises LinkClosed."""
        while self._queue:
            first = self._queue[0]
            if not first.are_ours():
                self._fail("the program closed the agent's descriptors")
            if not self._transmit(first.frame, first.descriptors):
                return
            self._queue.popleft().close()

    def _transmit(self, frame: bytes, descriptors: Sequence[int]) -> bool:
        """True if the kernel accepted the frame, False if it must wait."""
        connection = self._checked()
        ancillary = []
        if descriptors:
            ancillary = [(SOL_SOCKET, SCM_RIGHTS, struct.pack("%di" % len(descriptors), *descriptors))]
        try:
            connection.sendmsg([frame], ancillary, MSG_NOSIGNAL | MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as exc:
            self._fail("sending failed: %s" % exc)
        return True

    def receive(self) -> Optional[wire.Message]:
        """The next message, or None if none has arrived. Raises LinkClosed at the end and on an invalid frame."""
        self._close_brought()
        frame = self._read()
        if frame is None or self.refused:
            return None
        try:
            message = wire.decode(frame)
        except wire.VersionMismatch as exc:
            self.refuse(str(exc))
            return None
        except wire.WireError as exc:
            self._fail("the daemon sent an invalid frame: %s" % exc)
        if isinstance(message, wire.WITH_DESCRIPTOR) != (self._brought is not None):
            self._fail("the daemon sent a %s whose descriptor is missing or unexpected" % type(message).__name__)
        return message

    def descriptor(self) -> int:
        """The descriptor that came with the latest message, which the caller then owns; -1 if none did."""
        brought, self._brought = self._brought, None
        return -1 if brought is None else brought.descriptor

    def _close_brought(self) -> None:
        brought = self._brought
        if brought is not None:  # a child forked in between also closes it, while it is known
            close_ours(brought.descriptor, brought.identity)
        self._brought = None

    def _read(self) -> Optional[bytes]:
        connection = self._checked()
        try:
            received = connection.recvmsg(wire.MAX_FRAME_BYTES, _ROOM, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as exc:
            self._fail("receiving failed: %s" % exc)
        frame, ancillary, flags, _address = received
        self._note_brought(ancillary, flags)
        if not frame:
            self._fail("the daemon closed the connection")
        if flags & MSG_TRUNC:
            self._fail("the daemon sent a frame over the limit of %d bytes" % wire.MAX_FRAME_BYTES)
        return frame

    def _note_brought(self, ancillary: Sequence[Tuple[int, int, bytes]], flags: int) -> None:
        found = b"".join(data for level, kind, data in ancillary if (level, kind) == (SOL_SOCKET, SCM_RIGHTS))
        brought = [_Brought(number, received_memfd(number)) for (number,) in _INT.iter_unpack(found)]
        for each in brought[1:]:
            close_ours(each.descriptor, each.identity)
        if brought and brought[0].identity != NOBODY:
            self._brought = brought[0]
        if flags & MSG_CTRUNC or len(brought) > 1:
            self._fail("the daemon sent more than one descriptor with a frame")

    def _checked(self) -> socket:
        if self._socket is None:
            raise LinkClosed("not connected")
        if not self._is_ours():
            self._fail("the program closed the agent's descriptor")
        return self._socket

    def _fail(self, reason: str) -> NoReturn:
        self.close(reason)
        raise LinkClosed(reason)
