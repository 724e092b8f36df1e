"""Asks a process of the daemon's own one question: whatever blocks or crashes there, the daemon goes on."""

import asyncio
import contextlib
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kinetod.base.safe_text import clean
from kinetod.supervise import child

MAX_LINE_BYTES = 8 << 20
_MAX_ERROR_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a process ended. status: None if it was killed at the deadline. errors: its standard error."""

    status: int | None
    errors: str = ""


async def ask(
    command: Sequence[str], question: bytes, on_line: Callable[[bytes], object], *, deadline_s: float
) -> ProcessEnd:
    """Starts a process with the question on its standard input and hands over each line of its answer.

    Raises OSError if it cannot be started, ValueError for a line that is too long, and what `on_line` raises; the
    process has been ended by then.
    """
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_LINE_BYTES)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
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
        await child.end(process)
    return ProcessEnd(status=process.returncode, errors=clean(text, _MAX_ERROR_CHARS))
