"""Endings caused by this host itself: its disk, its clock."""

import asyncio
import time
from dataclasses import replace

from kineto_protos.units import format_duration, format_size

from kinetod.base.errors import VerdictReason
from kinetod.captures.result.verdict import Ending, EndState, worse
from kinetod.captures.target.record_spool import DiskFull, ShareUsed, StoreLost
from kinetod.processes.identity import Identity, how_it_ended

CLOCK_SET_NS = 250_000_000  # less is adjusted smoothly by time services, or is the time between two readings
CANNOT_WRITE = (VerdictReason.DISK_FULL, VerdictReason.STORE_IO)
_READINGS = 3
_EXIT_STATUS_TRIES = 10
_EXIT_STATUS_PERIOD_S = 0.03


def ending_of_disk(exc: DiskFull) -> Ending:
    """The ending for a store to which nothing more can be written."""
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
    """How far the wall clock is ahead of CLOCK_BOOTTIME, from the closest of a few pairs of readings."""
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
        f"this host's clock was set {how} during the capture; records from the other side of that change have "
        "times outside the window and are not in the trace"
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
