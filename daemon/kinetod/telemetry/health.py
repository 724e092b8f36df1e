"""The health of the daemon, as reported to the health service, the watchdog and STATUS=.

Theory of operation
    A problem is something that a restart may fix: agents cannot connect, the store cannot be written, decode workers do
    not start, or the disk does not answer. With a problem the daemon is not SERVING and does not feed the watchdog, so
    that the service manager restarts it after WatchdogSec. A full disk is a note, not a problem: a new daemon would
    find it just as full, and agents would have lost their links for nothing.

    What can be repaired is repaired at once: removed sockets, dead workers, a store whose folder was removed.

    The store is probed rarely, because a write costs the disk a little; everything else is checked each time. A disk
    that hangs blocks one thread, not one per check.
"""

import asyncio
import errno
import logging
import sqlite3
import time
from dataclasses import dataclass

from kineto_trace.base.atomic_files import is_full

from kinetod.access.connections.connection_proxy import ConnectionProxy
from kinetod.agents.link import LinkServer
from kinetod.captures.result.decode_pool import WorkerPool
from kinetod.store.capture_store import Store

log = logging.getLogger(__name__)

PROBE_DEADLINE_S = 5.0
PROBE_PERIOD_S = 30.0


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The current problems."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"unhealthy: {'; '.join(self.problems)}" if self.problems else "", *self.notes]
        return "; ".join(filter(None, parts))


class Health:
    """Checks the daemon's parts, one check at a time."""

    def __init__(
        self,
        link: LinkServer,
        store: Store,
        workers: WorkerPool,
        *,
        front: ConnectionProxy | None = None,
        probe_period_s: float = PROBE_PERIOD_S,
        probe_deadline_s: float = PROBE_DEADLINE_S,
    ) -> None:
        self._link = link
        self._store = store
        self._workers = workers
        self._front = front
        self._probe_period_s = probe_period_s
        self._probe_deadline_s = probe_deadline_s
        self._probed_at = float("-inf")
        self._probe: asyncio.Future[OSError | None] | None = None
        self._last: OSError | None = None
        self._problems: tuple[str, ...] = ()

    async def look(self) -> HealthReport:
        """Checks everything, the store for at most `probe_deadline_s`, and logs changes."""
        problems, notes = list[str](), list[str]()
        problems += self._link.mend()
        if self._front is not None:
            problems += self._front.mend()
        if not await self._workers.tend():
            problems.append("decode workers do not start")
        error = await self._store_error()
        if isinstance(error, TimeoutError):
            problems.append(f"the disk of {self._store.state_dir} is not responding")
        elif error is not None and is_full(error):
            notes.append(f"the disk of {self._store.state_dir} is full")
        elif error is not None:
            problems.append(f"the store {self._store.state_dir} cannot be written: {error.strerror}")
        self._log(tuple(problems))
        return HealthReport(tuple(problems), tuple(notes))

    async def _store_error(self) -> OSError | None:
        if self._probe is None:
            self._probe = asyncio.ensure_future(asyncio.to_thread(self._look_at_store))
        await asyncio.wait([self._probe], timeout=self._probe_deadline_s)
        if not self._probe.done():
            return TimeoutError()
        probe, self._probe = self._probe, None
        return probe.result()

    def _look_at_store(self) -> OSError | None:
        try:
            self._store.mend()
            if self._last is not None or time.monotonic() >= self._probed_at + self._probe_period_s:
                self._store.check_writable()
                self._probed_at = time.monotonic()
        except OSError as exc:
            self._last = exc
        except sqlite3.Error as exc:
            self._last = OSError(errno.EIO, str(exc))
        else:
            self._last = None
        return self._last

    def _log(self, problems: tuple[str, ...]) -> None:
        for problem in problems:
            if problem not in self._problems:
                log.error("%s", problem)
        if self._problems and not problems:
            log.info("everything works again")
        self._problems = problems
