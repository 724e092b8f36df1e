"""Targets asleep in system calls: for a while again and again, or for good until they are ended.

Theory of operation
    A child process, the waker, is told by one byte what to do in ASKED_S: write to the pipe, send to the socket,
    connect. Whatever a call returns is checked, and that it did not return early. Python itself repeats calls that
    a signal interrupts, so the raw_ calls go straight to libc, and EINTR is a wrong result there.
    A target that sleeps for good is ended by SIGUSR1, whose handler raises.
"""

import ctypes
import errno
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from campaign.attach_targets.control import End, Target, Wrong, must_be
from support.waiting import scaled

ASKED_S = 0.06
EARLY_S = 0.002  # clocks of different calls have different grains
LATE_S = 5.0  # some start a process


class Calls:
    """What the sleeping calls need. `limit`: seconds, None for no limit."""

    def __init__(self, limit: Optional[float]) -> None:
        self.limit = limit
        self.pipe = os.pipe()
        self.pair = socket.socketpair()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("")  # an abstract name of the kernel's choice
        self.listener.listen(8)
        self._orders = os.pipe()
        self.waker = os.fork()
        if self.waker == 0:
            self._wake_others()
        self.lock = threading.Lock()
        self.lock.acquire()
        self.alarms = 0

    def _wake_others(self) -> None:
        os.close(self._orders[1])
        while True:
            order = os.read(self._orders[0], 1)
            time.sleep(ASKED_S)
            if order == b"p":
                os.write(self.pipe[1], b"x")
            elif order == b"s":
                self.pair[1].send(b"x")
            elif order == b"a":
                with socket.socket(socket.AF_UNIX) as caller:
                    caller.connect(self.listener.getsockname())
            elif not order:
                os._exit(0)

    def order(self, what: bytes) -> None:
        """Order a wake-up after ASKED_S, unless this sleep has no limit."""
        if self.limit is not None:
            os.write(self._orders[1], what)

    def close(self) -> None:
        """Ends the thread that wakes sleepers."""
        os.close(self._orders[1])
        os.waitpid(self.waker, 0)

    # each: one sleep in Python's own call

    def sleep(self) -> None:
        time.sleep(3600 if self.limit is None else self.limit)

    def select(self) -> None:
        must_be("select", select.select([self.pipe[0]], [], [], self.limit), ([], [], []))

    def poll(self) -> None:
        poll = select.poll()
        poll.register(self.pipe[0], select.POLLIN)
        must_be("poll", poll.poll(None if self.limit is None else self.limit * 1000), [])

    def epoll(self) -> None:
        with select.epoll() as epoll:
            epoll.register(self.pipe[0], select.EPOLLIN)
            must_be("epoll", epoll.poll(self.limit), [])

    def event(self) -> None:
        must_be("Event.wait", threading.Event().wait(self.limit), False)

    def acquire(self) -> None:
        must_be("Lock.acquire", self.lock.acquire(timeout=-1 if self.limit is None else self.limit), False)

    def condition(self) -> None:
        condition = threading.Condition()
        with condition:
            must_be("Condition.wait", condition.wait(self.limit), False)

    def queue(self) -> None:
        try:
            raise Wrong("queue.get returned %r" % queue.Queue().get(timeout=self.limit))
        except queue.Empty:
            pass

    def join(self) -> None:
        done = threading.Event()
        thread = threading.Thread(target=done.wait, daemon=True)
        thread.start()
        try:
            thread.join(self.limit)
            must_be("is_alive", thread.is_alive(), True)
        finally:
            done.set()

    def read(self) -> None:
        self.order(b"p")
        must_be("os.read", os.read(self.pipe[0], 10), b"x")

    def recv(self) -> None:
        self.order(b"s")
        must_be("recv", self.pair[0].recv(10), b"x")

    def recv_timeout(self) -> None:
        self.pair[0].settimeout(self.limit)
        try:
            raise Wrong("recv returned %r" % self.pair[0].recv(10))
        except socket.timeout:
            pass
        finally:
            self.pair[0].settimeout(None)

    def accept(self) -> None:
        self.order(b"a")
        self.listener.accept()[0].close()

    def wait(self) -> None:
        with subprocess.Popen(["sleep", "3600" if self.limit is None else str(self.limit)]) as child:
            try:
                must_be("the child's exit status", child.wait(), 0)
            finally:
                child.kill()

    def sigtimedwait(self) -> None:
        # SIGUSR2 is blocked by Asleep, as it must be for this
        if self.limit is None:
            raise Wrong("sigwaitinfo returned %r" % (signal.sigwaitinfo([signal.SIGUSR2]),))
        must_be("sigtimedwait", signal.sigtimedwait([signal.SIGUSR2], self.limit), None)

    def pause(self) -> None:
        before = self.alarms
        if self.limit is not None:
            signal.setitimer(signal.ITIMER_REAL, self.limit, 1.0)  # again: the first may come before pause()
        signal.pause()
        signal.setitimer(signal.ITIMER_REAL, 0)
        must_be("alarms", self.alarms > before, True)

    # each: one sleep straight in libc

    def raw(self, name: str, *arguments: Any, wanted: int = 0, error: int = 0) -> None:
        """Call a C function without Python's repetition after a signal."""
        ctypes.set_errno(0)
        result = getattr(LIBC, name)(*arguments)
        found = ctypes.get_errno() if result == -1 else 0
        must_be("%s's errno" % name, errno.errorcode.get(found, "0"), errno.errorcode.get(error, "0"))
        must_be("%s's result" % name, result, -1 if error else wanted)

    def raw_poll(self) -> None:
        self.raw("poll", None, 0, int(ASKED_S * 1000))

    def raw_ppoll(self) -> None:
        self.raw("ppoll", None, 0, ctypes.byref(Timespec(0, int(ASKED_S * 1e9))), None)

    def raw_select(self) -> None:
        self.raw("select", 0, None, None, None, ctypes.byref(Timespec(0, int(ASKED_S * 1e6))))

    def raw_pselect(self) -> None:
        self.raw("pselect", 0, None, None, None, ctypes.byref(Timespec(0, int(ASKED_S * 1e9))), None)

    def raw_nanosleep(self) -> None:
        self.raw("nanosleep", ctypes.byref(Timespec(0, int(ASKED_S * 1e9))), None)

    def raw_clock_nanosleep(self) -> None:
        self.raw("clock_nanosleep", 1, 0, ctypes.byref(Timespec(0, int(ASKED_S * 1e9))), None)

    def raw_futex(self) -> None:
        word, limit = ctypes.c_int(5), Timespec(0, int(ASKED_S * 1e9))
        self.raw("syscall", NR_FUTEX, ctypes.byref(word), 128, 5, ctypes.byref(limit), None, 0, error=errno.ETIMEDOUT)

    def raw_read(self) -> None:
        self.order(b"p")
        self.raw("read", self.pipe[0], ctypes.create_string_buffer(8), 8, wanted=1)

    def raw_recv(self) -> None:
        self.order(b"s")
        self.raw("recv", self.pair[0].fileno(), ctypes.create_string_buffer(8), 8, 0, wanted=1)

    def raw_epoll(self) -> None:
        with select.epoll() as epoll:
            self.raw("epoll_wait", epoll.fileno(), ctypes.create_string_buffer(12), 1, int(ASKED_S * 1000))

    def raw_sigtimedwait(self) -> None:
        limit = Timespec(0, int(ASKED_S * 1e9))
        signals = (ctypes.c_ulong * 16)(1 << (signal.SIGUSR2 - 1))
        self.raw("sigtimedwait", ctypes.byref(signals), None, ctypes.byref(limit), error=errno.EAGAIN)


