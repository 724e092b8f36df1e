"""The frames of Python of all threads of a process, by py-spy, while the process goes on.

Theory of operation
    `py-spy dump --nonblocking` reads the interpreter's structures with process_vm_readv. No thread stops, so a stack
    that changes while it is read can be torn: py-spy then fails, or the outer frames are missing. Such a reading is
    repeated. A thread that stands still, which is what people look for, is read whole at once.

    Before CPython 3.11 a thread's state has the address of its pthread structure in place of its number, which is in
    there: where the main thread's number is, are those of the others.

    Source files are opened below the process's own root directory, whatever links there are, and are quoted only if
    they are older than the process.
"""

import contextlib
import ctypes
import os
import re
import stat
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kinetod.base.libc import LIBC, Iovec
from kinetod.base.safe_text import clean
from kinetod.processes.identity import PROC, start_time_ns
from kinetod.stacks.thread_stacks import MAX_FRAMES, MAX_TEXT_CHARS, StackFrame

TRIES = 3
OUTERMOST = 6  # of a stack that is cut in its middle
_MAX_ERROR_BYTES = 64 << 10
_MAX_SOURCE_BYTES = 4 << 20
_MAX_FILES = 200
_MAX_CODE_CHARS, _MAX_NAME_CHARS, _MAX_PATH_CHARS = 120, 100, 250
_PTHREAD_BYTES = 1024
_OUTERMOST = frozenset(("<module>", "_bootstrap", "_bootstrap_inner"))  # functions in which stacks begin
# Of the standard library, of packages, and made by libraries; not what users type, run and execute.
_LIBRARY = re.compile(
    r"/lib(64)?/python3(\.\d+t?)?/|/(site|dist)-packages/|/torchinductor_|^<(?!string>|stdin>|ipython)"
)
_NO_PYTHON = "Failed to find python version from target process"
_DENIED = "Permission Denied: "
_NEEDS_ROOT = "the kernel does not let this daemon read it: that needs root or CAP_SYS_PTRACE"
_OPENAT2 = 437  # on x86-64 and aarch64
_RESOLVE_IN_ROOT, _RESOLVE_BENEATH, _RESOLVE_NO_MAGICLINKS = 0x10, 0x08, 0x02
_OPEN_HOW = struct.Struct("=QQQ")


class NoFrames(Exception):
    """The message says why there are none."""


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _SpyThread(msgspec.Struct):
    thread_id: int
    frames: list[_SpyFrame]
    owns_gil: bool
    os_thread_id: int | None = None
    thread_name: str | None = None


_threads = msgspec.json.Decoder(list[_SpyThread])


class PythonThread:
    """thread: its number as the process sees it; 0: unknown. frames: innermost first, `left_out` of them missing.

    address: of its pthread structure.
    """

    __slots__ = ("address", "frames", "holds_gil", "left_out", "name", "thread")

    def __init__(self, found: _SpyThread, thread: int = 0) -> None:
        self.thread = found.os_thread_id or thread
        self.address = found.thread_id
        self.holds_gil = found.owns_gil
        self.name = clean(found.thread_name or "", _MAX_NAME_CHARS)
        frames = found.frames
        self.left_out = max(0, len(frames) - MAX_FRAMES)
        kept = frames[: MAX_FRAMES - OUTERMOST] + frames[-OUTERMOST:] if self.left_out else frames
        self.frames = [_frame(each) for each in kept]

    @property
    def is_whole(self) -> bool:
        """Whether its outermost frame is one in which stacks begin; programs may begin theirs elsewhere, too."""
        return not self.frames or self.frames[-1].function.rpartition(".")[2] in _OUTERMOST


def _frame(found: _SpyFrame) -> StackFrame:
    file = clean(found.filename, _MAX_PATH_CHARS)
    function = clean(found.name.rpartition("<locals>.")[2], _MAX_NAME_CHARS)
    return StackFrame(function=function, file=file, line=max(0, found.line), own=not _LIBRARY.search(file))


def open_spy() -> int:
    """A descriptor of py-spy's program, which a user may run who may not look into the folders where it lies.

    Raises NoFrames.
    """
    with contextlib.suppress(OSError):
        return os.open(Path(sysconfig.get_path("scripts"), "py-spy"), os.O_RDONLY | os.O_CLOEXEC)
    import importlib.metadata  # a tenth of this process's time, and hardly ever needed

    with contextlib.suppress(OSError, importlib.metadata.PackageNotFoundError, StopIteration):
        files = importlib.metadata.files("py-spy") or []
        found = next(each for each in files if each.name == "py-spy")
        return os.open(Path(str(found.locate())), os.O_RDONLY | os.O_CLOEXEC)
    raise NoFrames("reading its Python frames needs py-spy, which is not installed next to kinetod")


