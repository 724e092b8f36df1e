"""Limits of each caller: requests per second, concurrent calls and streams, captures, stored bytes. Pure except for the
clock.

Beyond every limit for all callers together, an eighth is reserved for callers who hold none yet, and another eighth for
administrators: so a caller who takes everything available still keeps nobody out.
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from enum import Enum

from kineto_trace.base.quantities import format_size, times

from kinetod.base.errors import Exhausted, Reason
from kinetod.permissions.role_policy import Caller, Role

BURST_S = 4.0  # this many seconds' worth of requests may come at once
MAX_CALLERS = 10_000
RESERVE = 8  # one of this many, see above
# Cost of a call. These calls inspect many processes, start one, or write to the disk and wait for it.
COSTS = {
    "ListProcesses": 2,
    "WatchHost": 2,
    "DiagnoseProcess": 4,
    "DiagnoseHost": 4,
    "ReadStacks": 4,
    "ListCounters": 4,
    "WatchCounters": 4,
    "CreateCapture": 2,
    "PinCapture": 2,
    "DeleteCapture": 2,
    "VerifyCapture": 2,
}


class Debts:
    """What each key has used beyond what has since been refilled; keeps at most `most` keys."""

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self._clock = clock
        self._most = most
        self._known: dict[str, tuple[float, float]] = {}  # amount and time

    def add(self, key: str, amount: float, per_second: float, *, limit: float = math.inf) -> float:
        """The debt including this amount, which is added only if the sum stays within the limit."""
        now = self._clock()
        before, at = self._known.pop(key, (0.0, now))
        before = max(0.0, before - (now - at) * per_second)
        after = before + amount
        self._known[key] = (before if after > limit else after, now)
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]  # the key unused for the longest time
        return after

    def __len__(self) -> int:
        return len(self._known)


class RequestRate:
    """A token bucket for each caller, administrators included. `per_second` is evaluated each time."""

    def __init__(self, per_second: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._asked = Debts(clock, MAX_CALLERS)

    def take(self, key: str, who: object, cost: int = 1) -> None:
        """Counts a request. who: named in the message. Raises Exhausted."""
        if (late_s := self.late_s(key, cost)) > 0:
            raise Exhausted(
                Reason.TOO_MANY_REQUESTS,
                f"{who} is sending more than {self._per_second()} requests per second (access.requests_per_second; an "
                f"expensive one counts as up to {max(COSTS.values())}); wait a moment",
                retry_after_ms=int(late_s * 1000) + 1,
            )

    def late_s(self, key: str, cost: int = 1) -> float:
        """Counts a request and returns 0, or returns how long until one would be accepted."""
        rate = self._per_second()
        most = max(cost, rate * BURST_S)
        asked = self._asked.add(key, cost, rate, limit=most)
        return max(1e-6, (asked - most) / rate) if asked > most else 0.0


class Full(Enum):
    """The limit that prevents a caller from getting one more."""

    OWN = "of one caller"
    ALL = "of all callers"


def full(held: int, used: int, *, own: int, in_all: int, admin: bool) -> Full | None:
    """The limit that prevents a holder of `held` of the `used` ones from getting one more; None if there is none."""
    reserve = in_all // RESERVE
    if admin:
        return None if used < in_all + 2 * reserve else Full.ALL
    if held >= own:
        return Full.OWN
    return None if used < (in_all if held else in_all + reserve) else Full.ALL


class Shares:
    """Counts the calls, watches or streams of each holder. The limits are evaluated each time."""

    def __init__(
        self, reason: Reason, what: str, setting: str, *, own: Callable[[], int], in_all: Callable[[], int]
    ) -> None:
        """what: their name in the plural; setting: the key of the limit for one caller."""
        self._reason = reason
        self._what = what
        self._setting = setting
        self._own = own
        self._in_all = in_all
        self._held: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def one(self, key: str, who: object, *, admin: bool) -> Iterator[None]:
        """Holds one for the block. Raises Exhausted."""
        held, used, own, in_all = self._held[key], self._held.total(), self._own(), self._in_all()
        why = full(held, used, own=own, in_all=in_all, admin=admin)
        if why is Full.OWN:
            raise Exhausted(
                self._reason,
                f"{who} already has as many {self._what} in progress as one caller may have ({held}, {self._setting}); "
                "end one of them or wait for one to end",
            )
        if why is Full.ALL:
            raise Exhausted(
                self._reason,
                f"all callers together have {used} {self._what} in progress, and the limit is {in_all}; wait a moment. "
                f"{self._setting} limits how many one caller may have",
            )
        self._held[key] += 1
        try:
            yield
        finally:
            less(self._held, key)


def less(counter: "collections.Counter[str]", key: str) -> None:
    """Decrements a counter and removes it at zero."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


def check_captures(caller: Caller, own: int, running: int, *, most_own: int, most: int) -> None:
    """Checks that one more capture may begin. own: running captures of this caller. Raises Exhausted."""
    why = full(own, running, own=most_own, in_all=most, admin=Role.ADMIN in caller.roles)
    if why is Full.OWN:
        raise Exhausted(
            Reason.TOO_MANY_CAPTURES,
            f"{caller} already has {times(own, 'running capture')}, the limit for one user "
            "(access.max_captures_per_user); wait for one to end, or cancel one",
        )
    if why is Full.ALL:
        raise Exhausted(
            Reason.TOO_MANY_CAPTURES,
            f"this daemon already has {times(running, 'running capture')}, its limit (kinetod --max-captures); wait "
            "for one to end, or cancel one",
        )


def check_stored(caller: Caller, stored_bytes: int, quota_bytes: int) -> None:
    """Checks that this caller may store more. Raises Exhausted."""
    if quota_bytes and stored_bytes >= quota_bytes and Role.ADMIN not in caller.roles:
        raise Exhausted(
            Reason.QUOTA_EXCEEDED,
            f"the captures of {caller} occupy {format_size(stored_bytes)}, but the limit for one user is "
            f"{format_size(quota_bytes)} (access.quota_per_user); delete some with `kinetoctl captures delete`",
            stored_bytes=stored_bytes,
            quota_bytes=quota_bytes,
        )
