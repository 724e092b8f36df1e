"""Where clients connect: every connection is identified and counted before gRPC sees it.

Theory of operation
    gRPC for Python does not reveal the peer of a Unix socket and does not limit connections. So the daemon itself
    listens at the addresses in `server.listen`, and gRPC on Unix sockets in a folder that only the daemon's user can
    enter. The daemon accepts a connection, lets the kernel identify its peer (`peers`), and joins it to a connection of
    our own to gRPC, whose end is bound to a new random name in the abstract namespace. That name is what gRPC's
    `context.peer()` shows; `peer` finds who is behind it. A client needs no token and no library of ours.

    To bind such a name first, somebody would have to guess it; whoever connects to gRPC's own sockets has no name that
    we know and is refused as not identified.

    One peer cannot keep others out:
    - a connection is not passed on before its first byte; the oldest of a peer's silent ones is closed when it has
      more than MAX_SILENT_PER_PEER, and each after FIRST_BYTE_S. A peer with silent ones can still connect;
    - how many connections a peer has, how fast it makes them, how much it sends and how many calls it begins is
      limited (`connection_limits`);
    - gRPC closes those that do not finish the handshake (see `rpc.grpc_server`);
    - neither direction holds more than some HIGH_WATER_BYTES: a side that is not read is not read from
      (`proxied_connection`).
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kinetod.access.connections.connection_limits import PeerLimits
from kinetod.access.connections.proxied_connection import ProxiedConnection, log_failure
from kinetod.access.peers import Peer, UnknownPeer, of_local, of_local_at_once, of_unix, with_groups
from kinetod.base.errors import StartError
from kinetod.base.unix_sockets import listen_at
from kinetod.config.addresses import ListenAddress
from kinetod.permissions.role_policy import Via

log = logging.getLogger(__name__)

MAX_SILENT_PER_PEER = 64
MAX_LOOKED_UP = 256  # loopback connections whose user is being looked up
BACKLOG = 4096  # the kernel's usual maximum: a flood is accepted and closed faster than it arrives
ACCEPT_S = 0.0002  # at a time: about ten connections that are closed at once; calls wait for it a few times
RETRY_ACCEPT_S = 0.2
PLAIN_SOCKET, TLS_SOCKET, TLS_TOKEN_SOCKET = "plain", "tls", "tls-token"  # gRPC's own, in the private folder
_SOCKETS = (PLAIN_SOCKET, TLS_SOCKET, TLS_TOKEN_SOCKET)


class PrivateFolder:
    """The folder of gRPC's own sockets, with names that are short however long its path is."""

    def __init__(self, path: Path) -> None:
        """Creates the folder, or reuses one that a killed daemon left. Raises StartError."""
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            status = os.fstat(self._fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise StartError(f"{path} is accessible to other users; remove it")
            for name in _SOCKETS:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._fd)
        except OSError as exc:
            raise StartError(f"cannot create the folder {path}: {exc.strerror}") from exc
        self._path = path

    def socket_path(self, name: str) -> str:
        """The path of one socket, valid in this process only."""
        return f"/proc/self/fd/{self._fd}/{name}"

    def close(self) -> None:
        """Removes the folder."""
        for name in _SOCKETS:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
        os.close(self._fd)
        with contextlib.suppress(OSError):
            self._path.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """An address to listen on. tls: callers are identified by certificate; tokens: by Kubernetes token instead."""

    address: ListenAddress
    tls: bool = False
    tokens: bool = False

    @property
    def upstream(self) -> str:
        """The socket of gRPC to which connections are passed."""
        if not self.tls:
            return PLAIN_SOCKET
        return TLS_TOKEN_SOCKET if self.tokens else TLS_SOCKET


