"""Accepts clients of Dynolog: identifies and counts each connection, reads one request, sends one answer, closes.

Theory of operation
    Dynolog serves one connection after the other and waits for each as long as it takes. Here each has a task, and
    REQUEST_S for its request; how long the answer takes depends on what is asked, and then the client waits, as dyno
    does.

    Who connects is asked of the kernel before anything is read: at a Unix socket its credentials, over TCP on this host
    the owner of the socket at the other end. A client on another host is nobody, unless dynolog.remote_user says for
    whom such clients count. Nothing in the protocol identifies anybody.

    If another process listens at the address, probably Dynolog itself, the door stays closed, which the log says once
    and `kinetoctl doctor` always, and it is tried again every RETRY_S: to stop Dynolog is all there is to do.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kineto_protos.endpoints import is_loopback

from kinetod.access.peers import Peer, UnknownPeer, of_local, of_local_at_once, of_unix, with_groups
from kinetod.base.background_tasks import BackgroundTasks
from kinetod.base.errors import StartError
from kinetod.config.addresses import ListenAddress
from kinetod.dynolog_door.answers import Answer
from kinetod.dynolog_door.client_limits import ClientLimits
from kinetod.dynolog_door.door_sockets import PortTaken, listening
from kinetod.dynolog_door.json_frames import PREFIX, BadFrame, body_size, frame
from kinetod.dynolog_door.port_holder import port_holder
from kinetod.permissions.role_policy import Via

log = logging.getLogger(__name__)

REQUEST_S = 5.0
ANSWER_S = 10.0  # for the client to take it
RETRY_S = 5.0
ACCEPT_S = 0.0005  # at a time; calls wait for it a few times
RETRY_ACCEPT_S = 0.2
MAX_LOOKED_UP = 64  # connections whose user is being looked up in the whole table
_CHUNK_BYTES = 1 << 16
Answering = Callable[[str, bytes], Awaitable[Answer]]  # BadFrame: the connection ends without an answer


class DynologServer:
    """Serves at one address. lets_in: whether a client may ask at all."""

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
        self._tasks = BackgroundTasks(log, "a connection of a client of Dynolog failed")
        self._lookups = ThreadPoolExecutor(1, "dynolog-peers")
        self._looked_up = 0
        self._opening: asyncio.Task[None] | None = None
        self._answer: Answering | None = None
        self.problem = ""  # why the door is closed; "" if it is open

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
        """Who is behind a connection."""
        return self._peers.get(connection)

    def hold(self, connection: str, seconds: float) -> None:
        """Delays reading from whoever is behind a connection."""
        if (peer := self._peers.get(connection)) is not None:
            self._limits.hold(peer, seconds)

    async def start(self, answer: Answering) -> None:
        """Opens the door, or begins to try. answer: is given a connection's name and the JSON that came on it."""
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
                log.warning("the door for clients of Dynolog is closed: %s; it opens as soon as it can", self.problem)
            return False
        loop = asyncio.get_running_loop()
        self.problem = ""
        self._sockets = sockets
        for sock in sockets:
            loop.add_reader(sock.fileno(), self._acceptable, sock)
        log.info("clients of Dynolog are served at %s", ", ".join(self.listening_at))
        return True

    def _explained(self, error: Exception) -> str:
        """Blocks."""
        if isinstance(error, PortTaken):
            holder = port_holder(self._address.port) or "another process"
            return f"{self._address} is taken by {holder}; stop it, or set dynolog.rpc to another address"
        if isinstance(error, OSError):
            return f"cannot listen at {self._address}: {error.strerror}"
        return str(error)

    async def holder(self) -> str:
        """Who has the port now, for people; "" if it is not taken or not known."""
        return await asyncio.to_thread(port_holder, self._address.port) if self.problem else ""

    async def stop(self) -> None:
        """Closes the door; requests in progress are ended."""
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
                log.error("cannot accept clients of Dynolog: %s; retrying", exc.strerror)
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
            self._limits.unknown("too many clients are being looked up; allow AF_NETLINK sockets to this daemon")
            sock.close()

    def _identified(self, sock: socket.socket) -> Peer | None:
        """Who is at the other end; None if that takes a look-up that blocks. Raises OSError, UnknownPeer."""
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
        """One request, one answer. Raises OSError, EOFError, TimeoutError if the client does not keep to it."""
        assert self._answer is not None  # nobody can connect before
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
    """Whether the client is on this host by its address: nobody else's packets come from it."""
    return is_loopback(far[0]) or far[0] == near[0]


async def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes. Raises EOFError, OSError."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < size:
        part = await loop.sock_recv(sock, min(_CHUNK_BYTES, size - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
