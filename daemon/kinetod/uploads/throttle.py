"""A limit of bytes per second for several threads together, of which each user has an equal share."""

import threading
import time
from collections.abc import Callable

_STEP_S = 1.0


class Throttle:
    """Who wants to send pays first: what the same user wants later waits until that has flowed off. Rate 0: no limit.

    A user's bytes flow at the rate divided by the users who have something under way then. So what one has paid
    for, which may be a file of hours, holds up no other.
    """

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
        self._free_at: dict[str, float] = {}  # by the clock, when everything that a user paid for has flowed off

    def share(self, user: str) -> "Share":
        """This user's share of the throttle."""
        return Share(self, user)

    def take(self, size: int, alive: Callable[[], None] = lambda: None, *, user: str = "") -> None:
        """Returns when `size` bytes may be sent; calls `alive` at least every second meanwhile, which may raise."""
        if self._rate <= 0:
            return
        with self._lock:
            now = self._clock()
            self._free_at = {each: at for each, at in self._free_at.items() if at > now}
            begin = self._free_at.setdefault(user, now)
            self._free_at[user] = begin + size * len(self._free_at) / self._rate
        while (rest := begin - self._clock()) > 0:
            alive()
            self._sleep(min(rest, _STEP_S))


class Share:
    """One user's part of a throttle."""

    def __init__(self, throttle: Throttle, user: str) -> None:
        self._throttle = throttle
        self._user = user

    def take(self, size: int, alive: Callable[[], None] = lambda: None) -> None:
        """See Throttle.take."""
        self._throttle.take(size, alive, user=self._user)
