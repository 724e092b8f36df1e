"""Fair turns at a scarce resource: no user waits for another one's whole queue.

Theory of operation
    `fair_share_key` identifies the user that the running task works for; its tasks inherit it. Waiting keys are served
    in rotation, and the requests of one key in order. `spare` turns beyond `count` are reserved for keys that hold
    none: one key can take all of `count` while no other key needs any, and the next key still does not wait.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

fair_share_key: ContextVar[str] = ContextVar("fair_share_key", default="")  # empty: the daemon itself
P = ParamSpec("P")
T = TypeVar("T")


class FairSlots:
    """Grants a limited number of turns at a time, fairly by key. Use it on one event loop.

    threads: used by `in_thread`, as many as there are turns; None: the whole daemon's.
    """

    def __init__(self, count: int, *, spare: int = 0, threads: Executor | None = None) -> None:
        self._threads = threads
        self._count = count
        self._spare = spare
        self._held: collections.Counter[str] = collections.Counter()
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}  # in the order of their turns

    def resize(self, count: int, *, spare: int = 0) -> None:
        """Changes the number of turns. Turns already taken are kept."""
        self._count, self._spare = count, spare
        self._grant()

    @property
    def used(self) -> int:
        """The number of turns taken now."""
        return self._held.total()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn and holds it for the block."""
        key = fair_share_key.get()
        await self._take(key)
        try:
            yield
        finally:
            self._give_back(key)

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking function in a thread while holding a turn."""
        call = partial(copy_context().run, function, *args, **kwargs)
        async with self.turn():
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _is_free_for(self, key: str) -> bool:
        most = self._count if self._held[key] else self._count + self._spare
        return self.used < most

    async def _take(self, key: str) -> None:
        if key not in self._waiting and self._is_free_for(key):
            self._held[key] += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, collections.deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back(key)
            else:
                self._forget(key, granted)
            raise

    def _forget(self, key: str, granted: "asyncio.Future[None]") -> None:
        waiting = self._waiting.get(key, collections.deque())
        with contextlib.suppress(ValueError):  # it got its turn at the same moment
            waiting.remove(granted)
        if not waiting:
            self._waiting.pop(key, None)

    def _give_back(self, key: str) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._grant()

    def _grant(self) -> None:
        while (following := next(filter(self._is_free_for, self._waiting), None)) is not None:
            waiting = self._waiting.pop(following)
            granted = waiting.popleft()
            if waiting:
                self._waiting[following] = waiting  # after the others
            if not granted.done():  # otherwise it is being cancelled
                self._held[following] += 1
                granted.set_result(None)