class ConnectionProxy:
    """Accepts clients and passes their connections to gRPC."""

    def __init__(
        self,
        listeners: Iterable[Listener],
        folder: PrivateFolder,
        *,
        socket_mode: int,
        lets_in: Callable[[Peer], bool],
        max_per_peer: Callable[[], int],
        requests_per_second: Callable[[], int],
        is_admin: Callable[[Peer], bool],
    ) -> None:
        """lets_in: whether a local peer may connect at all; is_admin: whether it is exempt from limits."""
        self._listeners = list(listeners)
        self._folder = folder
        self._socket_mode = socket_mode
        self._lets_in = lets_in
        self.peer_limits = PeerLimits(
            max_per_peer=max_per_peer, requests_per_second=requests_per_second, is_admin=is_admin
        )
        self._sockets: list[_ListeningSocket] = []
        self._named: dict[str, ProxiedConnection] = {}
        self._lookups = ThreadPoolExecutor(1, "peers")
        self._looked_up = 0
        self._silent: dict[str, dict[ProxiedConnection, None]] = {}  # by peer, oldest first
        self._open: set[ProxiedConnection] = set()

    async def start(self) -> None:
        """Starts listening. Raises StartError."""
        for listener in self._listeners:
            for sock in await _bound(listener.address, self._socket_mode):
                self._sockets.append(_ListeningSocket(sock, listener, self._accepted))

    def mend(self) -> list[str]:
        """Recreates removed sockets; returns what cannot be mended."""
        problems = []
        for number, listening in enumerate(self._sockets):
            path = listening.listener.address.path
            if path is None or path.is_socket():
                continue
            try:
                sock = bound_unix(path, self._socket_mode)
            except StartError as exc:
                problems.append(f"clients cannot connect: {path} is gone and cannot be recreated: {exc}")
                continue
            log.warning("the socket %s was missing and has been recreated", path)
            listening.close()
            self._sockets[number] = _ListeningSocket(sock, listening.listener, self._accepted)
        return problems

    def peer(self, name: str) -> Peer | None:
        """The peer behind the connection that gRPC calls `name`."""
        client = self._named.get(name)
        return client.peer if client is not None else None

    def hold(self, name: str, seconds: float) -> None:
        """Pauses reading from the peer of the connection `name` for so long."""
        if (client := self._named.get(name)) is not None:
            self.peer_limits.hold(client, seconds)

    def vouch(self, name: str, user: str) -> None:
        """Notes that the connection `name` has presented a token of this user."""
        if (client := self._named.get(name)) is not None:
            client.user = user

    def stop_accepting(self) -> None:
        """Stops accepting connections."""
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()
        for listener in self._listeners:
            if listener.address.path is not None:
                with contextlib.suppress(OSError):
                    listener.address.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes all connections and sockets."""
        self.stop_accepting()
        for client in list(self._open):
            client.end()
        self._lookups.shutdown(wait=False)

    # connections

    def _accepted(self, sock: socket.socket, listener: Listener) -> None:
        if listener.address.path is not None:
            try:
                peer = of_unix(sock)
                if not self.peer_limits.may_open(peer):
                    sock.close()
                    return
                peer = with_groups(peer, sock)
            except (OSError, UnknownPeer) as exc:
                self.peer_limits.unknown(str(listener.address), str(exc))
                sock.close()
                return
            self._admit(sock, listener, peer)
        elif self._looked_up >= MAX_LOOKED_UP:
            sock.close()
        else:
            task = asyncio.create_task(self._accept_tcp(sock, listener))
            task.add_done_callback(log_failure)

    async def _accept_tcp(self, sock: socket.socket, listener: Listener) -> None:
        self._looked_up += 1
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            near, far = sock.getsockname()[:2], sock.getpeername()[:2]
            if listener.tokens:
                peer = Peer(via=Via.KUBERNETES, address=far[0])
            elif listener.tls:
                peer = Peer(via=Via.TLS, address=far[0])
            else:
                peer = await self._identified(near, far)
        except (OSError, UnknownPeer) as exc:
            self.peer_limits.unknown(str(listener.address), str(exc))
            sock.close()
            return
        finally:
            self._looked_up -= 1
        if self.peer_limits.may_open(peer):
            self._admit(sock, listener, peer)
        else:
            sock.close()

    async def _identified(self, near: tuple[str, int], far: tuple[str, int]) -> Peer:
        """The user of this host who has connected. Raises UnknownPeer."""
        if (peer := of_local_at_once(near, far)) is not None:
            return peer
        return await asyncio.get_running_loop().run_in_executor(self._lookups, of_local, near, far)

    def _admit(self, sock: socket.socket, listener: Listener, peer: Peer) -> None:
        if peer.uid is not None and not self._lets_in(peer):
            self.peer_limits.unknown(str(listener.address), f"{peer.key} is not allowed to connect")
            sock.close()
            return
        self.peer_limits.opened(peer)
        silent = self._silent.setdefault(peer.key, {})
        if len(silent) >= MAX_SILENT_PER_PEER:
            next(iter(silent)).end()
            silent = self._silent.setdefault(peer.key, {})
        client = ProxiedConnection(self, peer, self._folder.socket_path(listener.upstream), in_clear=not listener.tls)
        silent[client] = None
        self._open.add(client)
        task = asyncio.create_task(client.start(sock))
        task.add_done_callback(log_failure)

    def spoke(self, client: ProxiedConnection) -> bool:
        """Called at the first byte. Returns whether the connection may continue."""
        self._no_longer_silent(client)
        client.counted = self.peer_limits.may_proceed(client)
        return client.counted

    def _no_longer_silent(self, client: ProxiedConnection) -> None:
        silent = self._silent.get(client.peer.key, {})
        silent.pop(client, None)
        if not silent:
            self._silent.pop(client.peer.key, None)

    def named(self, client: ProxiedConnection, name: str) -> None:
        """Notes the name by which gRPC will know the connection."""
        self._named[name] = client

    def ending(self, client: ProxiedConnection) -> None:
        """Called when a connection is about to close."""
        self._no_longer_silent(client)

    def ended(self, client: ProxiedConnection) -> None:
        """Called when a connection has closed."""
        if client not in self._open:
            return
        self._open.discard(client)
        self._no_longer_silent(client)
        self._named.pop(client.name, None)
        self.peer_limits.closed(client, spoke=client.counted)


class _ListeningSocket:
    """One listening socket on the loop."""

    def __init__(
        self, sock: socket.socket, listener: Listener, accepted: Callable[[socket.socket, Listener], None]
    ) -> None:
        self._sock = sock
        self.listener = listener
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._acceptable)

    def _acceptable(self) -> None:
        end = time.monotonic() + ACCEPT_S
        while time.monotonic() < end:
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:  # out of descriptors or memory: try again soon instead of spinning
                log.error("cannot accept clients: %s; retrying", exc.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(RETRY_ACCEPT_S, self._resume)
                return
            sock.setblocking(False)
            self._accepted(sock, self.listener)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._acceptable)

    def close(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()


async def _bound(address: ListenAddress, socket_mode: int) -> list[socket.socket]:
    """Binds the listening sockets of an address. Raises StartError."""
    if address.path is not None:
        return [bound_unix(address.path, socket_mode)]
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _name, where in dict.fromkeys(found):
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
    except OSError as exc:
        for sock in sockets:
            sock.close()
        raise StartError(f"cannot listen on {address}: {exc.strerror}; is it in use?") from exc
    return sockets


def bound_unix(path: Path, mode: int) -> socket.socket:
    """A listening socket at a path, with this mode. Raises StartError."""
    return listen_at(path, socket.SOCK_STREAM, mode=mode, backlog=BACKLOG, takes_descriptors=False)
