"""Accepts clients of Dynolog: identifies and counts each connection, reads one request, sends one answer, closes.

Theory of operation
    Dynolog serves one connection after the other and waits for each as long as it takes. Here each has a task, and
    REQUEST_S for its request; the time for the answer depends on the request, and the client waits, as dyno does.

    The kernel identifies the client before anything is read: at a Unix socket by its credentials, over TCP on this host
    by the owner of the socket at the other end. A client on another host is refused, unless dynolog.remote_user names
    the user that such clients act as. The protocol itself identifies nobody.

    If another process listens at the address, probably Dynolog itself, this server does not listen; the log reports
    that once and `kinetoctl doctor` always. It retries every RETRY_S: stopping Dynolog is enough.
"""

import asyncio
import collections
import contextlib
import errno
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
from kineto_protos.endpoints import is_loopback

from kinetod.access.connections.connection_proxy import bound_unix
from kinetod.access.peers import Peer, UnknownPeer, of_local, of_local_at_once, of_unix, with_groups
from kinetod.base import metrics
from kinetod.base.errors import StartError
from kinetod.base.logs import Tally, text_lines
from kinetod.base.safe_text import clean
from kinetod.config.addresses import ListenAddress
from kinetod.dynolog_door.door_service import PREFIX, Answer, BadFrame, body_size, frame
from kinetod.dynolog_door.log_files import BackgroundTasks
from kinetod.permissions.caller_limits import RequestRate, full, less
from kinetod.permissions.role_policy import Via

REQUEST_S = 5.0
ANSWER_S = 10.0  # for the client to read it
RETRY_S = 5.0
ACCEPT_S = 0.0005  # at a time; calls wait for it a few times
RETRY_ACCEPT_S = 0.2
MAX_LOOKED_UP = 64  # connections whose user is being looked up in the whole table
_CHUNK_BYTES = 1 << 16
Answering = Callable[[str, bytes], Awaitable[Answer]]  # BadFrame: the connection ends without an answer
BACKLOG = 1024
_LOCALHOST = ("127.0.0.1", "::1")
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # a host without IPv6
log = logging.getLogger(__name__)

OWN = 32
ALL = 256
CONNECTIONS_PER_SECOND = 32  # the burst is four times as many
MAX_HOLD_S = 30.0
UNKNOWN, UNANSWERED = "unknown", "unanswered"


