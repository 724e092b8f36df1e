"""A second process that kills this one if it keeps a thread of the target stopped too long.

Theory of operation
    While a thread of the target is stopped, this process may lose its CPU to a quota, or be stopped or frozen. Then
    nobody releases that thread. The kernel does once its tracer has ended, and the target is consistent at every moment
    (injection.py). So a separate process checks every LOOK_S whether the tracer has beaten within LIMIT_S, and
    otherwise kills it: SIGKILL also ends a process that is stopped or frozen.

    The beat is a time in shared memory: set before a thread is stopped and while waiting for it, cleared once the
    thread has been released. Two checks must have seen the same time: if both processes were stopped, the tracer runs
    first.

    The watchdog sleeps between calls, and ends when the tracer's end of its pipe is closed.

Limits
    A freezer or quota of a control group that contains both stops the watchdog, too. A quota does not if both may have
    real-time priority (CAP_SYS_NICE); otherwise a thread stays stopped until its next period, by default for 0.1 s at
    most.
"""

import contextlib
import mmap
import os
import select
import signal
import time
from collections.abc import Iterator

LIMIT_S = 0.012
LOOK_S = 0.004  # LIMIT_S and two checks are 20 ms
_STEP = b"x"


class Watchdog:
    """`start` creates the process; without it, nothing is watched."""

    def __init__(self) -> None:
        # monotonic ns; 0: nothing is stopped. Written in one store, which struct.pack_into does not do.
        self._since = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self._pipe = -1

    def start(self) -> None:
        """Starts the process. Call it while this process has one thread. Raises OSError."""
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
        """Keeps the watchdog checking for the duration of a call."""
        self._step()
        try:
            yield
        finally:
            self.rest()
            self._step()

    def beat(self) -> None:
        """Records that the tracer is alive; from then on a thread may be stopped."""
        self._since[0] = time.monotonic_ns()

    def rest(self) -> None:
        """Records that no thread is stopped."""
        self._since[0] = 0

    def _step(self) -> None:
        if self._pipe >= 0:
            with contextlib.suppress(OSError):  # it has been killed
                os.write(self._pipe, _STEP)

    # ------------------------------------------------------------ in the second process

    def _begin(self, reader: int, tracer: int) -> None:
        os.setsid()  # so that stopping the tracer's group does not stop this process
        first = 0
        # closes all others: the daemon must see the end of the tracer's standard input
        for kept in sorted((reader, tracer)):
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
        """Watches until the call ends. Returns True if a thread is stopped and the tracer does nothing about it."""
        seen = 0
        while not select.select([reader], [], [], LOOK_S)[0]:
            since = self._since[0]
            if since and since == seen and time.monotonic_ns() - since > LIMIT_S * 1e9:
                return True
            seen = since
        return False


WATCHDOG = Watchdog()
