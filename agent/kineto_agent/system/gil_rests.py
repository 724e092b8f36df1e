"""Rests between pieces of work that keep the GIL. Part of the loader's packet, too: no imports, and `time` is given.

After each millisecond of its own processor time a thread that compiles or executes modules rests three times as long:
no training step gets longer by more than a third. Where the GIL takes long to get back (a program that keeps it through
long calls), rests would only add up: there the thread relies on the interpreter, which takes the GIL away from it after
5 ms.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WORK_S = 0.001  # of processor time at a time
_REST = 3  # times as long
_LONG_S = 0.05  # without the GIL


class Rests:
    """Of one thread. time: the module."""

    def __init__(self, time: "Any") -> None:
        self._sleep, self._worked, self._clock = time.sleep, time.thread_time, time.perf_counter
        self._since = self._worked()
        self._rests = True

    def rest(self) -> None:
        """Call after each piece of work."""
        worked_s = self._worked() - self._since
        if self._rests and worked_s > _WORK_S:
            began = self._clock()
            self._sleep(_REST * worked_s)
            self._rests = self._clock() - began < _REST * worked_s + _LONG_S
            self._since = self._worked()