# Limits how many connections each client of Dynolog may have and open, so that none keeps others out.
#
# A connection counts for a user of this host, or for the address of another host. Each may have OWN open and open
# CONNECTIONS_PER_SECOND; ALL may be open in total, an eighth more for clients without any, and another for root and the
# daemon's own user, who are exempt from the other limits. Further ones are closed at once.
#
# A client that has been refused as one too many by the limits of all calls (`CallTracker`) is not read from for a
# while, as at the gRPC listeners.
class ClientLimits:
    """Counts connections. is_admin: whether a peer is exempt."""

    def __init__(self, is_admin: Callable[[Peer], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_admin = is_admin
        self._clock = clock
        self._rate = RequestRate(lambda: CONNECTIONS_PER_SECOND, clock)
        self._open: collections.Counter[str] = collections.Counter()
        self._held_until: dict[str, float] = {}
        self._tally = Tally(text_lines(log))

    def may_open(self, peer: Peer) -> bool:
        """Counts one more connection of this peer, or returns False if it has too many."""
        admin = self._is_admin(peer)
        if not admin and self._rate.late_s(peer.key):
            self._refused(peer, "CONNECTION_RATE", "too many new connections per second")
            return False
        held, used = self._open[peer.key], self._open.total()
        if full(held, used, own=OWN, in_all=ALL, admin=admin) is not None:
            why = f"it has {held} open connections (limit {OWN}), and all clients together have {used} (limit {ALL})"
            self._refused(peer, "CONNECTIONS", why)
            return False
        self._open[peer.key] += 1
        return True

    def closed(self, peer: Peer) -> None:
        """Stops counting a closed connection."""
        less(self._open, peer.key)

    def hold(self, peer: Peer, seconds: float) -> None:
        """Delays reading from this peer for so long, on top of current delays."""
        if self._is_admin(peer):
            return
        now = self._clock()
        self._held_until = {key: until for key, until in self._held_until.items() if until > now}
        before = self._held_until.get(peer.key, now)
        self._held_until[peer.key] = min(now + MAX_HOLD_S, before + seconds)

    def wait_s(self, peer: Peer) -> float:
        """How long not to read from this peer."""
        return max(0.0, self._held_until.get(peer.key, 0.0) - self._clock())

    def unknown(self, why: str) -> None:
        """Logs that a client was refused because the kernel cannot identify it."""
        self._tally.note(why, {"text": f"a connection from a Dynolog client was refused: {why}"})

    def nonsense(self, peer: Peer, what: str) -> None:
        """Counts and logs input that is not a request."""
        metrics.DYNOLOG_REQUESTS.labels(UNKNOWN, UNANSWERED).inc()
        text = f"an invalid request from a Dynolog client ({peer.key}) was not answered: {clean(what, 200)}"
        self._tally.note((peer.key, UNANSWERED), {"text": text})

    def _refused(self, peer: Peer, limit: str, why: str) -> None:
        metrics.limited(limit)
        text = f"a connection from a Dynolog client ({peer.key}) was refused: {why}"
        self._tally.note((peer.key, limit), {"text": text})


class DynologServer:
    """Serves at one address. lets_in: whether a client may connect at all."""

    def __init__(
        self,
        address: ListenAddress,
        limits: ClientLimits,
        *,
        socket_mode: int,
        lets_in: Callable[[Peer], bool],
        retry_s: float = RETRY_S,
    ) -> None:
        self._address = address
        self._limits = limits
        self._socket_mode = socket_mode
        self._lets_in = lets_in
        self._retry_s = retry_s
        self._sockets: list[socket.socket] = []
        self._peers: dict[str, Peer] = {}
        self._numbers = itertools.count(1)
        self._tasks = BackgroundTasks(log, "a connection from a Dynolog client failed")
        self._lookups = ThreadPoolExecutor(1, "dynolog-peers")
        self._looked_up = 0
        self._opening: asyncio.Task[None] | None = None
        self._answer: Answering | None = None
        self.problem = ""  # why it does not listen; "" if it does

    @property
    def address(self) -> ListenAddress:
        """Where it serves, or tries to."""
        return self._address

    @property
    def listening_at(self) -> list[str]:
        """The addresses of the open sockets, for people."""
        if self._address.path is not None:
            return [str(self._address)] if self._sockets else []
        names = (each.getsockname() for each in self._sockets)
        return [str(ListenAddress(host=host, port=port)) for host, port, *_ in names]

    def peer(self, connection: str) -> Peer | None:
        """The peer of a connection."""
        return self._peers.get(connection)

    def hold(self, connection: str, seconds: float) -> None:
        """Delays reading from the peer of a connection."""
        if (peer := self._peers.get(connection)) is not None:
            self._limits.hold(peer, seconds)

    async def start(self, answer: Answering) -> None:
        """Starts listening, or retrying. answer: called with a connection's name and the JSON received on it."""
        self._answer = answer
        if not await self._open():
            self._opening = asyncio.create_task(self._keep_trying(), name="dynolog door")

    async def _keep_trying(self) -> None:
        while not await self._open():
            await asyncio.sleep(self._retry_s)

    async def _open(self) -> bool:
        try:
            sockets = listening(self._address, self._socket_mode)
        except (PortTaken, OSError, StartError) as exc:
            if not self.problem:
                self.problem = await asyncio.to_thread(self._explained, exc)
                log.warning("Dynolog clients are not served yet: %s; retrying", self.problem)
            return False
        loop = asyncio.get_running_loop()
        self.problem = ""
        self._sockets = sockets
        for sock in sockets:
            loop.add_reader(sock.fileno(), self._acceptable, sock)
        log.info("Dynolog clients are served at %s", ", ".join(self.listening_at))
        return True

    def _explained(self, error: Exception) -> str:
        """Explains an error. Blocks."""
        if isinstance(error, PortTaken):
            holder = port_holder(self._address.port) or "another process"
            return f"{self._address} is in use by {holder}; stop it, or set dynolog.rpc to another address"
        if isinstance(error, OSError):
            return f"cannot listen on {self._address}: {error.strerror}"
        return str(error)

    async def holder(self) -> str:
        """The process that has the port now, for people; "" if the port is free or the process unknown."""
        return await asyncio.to_thread(port_holder, self._address.port) if self.problem else ""

    async def stop(self) -> None:
        """Stops listening; requests in progress are ended."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock.fileno())
            sock.close()
        if self._sockets and self._address.path is not None:
            self._address.path.unlink(missing_ok=True)
        self._sockets.clear()
        await self._tasks.stop()
        self._lookups.shutdown(wait=False)

    # connections

    def _acceptable(self, listener: socket.socket) -> None:
        end = time.monotonic() + ACCEPT_S
        while time.monotonic() < end:
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:  # out of descriptors or memory: try again soon instead of spinning
                log.error("cannot accept connections from Dynolog clients: %s; retrying", exc.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener.fileno())
                loop.call_later(RETRY_ACCEPT_S, self._resume, listener)
                return
            sock.setblocking(False)
            self._accepted(sock)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._acceptable, listener)

    def _accepted(self, sock: socket.socket) -> None:
        """Identifies the client, at once unless the kernel can only be asked for its whole table."""
        try:
            peer = self._identified(sock)
        except (OSError, UnknownPeer) as exc:
            self._limits.unknown(str(exc))
            sock.close()
            return
        if peer is not None:
            self._admit(sock, peer)
        elif self._looked_up < MAX_LOOKED_UP:
            self._tasks.begin(self._admit_later(sock))
        else:
            self._limits.unknown("too many clients are being looked up; allow this daemon to use AF_NETLINK sockets")
            sock.close()

    def _identified(self, sock: socket.socket) -> Peer | None:
        """The peer at the other end; None if that takes a look-up that blocks. Raises OSError, UnknownPeer."""
        if self._address.path is not None:
            return with_groups(replace(of_unix(sock), via=Via.DYNOLOG), sock)
        near, far = sock.getsockname()[:2], sock.getpeername()[:2]
        if not _is_local(near, far):
            return Peer(via=Via.DYNOLOG, address=far[0])
        peer = of_local_at_once(near, far)
        return None if peer is None else replace(peer, via=Via.DYNOLOG)

    async def _admit_later(self, sock: socket.socket) -> None:
        self._looked_up += 1
        try:
            near, far = sock.getsockname()[:2], sock.getpeername()[:2]
            peer = await asyncio.get_running_loop().run_in_executor(self._lookups, of_local, near, far)
        except (OSError, UnknownPeer) as exc:
            self._limits.unknown(str(exc))
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            self._admit(sock, replace(peer, via=Via.DYNOLOG))
        finally:
            self._looked_up -= 1

    def _admit(self, sock: socket.socket, peer: Peer) -> None:
        if not self._lets_in(peer):
            self._limits.unknown(f"this daemon serves only its own user and root, not {peer.key}")
            sock.close()
        elif self._limits.may_open(peer):
            self._tasks.begin(self._serve(sock, peer))
        else:
            sock.close()

    async def _serve(self, sock: socket.socket, peer: Peer) -> None:
        name = f"dynolog-{next(self._numbers)}"
        self._peers[name] = peer
        try:
            await asyncio.sleep(self._limits.wait_s(peer))
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                await self._talk(sock, name)
        finally:
            sock.close()
            del self._peers[name]
            self._limits.closed(peer)

    async def _talk(self, sock: socket.socket, name: str) -> None:
        """Reads one request and sends one answer. Raises OSError, EOFError, and TimeoutError for a slow client."""
        assert self._answer is not None  # nobody can connect before it is set
        try:
            async with asyncio.timeout(REQUEST_S):
                size = body_size(await _exactly(sock, PREFIX.size))
                body = await _exactly(sock, size)
            answer = await self._answer(name, body)
        except BadFrame as exc:
            self._limits.nonsense(self._peers[name], str(exc))
            return
        async with asyncio.timeout(ANSWER_S):
            await asyncio.get_running_loop().sock_sendall(sock, frame(answer))
        sock.shutdown(socket.SHUT_WR)


def _is_local(near: tuple[str, int], far: tuple[str, int]) -> bool:
    """Whether the client's address is on this host: packets from it come from nobody else."""
    return is_loopback(far[0]) or far[0] == near[0]


async def _exactly(sock: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes. Raises EOFError, OSError."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < size:
        part = await loop.sock_recv(sock, min(_CHUNK_BYTES, size - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# Finds the process that listens on a port. Blocking.
def port_holder(port: int) -> str:
    """The process for people, such as "process 4242 (dynolog)"; its kind if it may not be seen; "" for none."""
    try:
        found = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return ""
    holders = [each.pid for each in found if each.laddr and each.laddr.port == port]
    known = next((pid for pid in holders if pid), None)
    if known is None:
        return "a process that this daemon is not allowed to inspect" if holders else ""
    try:
        name = clean(psutil.Process(known).name(), 64)
    except psutil.Error:
        return f"process {known}"
    return f"process {known} ({name})"


# The sockets at which clients of Dynolog connect. "localhost" is both 127.0.0.1 and ::1, if the host has them.
#
# A port that another process listens on is not shared. Then all addresses are refused: a client that names localhost
# must not reach Dynolog by one family and this daemon by the other.
class PortTaken(Exception):
    """Another process listens at this address."""


def listening(address: ListenAddress, socket_mode: int) -> list[socket.socket]:
    """Non-blocking sockets that listen at an address. Raises PortTaken, OSError, StartError."""
    if address.path is not None:
        return [bound_unix(address.path, socket_mode)]
    sockets: list[socket.socket] = []
    try:
        for host in _hosts(address):
            try:
                sockets.append(_bound(host, address.port))
            except OSError as exc:
                if exc.errno not in _ABSENT or address.host != "localhost":
                    raise
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "this host has no loopback address")
    except OSError as exc:
        for sock in sockets:
            sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortTaken(str(address)) from exc
        raise
    return sockets


def _hosts(address: ListenAddress) -> Iterator[str]:
    yield from _LOCALHOST if address.host == "localhost" else (address.host,)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
