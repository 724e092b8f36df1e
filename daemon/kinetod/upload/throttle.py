"""A limit of bytes per second for several threads together."""

import threading
import time
from collections.abc import Callable

_STEP_S = 1.0


class Throttle:
    """Who wants to send pays first: later ones wait until what was paid for has flowed off. Rate 0: no limit."""

    def __init__(
        self,
        bytes_per_second: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0  # by the clock, when everything paid for has flowed off

    def take(self, size: int, alive: Callable[[], None] = lambda: None) -> None:
        """Returns when `size` bytes may be sent; calls `alive` at least every second meanwhile, which may raise."""
        if self._rate <= 0:
            return
        with self._lock:
            begin = max(self._free_at, self._clock())
            self._free_at = begin + size / self._rate
        while (rest := begin - self._clock()) > 0:
            alive()
            self._sleep(min(rest, _STEP_S))
