"""The door for libkineto's polls: opens its sockets, keeps trying where that fails, and says how it stands.

Theory of operation
    The places are the abstract name in the daemon's own network namespace, the folders of dynolog.socket_dirs, and the
    network namespaces of containers (namespace_upkeep.py). Each of the first two is opened at the start and, where that
    fails, every RETRY_S again: while Dynolog runs, the name is its own, and stopping it is all that it takes to switch.
    A socket's file that somebody has removed is made again.

    Sockets are made in threads, since folders may lie on slow disks, and then belong to the thread that answers polls.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from kinetod.base.errors import StartError
from kinetod.kineto_ipc.door_findings import ABSTRACT, DoorState
from kinetod.kineto_ipc.name_holder import holder
from kinetod.kineto_ipc.namespace_upkeep import Namespaces
from kinetod.kineto_ipc.network_namespaces import NamespaceOpener, own_namespace
from kinetod.kineto_ipc.poll_sockets import (
    FILE_NAME,
    NAME,
    AbstractSocket,
    FolderSocket,
    NameTaken,
    PollSocket,
    bound_socket,
    queue_length,
)
from kinetod.kineto_ipc.poll_thread import PollThread
from kinetod.kineto_ipc.poller_registry import PollerRegistry

log = logging.getLogger(__name__)

RETRY_S = 30.0
LOOK_S = 10.0  # libkineto tries for some 10 s to send its first poll, and again after 5 s


class PollDoor:
    """Serves polls between `start` and `stop`. folders: those of dynolog.socket_dirs; name: the abstract one.

    namespaces: makes sockets in the network namespaces of containers; None: only the daemon's own is served.
    """

    def __init__(
        self,
        folders: Sequence[Path] = (),
        *,
        namespaces: NamespaceOpener | None = None,
        name: bytes = NAME,
        retry_s: float = RETRY_S,
        look_s: float = LOOK_S,
    ) -> None:
        self.processes = PollerRegistry(asyncio.get_running_loop())
        self._thread = PollThread(self.processes)
        self._places: Mapping[str, Path | None] = {ABSTRACT: None, **{str(folder): folder for folder in folders}}
        self._name = name
        self._namespaces = Namespaces(namespaces, self._thread, retry_s) if namespaces is not None else None
        self._retry_s = retry_s
        self._look_s = look_s
        self._open: dict[str, PollSocket] = {}
        self._problems: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def state(self) -> DoorState:
        """Where polls are answered now, and why not elsewhere."""
        others = self._namespaces
        return DoorState(
            served=tuple(self._open),
            namespaces=others.served() if others is not None else frozenset(),
            own_namespace=own_namespace(),
            problems=dict(self._problems),
            namespace_problems=others.problems() if others is not None else {},
            processes=self.processes.count(),
            queue_length=queue_length(),
        )

    async def start(self) -> None:
        """Opens what can be opened, and keeps trying to open the rest."""
        self._thread.start()
        await self._open_all()
        self._tasks.append(asyncio.create_task(_again(self._open_all, self._retry_s), name="sockets for libkineto"))
        if self._namespaces is not None:
            looking = _again(self._namespaces.look, self._look_s, at_once=True)
            self._tasks.append(asyncio.create_task(looking, name="network namespaces for libkineto"))

    async def stop(self) -> None:
        """Closes everything; processes then find no daemon and try again at their next poll."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.stop)
        self.processes.close()

    async def _open_all(self) -> None:
        for place, folder in self._places.items():
            await self._open_one(place, folder)

    async def _open_one(self, place: str, folder: Path | None) -> None:
        known = self._open.get(place)
        if known is not None:
            if not isinstance(known, FolderSocket) or await asyncio.to_thread(known.is_there):
                return
            log.warning("the socket in %s was removed; it is made again", place)
            del self._open[place]
            self._thread.remove(known)
        sock = await asyncio.to_thread(self._opened, folder)
        if isinstance(sock, str):
            self._failed(place, sock)
            return
        self._open[place] = sock
        self._thread.add(sock)
        self._problems.pop(place, None)
        log.info("libkineto's polls are answered at %s", place)

    def _failed(self, place: str, why: str) -> None:
        if self._problems.get(place) != why:
            log.warning(
                "libkineto's polls are not answered at %s: %s; trying again every %g s", place, why, self._retry_s
            )
        self._problems[place] = why

    def _opened(self, folder: Path | None) -> PollSocket | str:
        """The socket, or why there is none. Blocking."""
        try:
            return AbstractSocket(bound_socket(self._name)) if folder is None else FolderSocket(folder)
        except NameTaken:
            name = self._name.replace(b"\0", b"@").decode() if folder is None else str(folder / FILE_NAME)
            who = holder(name) or "another process, which this daemon cannot see (`sudo ss -xlp` can),"
            return f"{who} has it; stop that, or set dynolog.ipc = false"
        except (OSError, StartError) as exc:
            return getattr(exc, "strerror", None) or str(exc)


async def _again(work: Callable[[], Awaitable[None]], period_s: float, *, at_once: bool = False) -> None:
    """Does it again and again, whatever comes of it."""
    if not at_once:
        await asyncio.sleep(period_s)
    while True:
        try:
            await work()
        except Exception:  # the next attempt may do better
            log.exception("looking after the sockets for libkineto failed")
        await asyncio.sleep(period_s)
