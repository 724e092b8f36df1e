"""A second process that ends this one if it keeps a thread of the target standing.

Theory of operation
    While a thread of the target stands still, this process may lose its processor to a quota, or be stopped or frozen.
    Then nobody lets that thread go. The kernel does, once its tracer has ended, and the target is in order at every
    moment (injection.py). So a process of its own looks every LOOK_S whether the tracer has given a sign of life within
    LIMIT_S, and else kills it: SIGKILL also ends a process that is stopped or frozen.

    The sign of life is a time in shared memory: set before a thread is stopped and while it is waited for, cleared once
    the thread has been let go. Two looks must have seen the same time: if both processes stood still, the tracer
    gets its turn first.

    The watchdog sleeps between hand-overs, and ends when the tracer's end of its pipe is closed.

Limits
    A freezer or quota of a control group that both are in stops the watchdog, too. A quota does not if both may have
    real-time priority (CAP_SYS_NICE); else a thread stands still until its next period, by default for 0.1 s at most.
"""

import contextlib
import mmap
import os
import select
import signal
import struct
import time
from collections.abc import Iterator

LIMIT_S = 0.012
LOOK_S = 0.004  # LIMIT_S and two looks are 20 ms
_WORD = struct.Struct("=Q")
_STEP = b"x"


class Watchdog:
    """`start` makes the process; without it, nobody watches."""

    def __init__(self) -> None:
        self._since = mmap.mmap(-1, _WORD.size)  # monotonic ns; 0: nothing stands still
        self._pipe = -1

    def start(self) -> None:
        """Call it while this process has one thread. Raises OSError."""
        reader, self._pipe = os.pipe()
        tracer = os.pidfd_open(os.getpid())
        try:
            if os.fork() == 0:
                with contextlib.suppress(BaseException):
                    self._begin(reader, tracer)
                os._exit(0)
        finally:
            os.close(tracer)
            os.close(reader)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """For the length of a hand-over."""
        self._step()
        try:
            yield
        finally:
            self.rest()
            self._step()

    def beat(self) -> None:
        """A sign of life, from which on a thread may stand still."""
        _WORD.pack_into(self._since, 0, time.monotonic_ns())

    def rest(self) -> None:
        """Nothing stands still."""
        _WORD.pack_into(self._since, 0, 0)

    def _step(self) -> None:
        if self._pipe >= 0:
            with contextlib.suppress(OSError):  # it has been killed
                os.write(self._pipe, _STEP)

    # ------------------------------------------------------------ in the second process

    def _begin(self, reader: int, tracer: int) -> None:
        os.setsid()  # whoever stops the tracer's group does not stop this
        first = 0
        for kept in sorted((reader, tracer)):  # all others: the daemon must see the end of the tracer's standard input
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
        while os.read(reader, 1):
            if self._holds_too_long(reader):
                signal.pidfd_send_signal(tracer, signal.SIGKILL)
                return
            if not os.read(reader, 1):
                return

    def _holds_too_long(self, reader: int) -> bool:
        """Look until the hand-over ends. True: a thread stands still, and the tracer does nothing about it."""
        seen = 0
        while not select.select([reader], [], [], LOOK_S)[0]:
            (since,) = _WORD.unpack_from(self._since, 0)
            if since and since == seen and time.monotonic_ns() - since > LIMIT_S * 1e9:
                return True
            seen = since
        return False


WATCHDOG = Watchdog()
