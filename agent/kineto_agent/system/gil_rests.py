"""Rests between pieces of work that keep the GIL. Part of the loader's packet, too: no imports, modules are arguments.

After each millisecond of its own CPU time a thread that compiles or executes modules rests three times as long: no
training step gets longer by more than a third. If it takes long to get the GIL back (in a program that keeps it through
long calls), rests would only add up: then the thread relies on the interpreter, which takes the GIL away after 5 ms.

A thread's CPU time says nothing about another thread, so only the thread that created the Rests ever rests.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WORK_S = 0.001  # of CPU time at a time
_REST = 3  # times as long
_LONGEST_S = 0.02  # at a time
_LONG_S = 0.05  # without the GIL


class Rests:
    """Rests of the thread that creates it; does nothing on any other thread. time, thread: the modules time and
    _thread.
    """

    def __init__(self, time: "Any", thread: "Any") -> None:
        self._sleep, self._worked, self._clock = time.sleep, time.thread_time, time.perf_counter
        self._ident = thread.get_ident
        self._of = self._ident()
        self._since = self._worked()
        self._rests = True

    def rest(self) -> None:
        """Call after each piece of work."""
        if not self._rests or self._ident() != self._of:
            return
        worked_s = self._worked() - self._since
        if worked_s > _WORK_S:
            rest_s = min(_REST * worked_s, _LONGEST_S)
            began = self._clock()
            self._sleep(rest_s)
            self._rests = self._clock() - began < rest_s + _LONG_S
            self._since = self._worked()
