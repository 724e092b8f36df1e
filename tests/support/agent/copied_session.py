"""A session on a thread like the agent's, and the daemon's side of its arena, which copies what that gives."""

from __future__ import annotations

import time
from typing import Any

from kineto_agent.sources.interface import SourceOutcome
from kineto_agent.system.threads import start_thread

from support.agent.arenas import ArenaReader, Recycler

COPY_PERIOD_S = 0.01


def on_agent_thread(action: Any) -> Any:
    """Run it on a thread like the agent's. Returns its value or raises its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((action(), None))
        except Exception as exc:
            results.append((None, exc))

    start_thread("kineto-agent", run).join()
    value, error = results[0]
    if error is not None:
        raise error
    return value


class CopiedSession:
    """One session, started and stopped on such a thread. stopped_after_s: how long its stop has taken."""

    def __init__(self, prepare: Any) -> None:
        self.session: Any = on_agent_thread(prepare)
        self._daemon = Recycler(ArenaReader(self.session.arena_fd), COPY_PERIOD_S)
        self._daemon.start()
        self.stopped_after_s = 0.0
        on_agent_thread(self.session.start)

    def copied(self) -> bytes:
        """Everything that was recorded, once the session has stopped."""
        return b"".join(buffer.data for buffer in self._daemon.end())

    def stop(self) -> tuple[SourceOutcome, bytes]:
        """Stop the session. Returns its outcome and the bytes that the daemon has."""
        begin = time.monotonic()
        outcome: SourceOutcome = on_agent_thread(self.session.stop)
        self.stopped_after_s = time.monotonic() - begin
        data = self.copied()
        on_agent_thread(self.session.close)
        return outcome, data
