"""A process of the daemon's own that is kept warm and answers one question after another."""

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Awaitable
from typing import TypeVar

from kinetod.supervise import child

_EXIT_S = 2.0
T = TypeVar("T")


class Crashed(Exception):
    """A child ended, or gave an answer that it should not give. how: how it ended."""

    def __init__(self, what: str = "", how: str = "") -> None:
        super().__init__(what)
        self.how = how


class TooLate(Exception):
    """A child was killed because it did not answer before its deadline."""


class WarmChild:
    """One process. Its standard error is logged, and it ends by itself once its standard input is closed."""

    def __init__(self, process: Process, log: logging.Logger, name: str, level: int = logging.INFO) -> None:
        self.process = process
        self.readers = [asyncio.create_task(child.log_errors(process, log, name, level))]

    async def within(self, deadline_s: float, answer: Awaitable[T]) -> T:
        """Awaits an answer of this child, which is ended unless it gives one. Raises TooLate, Crashed."""
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            await self.stop(kill=True)
            raise TooLate from None
        except Crashed as exc:
            exc.how = await self.stop(kill=False)  # killing what has just ended would hide its exit status
            raise
        except BaseException:
            await self.stop(kill=True)
            raise

    async def stop(self, *, kill: bool) -> str:
        """Ends the process, at once or once it has nothing to do, and returns how it ended."""
        return await child.end(self.process, patience_s=0.0 if kill else _EXIT_S, readers=self.readers)
