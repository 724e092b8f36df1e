"""The frames of Python of all threads of a process, by pystack, while the process goes on.

Theory of operation
    pystack reads the interpreter's structures with process_vm_readv. No thread stops, so a stack that changes while it
    is read can be torn: pystack then raises, or the outer frames are missing. Such a reading is repeated. A thread that
    stands still, which is what people look for, is read whole at once.

    What a frame is executing comes from its source file, if that is older than the process: since CPython 3.11 the
    positions in the code object name the expression. The files are opened as the process's user.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kinetod.base.safe_text import clean
from kinetod.processes.identity import PROC, start_time_ns
from kinetod.stacks.thread_stacks import MAX_FRAMES, MAX_FRAMES_IN_ALL, MAX_TEXT_CHARS, StackFrame

if TYPE_CHECKING:
    from pystack.types import PyThread

TRIES = 3
OUTERMOST = 6  # of a stack that is cut in its middle
_MAX_DEPTH = 100_000
_MAX_SOURCE_BYTES = 4 << 20
_MAX_FILES = 200
_MAX_CODE_CHARS, _MAX_NAME_CHARS, _MAX_PATH_CHARS = 120, 100, 250
_OUTERMOST = frozenset(("<module>", "_bootstrap", "_bootstrap_inner"))  # functions in which stacks begin
_LIBRARY = re.compile(r"/python3(\.\d+t?)?/|/(site|dist)-packages/|^<frozen ")


class NoFrames(Exception):
    """The message says why there are none."""


class PythonThread:
    """frames: innermost first, `left_out` of them missing between the inner ones and the outermost."""

    __slots__ = ("frames", "holds_gil", "left_out", "thread")

    def __init__(self, found: "PyThread", most: int = MAX_FRAMES) -> None:
        self.thread = found.tid
        self.holds_gil = found.holds_the_gil > 0
        frames = _frames(found)
        self.left_out = max(0, len(frames) - most)
        self.frames = frames[: most - OUTERMOST] + frames[-OUTERMOST:] if self.left_out else frames

    @property
    def is_whole(self) -> bool:
        """Whether its outermost frame is one in which stacks begin; programs may begin theirs elsewhere, too."""
        return not self.frames or self.frames[-1].function in _OUTERMOST


def read_frames(pid: int) -> list[PythonThread]:
    """The threads that run Python, as the process numbers them. Raises NoFrames."""
    from pystack import engine, errors  # the daemon itself never loads it

    why, found = "", list[PythonThread]()
    for _ in range(TRIES):
        try:
            read = engine.get_process_threads(pid, stop_process=False)
            most = max(2 * OUTERMOST, min(MAX_FRAMES, MAX_FRAMES_IN_ALL // max(1, len(read))))
            found = [PythonThread(each, most) for each in read[: MAX_FRAMES_IN_ALL // most]]
        except errors.InvalidPythonProcess:
            raise NoFrames("it does not run Python") from None
        except (errors.PystackError, OSError, ValueError) as exc:
            if "Could not determine python version" in str(exc):
                raise NoFrames("it does not run Python") from None
            why = clean(f"{type(exc).__name__}: {exc}", MAX_TEXT_CHARS // 2)
        else:
            if all(thread.is_whole for thread in found):
                break
    if not found and why:
        raise NoFrames(f"its Python frames cannot be read ({why})")
    return found


def _frames(found: "PyThread") -> list[StackFrame]:
    """Innermost first. Raises ValueError for a chain that never ends."""
    outermost_first = []
    for frame in found.frames:
        code = frame.code
        file, place = clean(code.filename, _MAX_PATH_CHARS), code.location
        one_line = place.lineno == place.end_lineno
        outermost_first.append(
            StackFrame(
                function=clean(code.scope, _MAX_NAME_CHARS),
                file=file,
                line=max(0, place.lineno),
                own=not _LIBRARY.search(file),
                start=max(0, place.column),
                end=max(0, place.end_column) if one_line else 0,
            )
        )
        if len(outermost_first) > _MAX_DEPTH:
            raise ValueError("its frames form a ring")
    return outermost_first[::-1]


class Sources:
    """The source files of one process."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._root = proc / str(pid) / "root"
        self._folder = proc / str(pid) / "cwd"
        self._lines: dict[str, list[bytes]] = {}
        try:
            self._started_s = start_time_ns(pid, proc) / 1e9
        except OSError:
            self._started_s = time.time()

    def add_code(self, threads: Iterable[list[StackFrame]]) -> None:
        """Fills in `code`, in frames of the program's own and in the innermost one of each thread."""
        for frames in threads:
            for number, frame in enumerate(frames):
                if (number == 0 or frame.own) and frame.line:
                    frame.code = self._code(frame)

    def _code(self, frame: StackFrame) -> str:
        if frame.file not in self._lines and len(self._lines) < _MAX_FILES:
            self._lines[frame.file] = self._read(frame.file)
        lines = self._lines.get(frame.file, [])
        if frame.line > len(lines):
            return ""
        line = lines[frame.line - 1]
        part = line[frame.start : frame.end or None] if frame.start or frame.end else line
        return clean(part.decode("utf-8", "replace").strip(), _MAX_CODE_CHARS)

    def _read(self, name: str) -> list[bytes]:
        with contextlib.suppress(OSError, ValueError):
            path = self._root / name.lstrip("/") if name.startswith("/") else self._folder / name
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                facts = os.fstat(file.fileno())
                if stat.S_ISREG(facts.st_mode) and facts.st_mtime < self._started_s:
                    return file.read(_MAX_SOURCE_BYTES).splitlines()
        return []
