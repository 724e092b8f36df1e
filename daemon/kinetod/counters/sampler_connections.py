"""How the daemon reaches kinetod-counters: a service's socket, or a child that it starts when somebody asks."""

import asyncio
import contextlib
import logging
import socket
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kinetod.counters.interface import CounterCode, CounterError
from kinetod.supervise import child
from kinetod.supervise.child import WarmChild
from kinetod.supervise.helper_connection import connected

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.counters", "--parent")
CONNECT_S = 20.0  # systemd starts the service meanwhile


class SamplerConnections(Protocol):
    """Where connections come from."""

    async def connect(self) -> socket.socket:
        """A new one, non-blocking, which the caller owns. Raises CounterError."""

    def pids(self) -> set[int]:
        """Our own process, if there is one."""

    async def stop(self) -> None:
        """Ends what was started."""


class CountersService:
    """The service that listens on `path`: root's, or our own user's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pids(self) -> set[int]:
        """Empty: the service is another user's."""
        return set()

    async def connect(self) -> socket.socket:
        """Connects."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return await connected(self._path)
        except OSError as exc:  # a TimeoutError is one
            why = exc.strerror or str(exc) or "it does not answer"
            reason = f"kinetod-counters cannot be reached at {self._path}: {why}; is kinetod-counters.socket enabled?"
            raise CounterError(CounterCode.UNAVAILABLE, reason) from exc

    async def stop(self) -> None:
        """Does nothing: the service stays."""


class CountersChild:
    """A process of the daemon's own. It gets each connection as a descriptor, over a socket as its standard input."""

    def __init__(self, arguments: Sequence[str] = (), *, command: Sequence[str] = COMMAND) -> None:
        self._command = (*command, *arguments)
        self._lock = asyncio.Lock()
        self._child: WarmChild | None = None
        self._control: socket.socket | None = None

    def pids(self) -> set[int]:
        """The child, if it runs."""
        running = self._child
        return set() if running is None or running.process.returncode is not None else {running.process.pid}

    async def connect(self) -> socket.socket:
        """Starts the child if there is none."""
        async with self._lock:
            for _ in range(2):  # one that had nothing to do may have ended just now
                control = await self._started()
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
                with theirs:
                    try:
                        socket.send_fds(control, [b"\0"], [theirs.fileno()], socket.MSG_NOSIGNAL)
                    except OSError:
                        ours.close()
                        await self._end()
                        continue
                ours.setblocking(False)
                return ours
        raise CounterError(CounterCode.FAILED, "kinetod-counters ends as soon as it is started; the log has more")

    async def _started(self) -> socket.socket:
        if self._child is not None and self._child.process.returncode is not None:
            await self._end()
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            with theirs:
                try:
                    process = await asyncio.create_subprocess_exec(
                        *self._command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=PIPE
                    )
                except OSError as exc:
                    ours.close()
                    reason = f"kinetod-counters cannot be started: {exc.strerror}"
                    raise CounterError(CounterCode.FAILED, reason) from exc
            ours.setblocking(False)
            self._control, self._child = ours, WarmChild(process, log, "kinetod-counters")
        return self._control

    async def _end(self) -> None:
        control, self._control = self._control, None
        running, self._child = self._child, None
        if control is not None:
            control.close()
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                await running.stop(kill=False)

    async def stop(self) -> None:
        """Ends the child."""
        async with self._lock:
            await self._end()
