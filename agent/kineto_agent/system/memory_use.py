"""Tracks the memory that a vendor's profiler uses in this process, and returns malloc's free memory to the system.

Theory of operation
    A session of torch's or JAX's profiler keeps its records in the process, and needs several times as much while it
    ends. Ending cannot be interrupted, so the session must end in time: when the process has grown so much that the
    next check might come too late. The real growth at the end is measured, and used for the following sessions.

    malloc_trim visits everything that the program has freed, and holds the locks of its heap during that time: 162 ms
    with 0.7 GB of fragments. So a process with a heap above MOST_HEAP_BYTES keeps what an ended session leaves there.
"""

import contextlib
import os
from typing import Callable

from kineto_agent.system.c_functions import PROGRAM, FunctionWithoutGil, Long, symbol_address

MOST_HEAP_BYTES = 128 << 20
_SMALL_BYTES = 8 << 20  # not worth the work
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_START_BRK = 46 - 2  # field of /proc/self/stat, counted after the name


def anonymous_bytes() -> int:
    """Resident anonymous, unshared memory of this process; 0 if /proc does not show it."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            resident, shared = map(int, statm.read().split()[1:3])
            return (resident - shared) * _PAGE_BYTES
    except (OSError, ValueError):
        return 0


def give_memory_back() -> None:
    """Return malloc's free memory to the system, unless that might take long."""
    with contextlib.suppress(AttributeError, OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as stat:
            start = int(stat.read().rpartition(b")")[2].split()[_START_BRK])
        end = FunctionWithoutGil(symbol_address(PROGRAM, "sbrk"))(Long(0))
        if 0 < end - start <= MOST_HEAP_BYTES:
            FunctionWithoutGil(symbol_address(PROGRAM, "malloc_trim"))(Long(0))


class Growth:
    """Predicts the memory use of successive sessions of a vendor's profiler. For one thread at a time.

    most_bytes: limit of the process's growth. end_growth: assumed growth at the end of a session, relative to before,
    until a larger one is measured.
    """

    def __init__(
        self, most_bytes: int, end_growth: float, look: Callable[[], int] = anonymous_bytes,
        give_back: Callable[[], None] = give_memory_back,
    ) -> None:  # fmt: skip
        self._most_bytes = most_bytes
        self._end_growth = end_growth
        self._look = look
        self._give_back = give_back
        self._first = self._last = self._peak = 0
        self.begin()

    def begin(self) -> None:
        """Note that a session begins."""
        self._first = self._last = self._peak = self._look()

    def is_near(self) -> bool:
        """Whether the session must end now. Call it at regular intervals."""
        before, self._last = self._last, self._look()
        reached = self._last - self._first + max(self._last - before, 0)  # by the next call
        return reached * self._end_growth > self._most_bytes

    def ending(self) -> None:
        """Take a measurement while a session ends, before its result is freed."""
        self._peak = max(self._peak, self._look())

    def ended(self) -> bool:
        """Release the memory of a session whose result is freed. Returns whether most of it has left the process."""
        taken, grown = self._peak - self._first, self._last - self._first
        if taken <= _SMALL_BYTES:
            return True
        self._end_growth = max(self._end_growth, taken / max(grown, 1 << 20))
        self._give_back()
        return self._look() - self._last <= max(self._peak - self._last, 0) // 2 + _SMALL_BYTES
