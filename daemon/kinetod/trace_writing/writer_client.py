"""The front end's client of the kinetod-writer service, for a daemon that may not become other users.

Theory of operation
    One connection for each request. The service must be root's or our own user's (SO_PEERCRED; for a socket that
    systemd passes it is root). It is contacted only on demand, so it may be enabled while the daemon runs.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.base.unix_sockets import receive, send
from kinetod.supervise.helper_connection import NotOurService, connected
from kinetod.trace_writing import writer_messages as messages
from kinetod.trace_writing.writer_messages import PlaceTraces

START_GRACE_S = 20.0  # the first caller after an idle period waits for the service's start
ENABLE = "`systemctl enable --now kinetod-writer.socket`"
LOOK = "check `systemctl status kinetod-writer.socket kinetod-writer.service`"


class WriterUnreachable(Exception):
    """The service is unavailable. The message says why. advice: what an administrator can do about it."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.advice = advice


class WriterClient:
    """Client of the service that listens on `path`."""

    def __init__(self, path: Path, *, start_grace_s: float = START_GRACE_S) -> None:
        self._path = path
        self._start_grace_s = start_grace_s

    async def place(
        self, uid: int | None, folder: Path, files: Sequence[tuple[int, str]] = (), *, deadline_s: float
    ) -> list[str]:
        """Returns the problem of each file (a descriptor and a name), or of the folder. Raises WriterUnreachable.

        uid: None asks whether anything may be written there at all. deadline_s: not counting the service's start.
        """
        asked = PlaceTraces(uid=uid, folder=str(folder), names=tuple(name for _fd, name in files))
        try:
            async with asyncio.timeout(deadline_s + self._start_grace_s):
                packet = await self._said(messages.encode(asked), [fd for fd, _name in files])
        except TimeoutError as exc:
            raise WriterUnreachable(f"the writer service is not responding at {self._path}", LOOK) from exc
        except OSError as exc:
            raise self._unreachable(exc) from exc
        try:
            problems = messages.answer(packet).problems
        except messages.BadWriterMessage as exc:
            raise WriterUnreachable(f"the writer service sent an invalid answer: {exc}", LOOK) from exc
        count = max(1, len(files))
        if len(problems) != count:  # it refused the request before decoding it
            problems = (problems[0] or "the writer service did not return a result for each file",) * count
        return [clean(each, messages.MAX_PROBLEM_CHARS) for each in problems]

    async def _said(self, packet: bytes, fds: list[int]) -> bytes:
        """Sends a packet and returns the answer. Raises OSError, WriterUnreachable."""
        with await connected(self._path) as sock:
            await send(sock, packet, fds, self._start_grace_s)
            said, unexpected = await receive(sock, messages.MAX_PACKET_BYTES + 1)
        for fd in unexpected:
            os.close(fd)
        if not said:
            raise WriterUnreachable("the writer service closed the connection", LOOK)
        return said

    def _unreachable(self, error: OSError) -> WriterUnreachable:
        if isinstance(error, NotOurService):
            why = f"{self._path} belongs to uid {error.uid}, which is neither root nor the daemon's own user"
            return WriterUnreachable(why, LOOK)
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return WriterUnreachable("the writer service could, but is not enabled", f"enable it with {ENABLE}")
        if isinstance(error, PermissionError):
            return WriterUnreachable(f"the writer service could, but serves another daemon ({self._path})", LOOK)
        return WriterUnreachable(f"the writer service cannot be reached ({self._path}: {error.strerror})", LOOK)
