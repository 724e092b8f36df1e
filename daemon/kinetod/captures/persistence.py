"""Stores the results of captures, even if the disk stays full for a long time."""

import asyncio
import logging
import shutil
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.base.errors import KinetodError
from kinetod.captures.live_capture import Running
from kinetod.store.capture_store import Store

log = logging.getLogger(__name__)

TRIES = 5
RETRY_S = 1.0
LATE_S = 5.0


class Saver:
    """Writes to the index, retrying if necessary; a capture whose end could not be saved is recovered at a restart."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def target(self, running: Running, number: int, garbage: Path | None) -> None:
        """Stores a verdict, and only then removes files that are no longer needed."""
        capture = running.capture
        if not await self._save(self._store.save_target, capture.id, number, capture.targets[number]):
            running.unsaved[number] = garbage
            return
        running.unsaved.pop(number, None)
        if garbage is not None:
            await asyncio.to_thread(shutil.rmtree, garbage, ignore_errors=True)

    async def end(self, running: Running) -> bool:
        """Stores the end of a capture. Returns whether it could be stored."""
        return await self._save(self._store.save_end, running.capture)

    async def answer(self, capture: pb.Capture) -> None:
        """Stores where the time of a capture went, however long the disk stays full."""
        while not await self._save(self._store.save_answer, capture.id, capture.answer):
            await asyncio.sleep(LATE_S)

    async def late(self, running: Running, saved: bool) -> None:
        """Retries failed writes, however long the disk stays full."""
        while not saved:
            await asyncio.sleep(LATE_S)
            saved = await self.end(running)
        while running.unsaved:
            for number, garbage in list(running.unsaved.items()):
                await self.target(running, number, garbage)
            await asyncio.sleep(LATE_S if running.unsaved else 0)

    async def _save(self, method: object, *args: object) -> bool:
        for attempt in range(TRIES):
            try:
                await self._store.run(method, *args)  # type: ignore[arg-type]  # the store's own methods
            except KinetodError as exc:
                if attempt + 1 == TRIES:
                    log.error("%s", exc)
                else:
                    await asyncio.sleep(RETRY_S)
            else:
                return True
        return False
