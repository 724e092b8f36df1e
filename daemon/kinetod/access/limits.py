"""How much a caller may ask for: requests a second, captures at a time, stored bytes. Pure but for the clock."""

import time
from collections.abc import Callable

from kineto_protos.units import format_size

from kinetod.access.policy import Caller, Role
from kinetod.errors import Exhausted, Reason

BURST_S = 4.0  # so many seconds' worth of requests may come at once
MAX_CALLERS = 10_000


class RequestRate:
    """A token bucket for each caller. `per_second` is asked each time; administrators have one too."""

    def __init__(self, per_second: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._asked: dict[str, tuple[float, float]] = {}  # requests that the time since has not made good for, and when

    def take(self, caller: Caller) -> None:
        """Counts a request. Raises Exhausted."""
        rate, now = self._per_second(), self._clock()
        asked, at = self._asked.pop(caller.key, (0.0, now))
        asked = max(0.0, asked - (now - at) * rate)
        too_many = asked + 1 > max(1.0, rate * BURST_S)
        self._asked[caller.key] = (asked if too_many else asked + 1, now)
        if len(self._asked) > MAX_CALLERS:
            del self._asked[next(iter(self._asked))]  # the one that has asked for nothing for the longest time
        if too_many:
            raise Exhausted(
                Reason.TOO_MANY_REQUESTS,
                f"{caller} sends more than {rate} requests a second (access.requests_per_second); wait a moment",
                retry_after_ms=int((asked + 1 - max(1.0, rate * BURST_S)) / rate * 1000) + 1,
            )


def check_captures(caller: Caller, running: int, most: int) -> None:
    """Whether one more capture may begin beside the `running` ones of this caller. Raises Exhausted."""
    if Role.ADMIN not in caller.roles and running >= most:
        raise Exhausted(
            Reason.TOO_MANY_CAPTURES,
            f"{running} captures of {caller} are running, as many as one user may have "
            "(access.max_captures_per_user); wait for one to end or cancel it",
        )


def check_stored(caller: Caller, stored_bytes: int, quota_bytes: int) -> None:
    """Whether this caller may store more. Raises Exhausted."""
    if quota_bytes and stored_bytes >= quota_bytes and Role.ADMIN not in caller.roles:
        raise Exhausted(
            Reason.QUOTA_EXCEEDED,
            f"the captures of {caller} take {format_size(stored_bytes)}, and one user may have "
            f"{format_size(quota_bytes)} (access.quota_per_user); delete some: kinetoctl captures delete",
            stored_bytes=stored_bytes,
            quota_bytes=quota_bytes,
        )
