"""A program in a pseudo-terminal: what it draws, keys, and the modes of the terminal."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from support.waiting import DEADLINE_S, scaled

_SEQUENCE = re.compile(r"\x1b\[(?P<numbers>[0-9;?]*)(?P<kind>[A-Za-z])")
_END = "z"  # the kind of a sequence that no program writes
ALTERNATE, CURSOR = "?1049", "?25"


class PseudoTerminal:
    """The program and the last picture that it has drawn whole. process: leads a session with this terminal.

    A picture comes in parts where the program is interrupted meanwhile. It is whole with its last line, which is filled
    with blanks as all of them are.
    """

    def __init__(self, outer: int, inner: int, process: "subprocess.Popen[bytes]", *, columns: int, rows: int) -> None:
        self.process = process
        self._outer, self._inner, self._columns, self._rows = outer, inner, columns, rows
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._drawn: dict[int, str] = {}  # of the picture that is coming
        self._cells: dict[int, str] = {}  # of the last whole one
        self._row = 1
        self._read_to_the_end = False
        self.modes_on: set[str] = {CURSOR}  # private modes that are set: ALTERNATE, CURSOR
        self.printed = ""  # outside the alternate screen

    def press(self, keys: str) -> None:
        """Types the keys."""
        os.write(self._outer, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Changes the size, which the program is told by SIGWINCH."""
        self._columns, self._rows = columns, rows
        self._drawn.clear()
        self._cells.clear()
        fcntl.ioctl(self._outer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def local_modes(self) -> int:
        """The local modes of the terminal (ECHO, ICANON, ISIG, ...)."""
        modes: list[Any] = termios.tcgetattr(self._inner)
        return int(modes[3])

    def cook(self) -> None:
        """Sets echo and whole lines, as a shell does for itself."""
        modes = termios.tcgetattr(self._inner)
        modes[3] |= termios.ECHO | termios.ICANON
        termios.tcsetattr(self._inner, termios.TCSANOW, modes)

    def lines(self) -> list[str]:
        """The lines on the screen, without blanks at their ends."""
        return [self._cells.get(row, "").rstrip() for row in range(1, self._rows + 1)]

    def widest(self) -> int:
        """The longest line that was drawn, blanks included, in characters."""
        return max(len(text) for row, text in self._cells.items() if row <= self._rows)

    def until(self, seen: Callable[[list[str]], object], what: str) -> list[str]:
        """Waits until the screen is as expected, and returns it."""
        self._until(lambda: seen(self.lines()), what)
        return self.lines()

    def until_text(self, text: str) -> list[str]:
        """Waits until some line has the text."""
        return self.until(lambda lines: any(text in line for line in lines), f"{text!r} is shown")

    def until_modes(self, *modes: str) -> None:
        """Waits until exactly these private modes are set."""
        self._until(lambda: self.modes_on == set(modes), f"the modes are {modes}")

    def ended(self) -> int:
        """Waits for the end of the program. Returns its status, as Popen does."""
        self._until(lambda: self.process.poll() is not None, "the program has ended")
        self._read(0)
        os.write(self._inner, f"\x1b[{_END}".encode())  # the kernel may still be passing on what came before this
        self._until(lambda: self._read_to_the_end, "everything that it wrote has come")
        return int(self.process.returncode)

    def stopped(self) -> None:
        """Waits until the program is stopped, and does not reap it."""
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        self._until(lambda: os.waitid(os.P_PID, self.process.pid, options) is not None, "the program has stopped")

    def go_on(self) -> None:
        """SIGCONT, as a shell's fg sends it."""
        self.process.send_signal(signal.SIGCONT)

    def _until(self, reached: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + scaled(DEADLINE_S)
        while not reached():
            assert time.monotonic() < deadline_s, (what, self.lines(), self.printed)
            self._read(0.05)

    def _read(self, timeout_s: float) -> None:
        while select.select([self._outer], [], [], timeout_s)[0]:
            try:
                data = os.read(self._outer, 65536)
            except OSError:  # nobody has the other end any more
                return
            self._text += self._decoder.decode(data)  # a read may end within a character
            timeout_s = 0
        self._interpret()

    def _interpret(self) -> None:
        done = 0
        for found in _SEQUENCE.finditer(self._text):
            self._put(self._text[done : found.start()])
            done = found.end()
            numbers, kind = found["numbers"], found["kind"]
            if kind == "H":
                self._row = int(numbers.split(";")[0] or 1)
                self._drawn[self._row] = ""
            elif kind == _END:
                self._read_to_the_end = True
            elif kind in "hl":
                (self.modes_on.add if kind == "h" else self.modes_on.discard)(numbers)
        rest = self._text[done:]
        begun = rest.find("\x1b")
        self._put(rest if begun < 0 else rest[:begun])
        self._text = "" if begun < 0 else rest[begun:]

    def _put(self, text: str) -> None:
        if ALTERNATE in self.modes_on:
            self._drawn[self._row] = self._drawn.get(self._row, "") + text
            if len(self._drawn.get(self._rows, "")) >= self._columns:
                self._cells = dict(self._drawn)
        else:
            self.printed += text


@contextmanager
def in_terminal(
    command: Sequence[str], environ: Mapping[str, str], *, columns: int = 120, rows: int = 40
) -> Iterator[PseudoTerminal]:
    """Runs the command in a terminal of this size, which is its controlling terminal."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    given = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env={**given, "TERM": "xterm-256color"},
    )
    try:
        yield PseudoTerminal(outer, inner, process, columns=columns, rows=rows)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(outer)
        os.close(inner)
