"""The hook that is a program: `hooks.command`."""

import os
import signal
from collections.abc import Mapping

from kinetod.base.safe_text import clean
from kinetod.hooks.hook_types import Ended, HookOutcome, HookResult
from kinetod.hooks.program_run import run_program

_MAX_TEXT_CHARS = 300
# Of the service manager, for the daemon alone.
_DAEMONS_OWN = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "PYTHONSAFEPATH",
)  # fmt: skip


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
    """The last line of the output, for a message."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return f": {clean(lines[-1].strip(), _MAX_TEXT_CHARS)}" if lines else ""
