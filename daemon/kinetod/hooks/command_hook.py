"""The hook that runs a program: `hooks.command`."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kinetod.base.safe_text import redacted
from kinetod.hooks.hook_types import Ended, HookOutcome, HookResult
from kinetod.supervise.child import end

_MAX_TEXT_CHARS = 300
# Variables of the service manager, for the daemon only.
_DAEMONS_OWN = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "PYTHONSAFEPATH",
)  # fmt: skip
NICE = 10  # the traced programs and the daemon's answers have priority
MAX_OUTPUT_BYTES = 16 << 10
_TERM_GRACE_S = 2.0
_REST_S = 0.5  # to read the rest of the output, once nobody is left who could write


class CommandHook:
    """Runs a program with the capture's JSON on its standard input. No shell is involved, and a try is final."""

    kind = "command"

    def __init__(self, argv: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> None:
        self._argv = argv
        self._environ = environ
        self.name = argv[0]

    async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
        """See Hook."""
        environ = {name: value for name, value in self._environ.items() if name not in _DAEMONS_OWN}
        try:
            found = await run_program(self._argv, ended.body, environ | dict(ended.variables), timeout_s)
        except (OSError, ValueError) as exc:
            return HookOutcome(result=HookResult.FAILED, text=f"cannot be started: {exc}")
        said = last_line(found.output)
        if found.status is None:
            return HookOutcome(result=HookResult.TIMEOUT, text=f"took longer than {timeout_s:g} s and was killed{said}")
        if found.status:
            return HookOutcome(result=HookResult.FAILED, text=f"{_how(found.status)}{said}")
        return HookOutcome(result=HookResult.OK)


def _how(status: int) -> str:
    if status > 0:
        return f"ended with status {status}"
    known = {int(number): number.name for number in signal.Signals}
    return f"was killed by {known.get(-status, f'signal {-status}')}"


def last_line(output: bytes) -> str:
    """The last line of the output, for a message: without what looks like a secret."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return f": {redacted(lines[-1])[:_MAX_TEXT_CHARS]}" if lines else ""


# Runs an arbitrary program with a deadline, low priority and bounded output.
#
# The program gets its input as a file in memory, so that no task has to feed it, and leads a session of its own.
# Its output is read as fast as it arrives, and only the last bytes are kept. When the program has ended, or at the
# deadline, every process still in its group is killed too: a hook leaves nothing behind.
@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A program's result. status: as in asyncio, negative for signals; None at the deadline. output: its last bytes."""

    status: int | None
    output: bytes


async def run_program(argv: Sequence[str], data: bytes, environ: Mapping[str, str], timeout_s: float) -> Exit:
    """Runs a program to its end. Raises OSError if it cannot be started. If cancelled, ends it first."""
    reader, writer = os.pipe()
    output = _Output(reader)
    try:
        with open(_in_memory(data), "rb") as stdin:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=stdin, stdout=writer, stderr=writer, cwd="/", env=environ, start_new_session=True
            )
    except BaseException:
        os.close(writer)
        await output.stop()
        raise
    os.close(writer)
    status: int | None = None
    try:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, process.pid, NICE)
        await output.start()
        with contextlib.suppress(TimeoutError):
            status = await asyncio.wait_for(process.wait(), timeout_s)
        if status is None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _TERM_GRACE_S)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        await end(process)
        await output.stop()
    return Exit(status=status, output=bytes(output.kept))


def _in_memory(data: bytes) -> int:
    """A descriptor of a file with this content, at its beginning."""
    descriptor = os.memfd_create("capture", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class _Output(asyncio.Protocol):
    """Reads a pipe to its end and keeps the last bytes."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "rb", buffering=0)  # closing it twice is harmless
        self._transport: asyncio.ReadTransport | None = None
        self._ended = asyncio.Event()
        self.kept = bytearray()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: self, self._pipe)

    def data_received(self, data: bytes) -> None:
        self.kept += data
        del self.kept[:-MAX_OUTPUT_BYTES]

    def connection_lost(self, _exc: Exception | None) -> None:
        self._ended.set()

    async def stop(self) -> None:
        """Stops reading. A process that left the group may keep the pipe open; it is not waited for."""
        if self._transport is None:
            self._pipe.close()
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _REST_S)
        self._transport.close()
