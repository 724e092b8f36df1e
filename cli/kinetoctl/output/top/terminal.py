"""The terminal while a live view has it: keys without Enter, and every mode as it was before, however the view ends.

How it works: keys come one by one and are not echoed, while Ctrl-C and Ctrl-Z still make signals. No signal interrupts
the program: the handlers only note what came and wake the loop (`signal.set_wakeup_fd`), which acts at a safe place.
Before the program stops (Ctrl-Z), the terminal gets its modes and its ordinary screen back; when it goes on, the view
takes both again. A second Ctrl-C, before the loop has seen the first, raises KeyboardInterrupt.
"""

import contextlib
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kinetoctl.output.top.keys import decode

ESC_S = 0.05  # an Esc that nothing follows for so long is that key
READ_BYTES = 4096
ENDS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # SIGTERM is taken for a SIGINT in all of kinetoctl
SIGNALS = (*ENDS, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


class Terminal:
    """Keys and signals, while `taken`. keys: descriptor of the terminal that they come from, None for none.

    show, hide: take the screen and give it back; called when the view begins, ends, stops and goes on.
    """

    def __init__(self, keys: int | None, *, show: Callable[[], None], hide: Callable[[], None]) -> None:
        self._keys, self._show, self._hide = keys, show, hide
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing, self._is_open = threading.Lock(), True
        self._modes: list[Any] | None = None
        self._pending = b""
        self._noted: set[int] = set()
        self.interrupted = False  # one of ENDS came

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Has the terminal until the end of the block, which restores it in every case."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            for number in SIGNALS:
                stack.callback(signal.signal, number, signal.signal(number, self._note))
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False))
            stack.callback(self._leave)
            self._enter()
            yield

    def wake(self) -> None:
        """Ends a `wait`, now or the next one; does nothing after `taken`. May be called by any thread."""
        with self._closing, contextlib.suppress(BlockingIOError):  # it is full of wake-ups
            if self._is_open:
                os.write(self._writer, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """The keys that have come; returns after a key, a signal, `wake`, or timeout_s seconds.

        At the end of a terminal that was closed, the key is `q`.
        """
        descriptors = [self._reader, *([] if self._keys is None else [self._keys])]
        ready = select.select(descriptors, [], [], ESC_S if self._pending else timeout_s)[0]
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, READ_BYTES)
        self._obey()
        if self._keys in ready:
            return self._read(self._keys)
        return self._decoded(complete=True) if self._pending and not ready else []

    def _read(self, keys: int) -> list[str]:
        try:
            data = os.read(keys, READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return ["q"]
        self._pending += data
        return self._decoded(complete=False)

    def _decoded(self, *, complete: bool) -> list[str]:
        keys, self._pending = decode(self._pending, complete=complete)
        return keys

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in ENDS and self.interrupted:
            raise KeyboardInterrupt
        self.interrupted |= number in ENDS
        self._noted.add(number)

    def _obey(self) -> None:
        """Does what the signals that came ask for."""
        noted, self._noted = self._noted, set()
        if signal.SIGTSTP in noted:
            self._stop()
        elif signal.SIGCONT in noted:  # stopped by SIGSTOP; whoever had the terminal since may have changed it
            self._leave()
            self._enter()

    def _stop(self) -> None:
        self._leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # returns when the program goes on
        signal.signal(signal.SIGTSTP, handler)
        self._noted.discard(signal.SIGCONT)
        self._enter()

    def _enter(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._show()

    def _leave(self) -> None:
        """Gives everything back. Doing it twice does no harm."""
        try:
            with contextlib.suppress(OSError):  # it was closed
                self._hide()
        finally:
            if self._keys is not None and self._modes is not None:
                with contextlib.suppress(termios.error):  # it was closed
                    termios.tcsetattr(self._keys, termios.TCSANOW, self._modes)
                self._modes = None

    def _close(self) -> None:
        with self._closing:  # the numbers of the descriptors may be given to others then
            self._is_open = False
            os.close(self._reader)
            os.close(self._writer)
