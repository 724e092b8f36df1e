"""Threads for what looks into folders of processes.

Such a folder may lie on a file system that does not answer. So no other part of the daemon waits for these threads.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

LOOK_DEADLINE_S = 5.0
_THREADS = 8
T = TypeVar("T")


class FileThreads:
    """A few threads, shared by all folders."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "kineto-files")

    async def run(
        self, function: Callable[..., T], *args: Any, deadline_s: float = LOOK_DEADLINE_S, **kwargs: Any
    ) -> T:
        """Calls a function in a thread. Raises TimeoutError, and what the function raises."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(deadline_s):
            return await loop.run_in_executor(self._threads, partial(function, *args, **kwargs))

    def stop(self) -> None:
        """Leaves what still blocks to itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
