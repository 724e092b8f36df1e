"""Endings for a process that executed another program or changed its credentials during the capture.

The records came over a link whose peer the kernel had identified and which an execve closes, so they are of the program
that was allowed to be traced. The credentials are nevertheless checked once more before anything is kept: nothing is
kept of a process that now belongs to another user.
"""

from collections.abc import Awaitable, Callable

from kinetod.base.errors import VerdictReason
from kinetod.captures.result.verdict import Ending, EndState
from kinetod.processes.credentials import REPLACED, Credentials
from kinetod.processes.identity import ProcessKey

Whose = Callable[[ProcessKey], Awaitable[Credentials | None]]


async def nobody(_key: ProcessKey) -> Credentials | None:
    """Stands in for `Whose` where no process can be inspected."""
    return None


async def after_exec(whose: Whose, key: ProcessKey, approved: Credentials | None, ending: Ending) -> Ending:
    """The ending, unless the process is no longer the approved one. whose: what it is now, or None if it ended."""
    found = await whose(key) if approved is not None and ending.outcome is not EndState.CANCELLED else None
    if approved is None or found is None or not (difference := approved.difference(found)):
        return ending
    what = f"process {key.pid} now runs another program: {REPLACED}"
    if (approved.uids, approved.gids, approved.capabilities) != (found.uids, found.gids, found.capabilities):
        reason = f"{what}, or changed its credentials ({difference}); nothing of the capture is kept"
        return Ending(EndState.FAILED, VerdictReason.TARGET_REPLACED, reason)
    if ending.outcome is EndState.DONE:  # the window was over before
        return ending
    return Ending(EndState.PARTIAL, VerdictReason.TARGET_REPLACED, f"{what} during the capture; trace it again")
