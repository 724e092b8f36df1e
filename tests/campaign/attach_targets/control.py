"""The page that a target shares with who started it, and what every target must find unchanged at its end.

Theory of operation
    Words of 64 bits: the harness sets STOP, the target counts LAPS, stores when the LAST one ended and says READY. A
    lap of SHORT_NS or more is a gap: its end and length go into a ring behind the words, so that the longest gap of
    any window is known later (`longest_gap_ns`). So a target needs no thread, no signal and no descriptor to be talked
    to, and who attaches sees a hang as LAPS that stand still. Times are ns of CLOCK_MONOTONIC. Runs wherever the agent
    runs, standard library only. A program in another language that keeps the same words can be watched, too.
"""

import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict, Sequence

STOP, LAPS, LAST, READY, EXIT_AT, GAPS, TOOK, USED = range(8)
FIRST_GAP = 8  # the word at which the ring begins
MOST_GAPS = 1 << 18  # 50 s of laps that are just not short; the file is sparse
SHORT_NS = 200_000
PAGE_BYTES = 8 * (FIRST_GAP + 2 * MOST_GAPS)
PAGE_VARIABLE = "KINETO_TESTS_PAGE"  # names the page to programs that the gap harness starts


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

    def ready(self) -> None:
        """Tells the harness that it may attach from now on."""
        self.words[LAST] = time.monotonic_ns()
        self.words[READY] = 1

    def running(self) -> bool:
        """Ends a lap: counts it and its time. Whether there is to be another."""
        words = self.words
        now = time.monotonic_ns()
        gap = now - words[LAST]
        words[LAST] = now
        words[LAPS] += 1
        if gap >= SHORT_NS:
            at = FIRST_GAP + 2 * (words[GAPS] % MOST_GAPS)
            words[at], words[at + 1] = now, gap
            words[GAPS] += 1
        return not words[STOP]

    @property
    def stopped(self) -> bool:
        """Whether the harness wants the target to end."""
        return bool(self.words[STOP])


def longest_gap_ns(words: "Sequence[int]", begin_ns: int, end_ns: int) -> int:
    """Longest gap that overlaps the window, also one that has not ended; 0 if all laps were short.

    Raises ValueError if the ring no longer reaches back to the begin of the window.
    """
    count = words[GAPS]
    longest = end_ns - words[LAST] if words[LAST] < end_ns else 0
    for number in range(count - 1, max(-1, count - 1 - MOST_GAPS), -1):
        at = FIRST_GAP + 2 * (number % MOST_GAPS)
        end, gap = words[at], words[at + 1]
        if end <= begin_ns:
            return longest
        if end - gap < end_ns:
            longest = max(longest, gap)
    if count > MOST_GAPS:
        raise ValueError("the gaps at the begin of the window have been overwritten")
    return longest


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
