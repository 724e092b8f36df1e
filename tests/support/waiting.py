"""Waits until something holds that nobody announces. Runs wherever the agent runs."""

from __future__ import annotations  # the agent's tests run under 3.9

import threading
import time
from typing import Callable, Optional, TypeVar

DEADLINE_S = 20.0
PAUSE_S, LONGEST_PAUSE_S, LONGER = 0.002, 0.05, 1.25
T = TypeVar("T")


def until(
    condition: Callable[[], Optional[T]],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    state: Callable[[], object] = str,
    pause_s: float = PAUSE_S,
) -> T:
    """The condition's first true result. `state` tells how far things are when the deadline has passed.

    pause_s: between the first two looks, and longer from look to look, since a daemon limits requests a second.
    """
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s in vain until {what} {state()}".rstrip())
        pause.wait(pause_s)
        pause_s = min(LONGER * pause_s, max(pause_s, LONGEST_PAUSE_S))