class Timespec(ctypes.Structure):
    """struct timespec, which has the layout of struct timeval too."""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


LIBC = ctypes.CDLL(None, use_errno=True)
NR_FUTEX = 98 if os.uname().machine == "aarch64" else 202
PYTHON_CALLS = [
    *("sleep", "select", "poll", "epoll", "event", "acquire", "condition", "queue", "join", "read", "recv"),
    *("recv_timeout", "accept", "wait", "sigtimedwait", "pause"),
]
RAW_CALLS = [
    *("raw_poll", "raw_ppoll", "raw_select", "raw_pselect", "raw_nanosleep", "raw_clock_nanosleep", "raw_futex"),
    *("raw_read", "raw_recv", "raw_epoll", "raw_sigtimedwait"),
]


# On aarch64 a stop ends these with EINTR. Nobody is stopped in them, but a thread may enter one on its way to a stop.
INTERRUPTED_CALLS = ["raw_epoll", "raw_sigtimedwait"] if os.uname().machine == "aarch64" else []


class Asleep(Target):
    """Sleeps for ASKED_S in each lap, or once without a limit."""

    def __init__(self, names: List[str], limit: Optional[float] = ASKED_S) -> None:
        self._calls = Calls(limit)
        self._names = names
        self._next = 0
        self._handlers = [
            signal.signal(signal.SIGUSR1, self._end),
            signal.signal(signal.SIGALRM, self._alarm),
        ]
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

    def _end(self, _number: int, _frame: object) -> None:
        raise End

    def _alarm(self, _number: int, _frame: object) -> None:
        self._calls.alarms += 1

    def lap(self) -> None:
        name = self._names[self._next % len(self._names)]
        self._next += 1
        begin = time.monotonic()
        getattr(self._calls, name)()
        taken = time.monotonic() - begin
        if not ASKED_S - EARLY_S <= taken <= ASKED_S + scaled(LATE_S):
            raise Wrong("%s took %.1f ms instead of %.1f" % (name, taken * 1e3, ASKED_S * 1e3))

    def close(self) -> None:
        self._calls.close()


def _asleep(name: str) -> Callable[[], Target]:
    return lambda: Asleep([name])


def _for_good(name: str) -> Callable[[], Target]:
    return lambda: Asleep([name], None)


KINDS: Dict[str, Callable[[], Target]] = {
    "asleep": lambda: Asleep(PYTHON_CALLS),
    "asleep_raw": lambda: Asleep([name for name in RAW_CALLS if name not in INTERRUPTED_CALLS]),
    **{"asleep_" + name: _asleep(name) for name in PYTHON_CALLS + RAW_CALLS},
    **{"for_good_" + name: _for_good(name) for name in PYTHON_CALLS},
}
