"""Targets that own the machine's state: registers, errno, signal masks, queued signals, alarm timers."""

import ctypes
import os
import signal
import threading
import time
from typing import Callable, Dict, List

from campaign.attach_targets.control import Target, Wrong, must_be

LIBRARY = "KINETO_TEST_MACHINE_LIBRARY"  # machine.c, compiled by who starts the target
CHANGED = [
    *("nothing", "a vector register", "a general register", "the red zone", "the carry flag", "MXCSR"),
    *("the x87 control word", "errno", "a system call's result", "a 64-byte register", "a mask register"),
]
PIECE_S = 0.3
TICK_S = 0.05


class Registers(Target):
    """C loops without the GIL, in the main thread or in a second one beside Python code."""

    def __init__(self, names: List[str]) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._names = names
        self._next = 0

    def lap(self) -> None:
        name = self._names[self._next % len(self._names)]
        self._next += 1
        check = self._library[name]
        check.argtypes = [ctypes.c_double]
        must_be("changed in %s:" % name, CHANGED[check(PIECE_S)], CHANGED[0])


class Bystander(Registers):
    """A second thread asleep in a system call with all registers in use, again and again: the one that is stopped."""

    def __init__(self) -> None:
        super().__init__(["check_asleep"])
        self._wrong: List[str] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            try:
                super().lap()
            except Wrong as error:
                self._wrong.append(str(error))

    def lap(self) -> None:
        total = 0
        for number in range(5000):
            total += number
        must_be("the sum", total, 12497500)

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        if self._wrong:
            raise Wrong(self._wrong[0])


class Timers(Target):
    """An interval timer whose signals are counted by the C handler's bytes in a pipe: none lost, none too many."""

    def __init__(self) -> None:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        signal.signal(signal.SIGALRM, self._alarm)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=True)
        self._handled = 0

    def _alarm(self, _number: int, _frame: object) -> None:
        self._handled += 1

    def lap(self) -> None:
        """One run of about half a second. A process that got no processor for a tick has lost that one rightly."""
        self._drain()
        ticks, gaps_allow = 10, 0
        begin = last = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
        end = begin + TICK_S * (ticks + 0.5)
        while last < end:
            now = time.monotonic()
            gaps_allow += int((now - last) / TICK_S)
            last = now
        signal.setitimer(signal.ITIMER_REAL, 0)
        counted, due = self._drain(), int((time.monotonic() - begin) / TICK_S)
        if not ticks - gaps_allow <= counted <= due:
            raise Wrong("%d alarms instead of %d to %d" % (counted, ticks - gaps_allow, due))

    def _drain(self) -> int:
        try:
            return len(os.read(self._pipe[0], 4096))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        signal.set_wakeup_fd(-1)


class Signals(Target):
    """Masks of two threads, and queued real-time signals that a child sends while they are blocked and while not."""

    def __init__(self) -> None:
        self._signal = signal.SIGRTMIN + 3
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[0], False)
        os.set_blocking(self._pipe[1], False)
        signal.signal(self._signal, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=True)
        self._blocked = [signal.SIGUSR2, signal.SIGPIPE, signal.SIGRTMIN + 7]
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def lap(self) -> None:
        """Blocked signals stay pending, the others are counted."""
        parent, number, sent = os.getpid(), self._signal, 200
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            os.kill(parent, signal.SIGRTMIN + 7)
            for _ in range(sent):
                os.kill(parent, number)
                time.sleep(0.0002)
            os._exit(0)
        os.waitpid(child, 0)
        counted = len(os.read(self._pipe[0], 4096))
        must_be("signals", counted, sent)
        must_be("the mask", signal.pthread_sigmask(signal.SIG_BLOCK, []), self._mask)
        must_be("the pending signals", signal.sigpending(), {signal.SIGRTMIN + 7})
        info = signal.sigtimedwait([signal.SIGRTMIN + 7], 0)
        must_be("a pending signal's sender", info and info.si_pid, child)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)


class Identity(Target):
    """The C library changes the user of all threads by a signal to each: one that blocks it stops the process."""

    def lap(self) -> None:
        os.setresuid(os.getuid(), os.geteuid(), os.geteuid())
        time.sleep(PIECE_S)


KINDS: Dict[str, Callable[[], Target]] = {
    "registers": lambda: Registers(["check_loop", "check_asleep", "check_wide"]),
    "registers_bystander": Bystander,
    "identity": Identity,
    "timers": Timers,
    "signals": Signals,
}
