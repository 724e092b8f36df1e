"""Tasks that nobody awaits: kept until they are done, a failure logged, ended together."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """failure: what is logged, with the exception, when one fails."""

    def __init__(self, log: logging.Logger, failure: str) -> None:
        self._log = log
        self._failure = failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Starts a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._log.error(self._failure, exc_info=exc)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Ends them, after they have had grace_s seconds to end by themselves."""
        tasks = list(self._tasks)
        if tasks and grace_s:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
