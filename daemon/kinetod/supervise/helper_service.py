"""Common part of the privileged helper services of the front end: a socket, callers, an end when idle.

Theory of operation
    A service manager passes one listening SOCK_SEQPACKET socket (LISTEN_FDS), or the service creates its own. Each
    connection is a task, and the kernel identifies its caller (SO_PEERCRED). A service whose socket was passed ends
    when nobody has connected for a while; the next caller starts it again.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kineto_protos import unix_peer

from kinetod.base.errors import StartError
from kinetod.base.notify import notify, watchdog_s
from kinetod.base.unix_sockets import listen_at

log = logging.getLogger(__name__)

FIRST_PASSED = 3
BACKLOG = 64
ACCEPT_BUDGET = 16
MAX_CONNECTIONS = 64
_LOOK_ROUND_S = 10.0


class HungUp(Exception):
    """The other end of a connection has closed it."""


@dataclass(frozen=True, slots=True)
class HelperCaller:
    """The process at the other end of a connection, according to the kernel."""

    pid: int
    uid: int

    @classmethod
    def of(cls, sock: socket.socket) -> "HelperCaller":
        """The process that connected."""
        pid, uid, _gid = unix_peer.credentials(sock)
        return cls(pid, uid)

    def __str__(self) -> str:
        return f"process {self.pid} of uid {self.uid}"


class Connections:
    """The connections of a service. serve: runs until the connection ends; is_busy: whether there is other work."""

    def __init__(
        self,
        serve: Callable[[socket.socket, HelperCaller], Awaitable[None]],
        *,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._serve = serve
        self._is_busy = is_busy
        self._open: set[asyncio.Task[None]] = set()
        self._idle_since = time.monotonic()

    def accepted(self, sock: socket.socket) -> None:
        """Takes ownership of a connection."""
        sock.setblocking(False)
        if len(self._open) >= MAX_CONNECTIONS:
            log.warning("%s was refused: too many connections", HelperCaller.of(sock))
            sock.close()
            return
        task = asyncio.create_task(self._connection(sock), name="connection of a caller")
        self._open.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._idle_since = time.monotonic()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection failed", exc_info=error)

    async def _connection(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(HungUp, TimeoutError, OSError):
            await self._serve(sock, HelperCaller.of(sock))

    def idle_s(self) -> float:
        """Seconds since there was a connection, or other work."""
        if self._open or self._is_busy():
            self._idle_since = time.monotonic()
            return 0.0
        return time.monotonic() - self._idle_since

    def begin(self) -> None:
        """Starts counting: the service has started."""
        self._idle_since = time.monotonic()

    async def stop(self) -> None:
        """Closes all connections."""
        for connection in list(self._open):
            connection.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


class HelperProgram(Protocol):
    """A service that `run` can serve."""

    connections: Connections

    async def start(self) -> None:
        """Prepares for callers. Raises OSError if no process can be started."""

    async def stop(self) -> None:
        """Closes all connections and ends all processes."""


def passed_socket() -> socket.socket | None:
    """The socket passed by the service manager, see sd_listen_fds(3). Raises StartError."""
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if not count or pid != str(os.getpid()):
        return None
    if count != "1":
        raise StartError(f"expected one socket from the service manager, but it passed {count}")
    try:
        listener = socket.socket(fileno=FIRST_PASSED)
    except OSError as exc:
        raise StartError(f"the passed descriptor cannot be used: {exc}") from exc
    listener.set_inheritable(False)
    if (listener.family, listener.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        raise StartError("expected a SOCK_SEQPACKET Unix socket (ListenSequentialPacket=)")
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise StartError("expected a listening socket (Accept=no)")
    return listener


def own_socket(path: Path, *, for_group: bool = False) -> socket.socket:
    """The socket for this user, or also its group; the policy decides who is served. Raises StartError."""
    return listen_at(path, socket.SOCK_SEQPACKET, mode=0o660 if for_group else 0o600, backlog=BACKLOG)


async def serve(listener: socket.socket, program: HelperProgram, greeting: str, *, idle_exit_s: float) -> None:
    """Serves until a signal, or until there was no caller for `idle_exit_s` (0: never). Raises StartError.

    greeting: logged when it begins to serve.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await program.start()
    except OSError as exc:
        raise StartError(f"no helper process can be started: {exc}") from exc
    program.connections.begin()
    listener.setblocking(False)
    loop.add_reader(listener, lambda: _accept(listener, program.connections))
    notify("READY=1")
    log.info("%s", greeting)
    try:
        await _until_done(program.connections, stop, idle_exit_s)
    finally:
        loop.remove_reader(listener)
        notify("STOPPING=1")
        await program.stop()


def _accept(listener: socket.socket, connections: Connections) -> None:
    for _ in range(ACCEPT_BUDGET):
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            log.error("cannot accept a caller: %s", exc.strerror)
            return
        connections.accepted(sock)


async def _until_done(connections: Connections, stop: asyncio.Event, idle_exit_s: float) -> None:
    """Pings the watchdog from this loop; ends on request, or after a long time without callers."""
    period_s = min((watchdog_s() or _LOOK_ROUND_S) / 2, _LOOK_ROUND_S)
    while not stop.is_set():
        notify("WATCHDOG=1")
        if idle_exit_s and connections.idle_s() >= idle_exit_s:
            log.info("no caller for %.0f s: exiting; the next caller starts the service again", connections.idle_s())
            return
        wait_s = min(period_s, max(idle_exit_s - connections.idle_s(), 0.05)) if idle_exit_s else period_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), wait_s)
