"""Keeps a socket for polls in each network namespace of interest, as long as somebody there looks for one."""

import asyncio
import logging
from collections.abc import Collection, Mapping

from kinetod.kineto_ipc.network_namespaces import NamespaceOpener
from kinetod.kineto_ipc.poll_sockets import AbstractSocket
from kinetod.kineto_ipc.poll_thread import PollThread

log = logging.getLogger(__name__)

MOST_FAILURES = 6  # a socket keeps its namespace alive: after so many looks that failed it is closed


class Namespaces:
    """The sockets in other network namespaces, on which `thread` answers. retry_s: how soon to try one again."""

    def __init__(self, opener: NamespaceOpener, thread: PollThread, retry_s: float) -> None:
        self._opener = opener
        self._thread = thread
        self._retry_s = retry_s
        self._open: dict[int, AbstractSocket] = {}
        self._problems: dict[int, tuple[str, float]] = {}  # and when it failed
        self._failures = 0

    def served(self) -> frozenset[int]:
        """The inodes of those with a socket."""
        return frozenset(self._open)

    def problems(self) -> Mapping[int, str]:
        """Why others have none, by inode."""
        return {namespace: why for namespace, (why, _) in self._problems.items()}

    async def look(self) -> None:
        """Opens sockets in namespaces that are new, and closes those that nobody needs any more."""
        now_s = asyncio.get_running_loop().time()
        lately = {each for each, (_, at_s) in self._problems.items() if now_s - at_s < self._retry_s}
        seen = await self._opener.poll_sockets({*self._open, *lately})
        if seen is None:
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                self._close(self._open)
            return
        self._failures = 0
        for namespace, sock in seen.opened.items():
            self._open[namespace] = made = AbstractSocket(sock)
            self._thread.add(made)
            self._problems.pop(namespace, None)
            log.info("libkineto's polls are answered in the network namespace %d", namespace)
        for namespace, why in seen.problems.items():
            if self._problems.get(namespace, ("", 0.0))[0] != why:
                log.warning("libkineto's polls are not answered in the network namespace %d: %s", namespace, why)
            self._problems[namespace] = why, now_s
        self._close(self._open.keys() - seen.inhabited)
        for namespace in self._problems.keys() - seen.inhabited:
            del self._problems[namespace]

    def _close(self, namespaces: Collection[int]) -> None:
        for namespace in list(namespaces):
            self._thread.remove(self._open.pop(namespace))
            log.info("no process in the network namespace %d looks for a daemon any more", namespace)
