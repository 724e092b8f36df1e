"""Waits until a condition holds that nothing announces, and scales every deadline of the tests with the machine.

This module runs under every Python that the agent supports.
"""

from __future__ import annotations  # the agent's tests run under 3.9

import os
import threading
import time
from typing import Callable, Optional, TypeVar

SLOWDOWN_VARIABLE = "KINETO_TESTS_SLOWDOWN"
MOST_SLOWDOWN = 8.0  # a test that hangs ends within the 300 s of pytest-timeout
DEADLINE_S = 20.0
PAUSE_S, LONGEST_PAUSE_S, LONGER = 0.002, 0.05, 1.25
T = TypeVar("T")


def slowdown() -> float:
    """How many times longer things may take than on a quiet machine: the variable's value, or the load of each core."""
    given = os.environ.get(SLOWDOWN_VARIABLE)
    if given:
        return float(given)
    return min(MOST_SLOWDOWN, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def scaled(deadline_s: float) -> float:
    """A deadline for a quiet machine, in s, as this machine needs it at present."""
    return deadline_s * slowdown()


def scaled_option(duration_s: float) -> str:
    """A scaled duration as options and settings take it."""
    return f"{round(1000 * scaled(duration_s))}ms"


def until(
    condition: Callable[[], Optional[T]],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    state: Callable[[], object] = str,
    pause_s: float = PAUSE_S,
) -> T:
    """Return the condition's first true result. Raises AssertionError, with `state`, when the deadline has passed.

    The deadline is that of a quiet machine and is scaled. pause_s: between the first two looks. Later pauses are
    longer, since a daemon limits the requests a second.
    """
    begin = time.monotonic()
    pause = threading.Event()
    while True:
        found = condition()
        if found:
            return found
        waited_s = time.monotonic() - begin
        if waited_s > scaled(deadline_s):
            raise AssertionError(f"waited {waited_s:.3g} s in vain until {what} {state()}".rstrip())
        pause.wait(pause_s)
        pause_s = min(LONGER * pause_s, max(pause_s, LONGEST_PAUSE_S))


async def soon(condition: Callable[[], Optional[T]], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Do what `until` does, in a coroutine: the event loop runs between two looks."""
    import asyncio  # not at the top: targets that are measured import this module

    begin = time.monotonic()
    pause_s = 0.0
    while True:
        found = condition()
        if found:
            return found
        waited_s = time.monotonic() - begin
        if waited_s > scaled(deadline_s):
            raise AssertionError(f"waited {waited_s:.3g} s in vain until {what}")
        await asyncio.sleep(pause_s)  # at first only a turn of the loop, which is enough for most
        pause_s = min(LONGEST_PAUSE_S, LONGER * pause_s + PAUSE_S / 10)
