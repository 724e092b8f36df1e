"""The daemon's own processes: their command line, the log of their standard error, and their end."""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import Process
from collections.abc import Collection

from kinetod.base.safe_text import clean

_EXIT_S = 1.0
_MAX_LINE_CHARS = 1000


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs one of our modules; it imports nothing from the daemon's working directory."""
    return (sys.executable, "-P", "-m", module, *arguments)


async def log_errors(process: Process, log: logging.Logger, name: str, level: int = logging.INFO) -> None:
    """Logs the process's standard error line by line, until no writer is left."""
    assert process.stderr is not None
    with contextlib.suppress(ValueError):  # a line beyond the limit
        async for line in process.stderr:
            text = clean(line.decode("utf-8", "replace").rstrip(), _MAX_LINE_CHARS)
            log.log(level, "%s %d: %s", name, process.pid, text)


async def end(process: Process, *, patience_s: float = 0.0, readers: Collection["asyncio.Task[None]"] = ()) -> str:
    """Ends the process and returns how it ended. It does not wait for one that the kernel does not release.

    patience_s: how long it may take to end by itself once its standard input is closed. readers: tasks that read its
    output and get time to read the rest; what no task reads is discarded, so that the pipes are closed.
    """
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None and not (patience_s and await _ended(process, patience_s)):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await _ended(process, _EXIT_S)
    if readers:
        await asyncio.wait(readers, timeout=_EXIT_S)
    for pipe in filter(None, (process.stdout, process.stderr)):
        with contextlib.suppress(TimeoutError, RuntimeError):  # somebody else holds it open; it is still being read
            await asyncio.wait_for(_drain(pipe), _EXIT_S)
    return "it does not end" if process.returncode is None else f"exit status {process.returncode}"


async def _drain(pipe: asyncio.StreamReader) -> None:
    while await pipe.read(1 << 16):
        pass


async def _ended(process: Process, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), within_s)
    return process.returncode is not None
