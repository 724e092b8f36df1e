"""When a program says that it is ready, and when it ends: after its standard input has, with its step times as JSON."""

import json
import select
import sys
import time

WARM_UP_STEPS = 12
WARM_UP_S = 1.0


class Clock:
    """Called by the training loop at the end of each step."""

    def __init__(self, *, at_once: bool = False) -> None:
        """at_once: the program says that it is ready after its first step, without a warm-up.

        What sys.stdout is now hears of the steps, also if the program puts something else there.
        """
        self._told = sys.stdout
        self._at_once = at_once
        self._begun = time.monotonic()
        self._starts: list[int] = []
        self._ready = False

    def over(self) -> bool:
        """Notes the end of a step, and tells whether the program should end."""
        self._starts.append(time.time_ns())
        warm = self._at_once or (len(self._starts) >= WARM_UP_STEPS and time.monotonic() - self._begun >= WARM_UP_S)
        if not self._ready and warm:
            self._ready = True
            self._told.write("ready\n")
            self._told.flush()
        if not self._ready or not select.select([sys.stdin], [], [], 0)[0]:
            return False
        self._told.write(json.dumps({"starts": self._starts}) + "\n")
        self._told.flush()
        return True