def read_frames(pid: int, spy: int, inner_pid: int) -> list[PythonThread]:
    """The threads that run Python. spy: of open_spy; inner_pid: as the process sees its own. Raises NoFrames."""
    why, found = "", list[PythonThread]()
    for _ in range(TRIES):
        try:
            threads = _threads.decode(_dump(pid, spy))
        except (OSError, ValueError) as exc:
            why = clean(str(exc), MAX_TEXT_CHARS // 2)
            continue
        numbers = _numbers(pid, threads, inner_pid)
        found = [PythonThread(each, number) for each, number in zip(threads, numbers, strict=True)]
        if all(thread.is_whole for thread in found):
            break
    if not found and why:
        reasons = {_NO_PYTHON: "it is not running Python", _DENIED: _NEEDS_ROOT}
        raise NoFrames(next((text for said, text in reasons.items() if said in why), f"py-spy cannot read it: {why}"))
    return found


def _dump(pid: int, spy: int) -> bytes:
    """Raises OSError, ValueError."""
    command = ("py-spy", "dump", "--nonblocking", "--json", "--full-filenames", "--pid", str(pid))
    with subprocess.Popen(
        command,
        executable=f"/proc/self/fd/{spy}",
        pass_fds=(spy,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
    ) as process:
        said, complaint = process.communicate()
    if process.returncode:
        text = complaint[:_MAX_ERROR_BYTES].decode("utf-8", "replace").partition("Stack backtrace")[0]
        raise ValueError(" ".join(text.split()) or f"status {process.returncode}")
    return said


def _numbers(pid: int, threads: list[_SpyThread], inner_pid: int) -> list[int]:
    """Those that py-spy does not know; 0 where they cannot be found."""
    if all(each.os_thread_id for each in threads):
        return [0] * len(threads)
    main = next((each for each in threads if each.thread_name == "MainThread"), None)
    offset = _pthread(pid, main).find(struct.pack("=i", inner_pid)) if main is not None else -1
    if offset < 0:
        return [inner_pid if each is main else 0 for each in threads]
    words = [_pthread(pid, each)[offset : offset + 4] for each in threads]
    return [int.from_bytes(word, sys.byteorder) for word in words]


def _pthread(pid: int, thread: _SpyThread) -> bytes:
    """As much as a pthread structure may have; empty: it cannot be read."""
    return read_memory(pid, thread.thread_id, _PTHREAD_BYTES)


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Up to `size` bytes of a process's memory, as many as can be read."""
    buffer = ctypes.create_string_buffer(size)
    ours = Iovec(ctypes.addressof(buffer), size)
    theirs = Iovec(address, size)
    read = LIBC.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    return buffer.raw[: max(0, read)]


class Sources:
    """The source files of one process."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._folder = proc / str(pid)
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
        return clean(lines[frame.line - 1].decode("utf-8", "replace").strip(), _MAX_CODE_CHARS)

    def _read(self, name: str) -> list[bytes]:
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as opened:
            path = _opened_below(self._folder, name)
            opened.callback(os.close, path)
            facts = os.fstat(path)
            if stat.S_ISREG(facts.st_mode) and max(facts.st_mtime, facts.st_ctime) < self._started_s:
                with Path(f"/proc/self/fd/{path}").open("rb") as file:
                    return file.read(_MAX_SOURCE_BYTES).split(b"\n")
        return []


def _opened_below(process: Path, name: str) -> int:
    """A descriptor (O_PATH) of a file as the process would find it, and of none outside of its root. Raises OSError."""
    where, how = ("root", _RESOLVE_IN_ROOT) if name.startswith("/") else ("cwd", _RESOLVE_BENEATH)
    root = os.open(process / where, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        asked = _OPEN_HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, how | _RESOLVE_NO_MAGICLINKS)
        found = LIBC.syscall(_OPENAT2, root, os.fsencode(name), asked, ctypes.c_size_t(_OPEN_HOW.size))
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
        return int(found)
    finally:
        os.close(root)
