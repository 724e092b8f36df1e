"""The page that a target shares with who started it, and what every target must find unchanged at its end.

Theory of operation
    Words of 64 bits: the harness sets STOP, the target counts LAPS, notes the LONGEST lap (ns; the harness may zero
    it) and says READY. So a target needs no thread, no signal and no descriptor to be talked to, and who attaches
    sees a hang as LAPS that stand still. Runs wherever the agent runs, standard library only.
"""

import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict

STOP, LAPS, LONGEST, READY, EXIT_AT = range(5)
PAGE_BYTES = 4096


class Wrong(Exception):
    """A result that is not what it must be."""


class End(BaseException):
    """A target that sleeps for good is woken by this."""


def must_be(what: str, found: Any, wanted: Any) -> None:
    """Raises Wrong if the value is not the expected one."""
    if found != wanted:
        raise Wrong("%s is %.200r, not %.200r" % (what, found, wanted))


class Control:
    """The page that the target shares with the harness."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), PAGE_BYTES)
        self.words = memoryview(self._map).cast("Q")
        self._last = 0

    def ready(self) -> None:
        """Tells the harness that it may attach from now on."""
        self._last = time.perf_counter_ns()
        self.words[READY] = 1

    def running(self) -> bool:
        """Ends a lap: counts it and its time. Whether there is to be another."""
        now = time.perf_counter_ns()
        gap = now - self._last
        self._last = now
        self.words[LAPS] += 1
        if gap > self.words[LONGEST]:
            self.words[LONGEST] = gap
        return not self.words[STOP]

    @property
    def stopped(self) -> bool:
        """Whether the harness wants the target to end."""
        return bool(self.words[STOP])


class Target:
    """One kind of target. `lap` does some work, raises Wrong if the result is wrong, and is called again and again."""

    def lap(self) -> None:
        """Do one round of work."""

    def close(self) -> None:
        """End what was started. Raises Wrong for results that are known only then."""

    def result(self) -> str:
        """What is compared with another run."""
        return ""


class Surroundings:
    """What a program owns and nobody else may change."""

    def __init__(self) -> None:
        self._main = sorted(vars(sys.modules["__main__"]))
        self._modules = set(sys.modules)
        self._sys = set(vars(sys))
        self._handlers = self._now_handlers()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._switch = sys.getswitchinterval()

    @staticmethod
    def _now_handlers() -> Dict[int, Any]:
        return {number: signal.getsignal(number) for number in signal.valid_signals()}

    def check(self) -> None:
        """Raises Wrong if the surroundings have changed."""
        must_be("__main__", sorted(vars(sys.modules["__main__"])), self._main)
        must_be("new modules", sorted(set(sys.modules) - self._modules), [])
        must_be("lost modules", sorted(self._modules - set(sys.modules)), [])
        must_be("new in sys", sorted(set(vars(sys)) - self._sys - {"_kineto_attach", "last_exc"}), [])
        must_be("signal handlers", self._now_handlers(), self._handlers)
        must_be("the signal mask", signal.pthread_sigmask(signal.SIG_BLOCK, []), self._mask)
        import threading  # only now: who imports it first, in whatever thread, decides what the main thread is

        must_be("the main thread", threading.main_thread().native_id, os.getpid())
        foreign = [thread.name for thread in threading.enumerate() if isinstance(thread, threading._DummyThread)]
        must_be("foreign threads", foreign, [])
        must_be("the switch interval", sys.getswitchinterval(), self._switch)
