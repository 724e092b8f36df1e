"""Corrects endings that the daemon knows better than the agent. host      its disk is full, or its clock was set exec
the process executed another program or changed its credentials. The records came over a link whose peer the kernel
had identified and which an execve closes, so they belong to the approved program. The credentials are nevertheless
checked once more before anything is kept: nothing is kept of a process that now belongs to another user.
plug-ins  an unused plug-in might have recorded what was requested. If nothing that it might declare is missing, a
          capture does not mention it; `kinetoctl doctor` does.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from kineto_agent.sources.registry import ACTIVITY_TYPES
from kineto_trace.base.quantities import format_duration, format_size

from kinetod.base.errors import VerdictReason
from kinetod.captures.result.verdict import Ending, EndState, worse
from kinetod.captures.target.record_spool import DiskFull, ShareUsed, StoreLost
from kinetod.plugins.plugin_loader import KnownPlugins
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import Identity, ProcessKey, how_it_ended

CLOCK_SET_NS = 250_000_000  # less is adjusted smoothly by time services, or is the time between two readings
CANNOT_WRITE = (VerdictReason.DISK_FULL, VerdictReason.STORE_IO)
_READINGS = 3
_EXIT_STATUS_TRIES = 10
_EXIT_STATUS_PERIOD_S = 0.03
log = logging.getLogger(__name__)
Whose = Callable[[ProcessKey], Awaitable[Credentials | None]]
_UNKNOWN = "UNKNOWN_ACTIVITY_TYPE"
# Endings of requests for types that a plug-in might have recorded.
_MISSED = ("NOTHING_TO_RECORD", _UNKNOWN, "ACTIVITY_TYPE_UNAVAILABLE")


def ending_of_disk(exc: DiskFull) -> Ending:
    """The ending for a store that cannot be written to any more."""
    if isinstance(exc, StoreLost):
        return Ending(EndState.PARTIAL, VerdictReason.STORE_IO, str(exc))
    if isinstance(exc, ShareUsed):
        return Ending(EndState.PARTIAL, VerdictReason.QUOTA_EXCEEDED, str(exc))
    return Ending(EndState.PARTIAL, VerdictReason.DISK_FULL, f"{exc}; free space or delete captures")


def ending_of_trace_limit(limit_bytes: int) -> Ending:
    """The ending for a target that used up its share of the disk."""
    limit = format_size(limit_bytes)
    reason = f"the limit of {limit} of raw records per target was reached (kinetod --max-trace-bytes)"
    return Ending(EndState.PARTIAL, VerdictReason.TRACE_LIMIT, reason)


def clock_offset_ns() -> int:
    """Offset of the wall clock from CLOCK_BOOTTIME, from the closest of a few pairs of readings."""
    pairs = []
    for _ in range(_READINGS):
        before_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        wall_ns = time.time_ns()
        took_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - before_ns
        pairs.append((took_ns, wall_ns - before_ns))
    return min(pairs)[1]


def after_clock(ending: Ending, set_by_ns: int) -> Ending:
    """The ending, worsened if the clock was set during the window, since records then mix two time bases."""
    if abs(set_by_ns) < CLOCK_SET_NS or ending.outcome not in (EndState.DONE, EndState.PARTIAL):
        return ending
    how = f"{'forward' if set_by_ns > 0 else 'back'} by {format_duration(abs(set_by_ns))}"
    reason = (
        f"this host's clock was set {how} during the capture, so some records have times outside the "
        "window and are not in the trace"
    )
    return worse(ending, Ending(EndState.PARTIAL, VerdictReason.CLOCK_SET, reason))


async def with_exit_status(ending: Ending, identity: Identity) -> Ending:
    """The ending; for a process that exited, with its exit status added to the reason."""
    if ending.code != VerdictReason.TARGET_EXITED:
        return ending
    return replace(ending, reason=ending.reason + await exit_status(identity))


async def exit_status(identity: Identity) -> str:
    """How the process ended; known only shortly after its files are closed, and not on every kernel."""
    for _ in range(_EXIT_STATUS_TRIES):
        if how := how_it_ended(identity):
            return f": {how}"
        await asyncio.sleep(_EXIT_STATUS_PERIOD_S)
    return ""


async def nobody(_key: ProcessKey) -> Credentials | None:
    """Implements `Whose` if no process can be inspected."""
    return None


async def after_exec(whose: Whose, key: ProcessKey, approved: Credentials | None, ending: Ending) -> Ending:
    """The ending, unless the process is no longer the approved one. whose: its present credentials, or None if it
    ended.
    """
    found = await whose(key) if approved is not None and ending.outcome is not EndState.CANCELLED else None
    if approved is None or found is None or not (difference := approved.difference(found)):
        return ending
    what = f"process {key.pid} replaced itself with another program (exec)"
    if (approved.uids, approved.gids, approved.capabilities) != (found.uids, found.gids, found.capabilities):
        log.warning("%s, or changed its credentials (%s)", what, difference)  # the user who traced it need not know
        reason = f"{what}, or changed its credentials; its data was discarded"
        return Ending(EndState.FAILED, VerdictReason.TARGET_REPLACED, reason)
    if ending.outcome is EndState.DONE:  # the window ended earlier
        return ending
    return Ending(EndState.PARTIAL, VerdictReason.TARGET_REPLACED, f"{what} during the capture; trace it again")


def with_plugins(ending: Ending, plugins: KnownPlugins, missing: Collection[str]) -> Ending:
    """The ending, with the plug-ins that might have recorded the missing types. missing: empty: all default types."""
    if ending.code not in _MISSED:
        return ending
    if ending.code == _UNKNOWN:
        missing = set(missing) - ACTIVITY_TYPES
    return replace(ending, reason="; ".join([ending.reason, *plugins.refusals(missing)]))
