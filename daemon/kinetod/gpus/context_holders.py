"""Which processes hold a context on which GPU, by the vendors' libraries. Used on the event loop.

A capture waits for a fresh reading. Lists are asked for again and again and must be quick: they take what was read
lately, and have it read again meanwhile; only where that is too old they wait. Where the driver is late, what it said
a minute ago is better than nothing: processes hold their contexts for long.
"""

import asyncio
from collections.abc import Mapping

from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import GpuQuestion, GpuState, Snapshot

FRESH_S = 1.0
LATELY_S = 5.0
OLD_S = 60.0
DEADLINE_S = 3.0  # opening the driver takes about a second
LIST_DEADLINE_S = 1.5

Held = Mapping[int, frozenset[int]]  # pid -> GPUs, by the N of /dev/nvidiaN; others as drm_gpus numbers them


class ContextHolders:
    """Asks the reader, which is shared with everybody who looks at GPUs."""

    def __init__(self, reader: GpuReader) -> None:
        self._reader = reader
        self._reading: asyncio.Task[Snapshot] | None = None

    @property
    def has_gpus(self) -> bool:
        """Whether there were any when they were last read, which the daemon does at its start."""
        return bool(self._latest(float("inf")).gpus)

    async def now(self) -> Held:
        """The holders as of at most FRESH_S ago, if the driver answers in time."""
        return _held(await self._read(FRESH_S, DEADLINE_S))

    async def lately(self) -> Held:
        """The holders as of at most LATELY_S ago."""
        latest = self._latest(LATELY_S)
        if not latest.time_ns:
            return _held(await self._read(LATELY_S, LIST_DEADLINE_S))
        if not self._latest(FRESH_S).time_ns and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read(FRESH_S, LIST_DEADLINE_S), name="GPUs are read again")
        return _held(latest)

    async def _read(self, max_age_s: float, deadline_s: float) -> Snapshot:
        question = GpuQuestion.PROCESSES
        found = await asyncio.to_thread(
            lambda: self._reader.read(max_age_s=max_age_s, deadline_s=deadline_s, question=question)
        )
        return found if found.time_ns else self._latest(OLD_S)

    def _latest(self, max_age_s: float) -> Snapshot:
        return self._reader.latest(max_age_s, GpuQuestion.PROCESSES)


def _held(snapshot: Snapshot) -> Held:
    found: dict[int, frozenset[int]] = {}
    for gpu in snapshot.gpus:
        for process in gpu.processes:
            found[process.pid] = found.get(process.pid, frozenset()) | {_number(gpu)}
    return found


def _number(gpu: GpuState) -> int:
    minor = gpu.device.removeprefix("nvidia")
    return int(minor) if minor.isdecimal() else gpu.index
