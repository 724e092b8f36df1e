"""The daemon's side of an arena: copies what it gives, as kinetod does."""

from __future__ import annotations

import threading

from support.agent.arenas import ArenaReader

COPY_PERIOD_S = 0.01


class CopyingDaemon:
    """Copies what an arena gives and frees its buffers."""

    def __init__(self, fd: int) -> None:
        self.parts: list[bytes] = []
        self._reader = ArenaReader(fd)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(COPY_PERIOD_S):
            self._copy()

    def _copy(self) -> None:
        for buffer in self._reader.ready():
            self.parts.append(buffer.data)
            self._reader.free(buffer.slot)

    def end(self) -> bytes:
        """Take the rest, once the session has stopped. Returns everything."""
        self._ended.set()
        self._thread.join()
        self._copy()
        return b"".join(self.parts)
