"""Fair turns at a scarce resource: nobody waits for the whole queue of somebody else.

Theory of operation
    `payer` says for whom the running task works; tasks that it starts inherit it. Waiting payers are served in
    rotation, and the requests of one payer in order. `spare` turns beyond `count` are reserved for payers who hold
    none: one payer can take all of `count` while nobody else wants any, and the next one to come still does not wait.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

payer: ContextVar[str] = ContextVar("payer", default="")  # empty: the daemon itself
P = ParamSpec("P")
T = TypeVar("T")


class FairSlots:
    """Grants a limited number of turns at a time, fairly by payer. Use it on one event loop."""

    def __init__(self, count: int, *, spare: int = 0) -> None:
        self._count = count
        self._spare = spare
        self._held: collections.Counter[str] = collections.Counter()
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}  # whose turn it is next comes first

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
        key = payer.get()
        await self._take(key)
        try:
            yield
        finally:
            self._give_back(key)

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking function in a thread while holding a turn."""
        async with self.turn():
            return await asyncio.to_thread(function, *args, **kwargs)

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
        with contextlib.suppress(ValueError):  # its turn had come in the same moment
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
                self._waiting[following] = waiting  # behind the others
            if not granted.done():  # else its cancellation is under way
                self._held[following] += 1
                granted.set_result(None)
