"""Reopens and retries calls: how long a client puts up with a daemon that does not answer, and streams that go on."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from kinetoctl.errors import CancelledByDaemon, CliError, TimedOut, Unreachable

# What a stream may end with when the daemon restarts. Any other error is an answer, not an absence.
RETRYABLE = (Unreachable, CancelledByDaemon)
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
SHORTEST_STREAM_S = 1.0  # a stream that ends sooner is not reopened
T = TypeVar("T")


class Patience:
    """Pauses between retries. After limit_s seconds without progress, the error is raised instead."""

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self.progressed()

    def progressed(self) -> None:
        """Notes progress: the limit and the pauses start again."""
        self._since = self._clock()
        self._pause_s = FIRST_PAUSE_S

    def wait(self, error: CliError) -> None:
        """Pause before the next try. Raises error if the limit is reached."""
        self._sleep(self.pause_s(error))

    def pause_s(self, error: CliError) -> float:
        """How long to pause before the next try. Raises error if the limit is reached."""
        pause_s = self._pause_s
        if self._clock() - self._since + pause_s > self._limit_s:
            raise error
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


def kept_open(watch: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Yields what the daemon sends as long as it does; reopens a stream that reaches its deadline."""
    while True:
        began = time.monotonic()
        try:
            yield from watch()
            return
        except TimedOut:
            if time.monotonic() - began < SHORTEST_STREAM_S:
                raise
