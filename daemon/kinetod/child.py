"""Processes that answer one question and end."""

import asyncio
import contextlib
from asyncio.subprocess import Process

_EXIT_S = 1.0


async def end(process: Process) -> None:
    """It runs no more; one that the kernel does not let go is not waited for."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _EXIT_S)
