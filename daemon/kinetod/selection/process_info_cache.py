"""What the kernel says about processes with an agent, kept for a moment, for lists that are asked for again and again.

Theory of operation
    Reading a process's facts takes a dozen files and a question to the helper service: 30 ms of CPU for 64 processes.
    Facts that are a second old are shown once more and read again in the background, for the next list. Callers wait
    only for facts that nobody has asked for lately. A process whose agent has gone is always read anew.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from kinetod.processes.identity import ProcessKey
from kinetod.processes.process_info import ProcessFacts

FRESH_S = 1.0  # so long they are not read again
SHOWN_S = 3.0  # so long they may be shown
BATCH = 8  # processes read at a time behind an answer: who asks meanwhile is not to wait for all of them

Read = Callable[[Sequence[int]], Awaitable[list[ProcessFacts]]]


class RecentFacts:
    """Facts by pid. `read` gives those of processes that exist; `is_steady` says of which they may be kept."""

    def __init__(self, read: Read, is_steady: Callable[[ProcessKey], bool]) -> None:
        self._read = read
        self._is_steady = is_steady
        self._kept: dict[int, tuple[float, ProcessFacts]] = {}  # pid -> monotonic time of reading, facts
        self._renewal: asyncio.Task[None] | None = None

    async def get(self, pids: Sequence[int]) -> list[ProcessFacts]:
        """The facts of the processes that exist, in the order of `pids`; at most SHOWN_S old."""
        now = time.monotonic()
        self._kept = {
            pid: (read_at, facts)
            for pid, (read_at, facts) in self._kept.items()
            if now - read_at <= SHOWN_S and self._is_steady(facts.key)
        }
        known = {pid: facts for pid, (_read_at, facts) in self._kept.items()}
        missing = [pid for pid in pids if pid not in known]
        if missing:
            known |= {facts.key.pid: facts for facts in await self._read_anew(missing)}
        self._renew([pid for pid, (read_at, _facts) in self._kept.items() if now - read_at > FRESH_S])
        return [known[pid] for pid in pids if pid in known]

    async def _read_anew(self, pids: Sequence[int]) -> list[ProcessFacts]:
        read_at, read = time.monotonic(), await self._read(pids)
        for pid in pids:
            self._kept.pop(pid, None)
        self._kept |= {facts.key.pid: (read_at, facts) for facts in read if self._is_steady(facts.key)}
        return read

    def _renew(self, pids: list[int]) -> None:
        if pids and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.create_task(self._read_in_batches(pids), name="facts")

    async def _read_in_batches(self, pids: Sequence[int]) -> None:
        for first in range(0, len(pids), BATCH):
            await self._read_anew(pids[first : first + BATCH])
