"""The daemon's own processes: logs their standard error, queries them and ends them."""

import asyncio
import contextlib
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kineto_trace.base.own_processes import python as python

from kinetod.base.safe_text import clean

MAX_LINE_BYTES = 8 << 20
_PATIENCE_S = 2.0  # for one that may end by itself
_EXIT_S = 1.0
_MAX_LINE_CHARS = 1000
_MAX_ERROR_CHARS, _MAX_ERROR_BYTES = 4000, 64 << 10
T = TypeVar("T")


async def log_errors(process: Process, log: logging.Logger, name: str, level: int = logging.INFO) -> None:
    """Logs the process's standard error line by line, until no writer is left."""
    assert process.stderr is not None
    with contextlib.suppress(ValueError):  # a line beyond the limit
        async for line in process.stderr:
            text = clean(line.decode("utf-8", "replace").rstrip(), _MAX_LINE_CHARS)
            log.log(level, "%s %d: %s", name, process.pid, text)


async def end(process: Process, *, patience_s: float = 0.0, readers: Collection["asyncio.Task[None]"] = ()) -> str:
    """Ends the process and returns how it ended. Does not wait for one that the kernel does not release, nor for one
    that runs as another user and may not be killed.

    patience_s: how long it may take to end by itself once its standard input is closed. readers: tasks that read its
    output and get time to read the rest; other output is discarded, so that the pipes are closed.
    """
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None and not (patience_s and await _ended(process, patience_s)):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone, or runs as another user by now
            process.kill()
        await _ended(process, _EXIT_S)
    if readers:
        await asyncio.wait(readers, timeout=_EXIT_S)
    for pipe in filter(None, (process.stdout, process.stderr)):
        with contextlib.suppress(TimeoutError, RuntimeError):  # another process holds it open; it is still being read
            await asyncio.wait_for(_drain(pipe), _EXIT_S)
    return "it did not exit" if process.returncode is None else f"exit status {process.returncode}"


async def _drain(pipe: asyncio.StreamReader) -> None:
    while await pipe.read(1 << 16):
        pass


async def _ended(process: Process, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), within_s)
    return process.returncode is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a process ended. status: None if it was killed at the deadline. errors: its standard error."""

    status: int | None
    errors: str = ""


async def ask_once(
    command: Sequence[str],
    question: bytes,
    on_line: Callable[[bytes], object],
    *,
    deadline_s: float,
    pass_fds: Sequence[int] = (),
) -> ProcessEnd:
    """Starts a process with the question on its standard input and calls `on_line` with each line of its answer.

    pass_fds: descriptors that it gets under the same numbers.

    Raises OSError if it cannot be started, ValueError for a line that is too long, and exceptions of `on_line`; the
    process has been ended by then.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_LINE_BYTES, pass_fds=pass_fds
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(_beginning(process.stderr))
    try:
        async with asyncio.timeout(deadline_s):
            with contextlib.suppress(ConnectionError):
                process.stdin.write(question)
                await process.stdin.drain()
                process.stdin.close()
            while line := await process.stdout.readline():
                on_line(line)
            await process.wait()
            text = (await errors).decode("utf-8", "replace")
    except TimeoutError:
        return ProcessEnd(status=None)
    finally:
        errors.cancel()
        await end(process)
    return ProcessEnd(status=process.returncode, errors=clean(text, _MAX_ERROR_CHARS))


async def _beginning(pipe: asyncio.StreamReader) -> bytes:
    """Reads to the end, and returns as much of it as is told."""
    text = await pipe.read(_MAX_ERROR_BYTES)
    while len(text) < _MAX_ERROR_BYTES and (more := await pipe.read(_MAX_ERROR_BYTES)):
        text += more
    await _drain(pipe)
    return text


class Crashed(Exception):
    """A child ended, or gave an invalid answer. how: how it ended."""

    def __init__(self, what: str = "", how: str = "") -> None:
        super().__init__(what)
        self.how = how


class TooLate(Exception):
    """A child was killed because it did not answer before its deadline."""


class WarmChild:
    """One process. Its standard error is logged, and it ends by itself once its standard input is closed."""

    def __init__(self, process: Process, log: logging.Logger, name: str, level: int = logging.INFO) -> None:
        self.process = process
        self.readers = [asyncio.create_task(log_errors(process, log, name, level))]

    async def within(self, deadline_s: float, answer: Awaitable[T]) -> T:
        """Awaits an answer of this child, and ends the child if there is none. Raises TooLate, Crashed."""
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            await self.stop(kill=True)
            raise TooLate from None
        except Crashed as exc:
            exc.how = await self.stop(kill=False)  # killing a process that has just ended would hide its exit status
            raise
        except BaseException:
            await self.stop(kill=True)
            raise

    async def stop(self, *, kill: bool) -> str:
        """Ends the process, at once or when it is idle, and returns how it ended."""
        return await end(self.process, patience_s=0.0 if kill else _PATIENCE_S, readers=self.readers)
