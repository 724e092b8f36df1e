"""The folder into which a process's libkineto writes, as the process sees it, and the files in it that are ours.

Theory of operation
    The folder is reached through /proc/PID/root and held open, so that it stays the same one if the process ends. It
    belongs to the process's user or is writable by everybody, and the process may have made what it likes of its root:
    no component of the path may be a symbolic link, and a file counts only if it is a regular one with one name that
    belongs to the process's user. Nothing in it is looked at here; the decode worker does that in its sandbox.

    Methods block, possibly for long if the folder lies on a file system of somebody else's; call them in threads.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kinetod.processes.identity import PROC, ProcessKey, start_time_ns

_OPEN_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_COPY_BYTES = 1 << 20
TEMPORARY = ".tmp"  # libkineto's suffix until the file is whole


class FolderUnreachable(Exception):
    """The folder cannot be used; the text says why."""


class FileRefused(Exception):
    """The file is not one that a libkineto of this process wrote; the text says why."""


class FileTooLarge(Exception):
    """The file is larger than allowed."""


class Sight(NamedTuple):
    """What is in the folder. writing_bytes: size of the file while libkineto writes it; None: it is not there."""

    writing_bytes: int | None = None
    whole: bool = False


class TraceFolder:
    """The open folder of one process."""

    def __init__(self, descriptor: int, uid: int) -> None:
        self._descriptor = descriptor
        self._uid = uid

    @classmethod
    def open(cls, key: ProcessKey, folder: str, uid: int, proc: Path = PROC) -> "TraceFolder":
        """Opens it. folder: absolute, as the process sees it; uid: whose the files have to be.

        Raises FolderUnreachable.
        """
        try:
            descriptor = _opened(proc / str(key.pid) / "root", folder)
        except OSError as exc:
            raise FolderUnreachable(_why_not(key, folder, exc)) from exc
        found = cls(descriptor, uid)
        with contextlib.suppress(OSError):
            if start_time_ns(key.pid, proc) == key.start_time_ns:
                return found
        found.close()
        raise FolderUnreachable(f"process {key.pid} has ended")

    def look(self, name: str) -> Sight:
        """Looks for the file. Raises OSError."""
        writing = self._status(name + TEMPORARY)
        return Sight(None if writing is None else writing.st_size, self._status(name) is not None)

    def copy(
        self, name: str, destination: Path, *, max_bytes: int, on_bytes: Callable[[int], None] = lambda _count: None
    ) -> int:
        """Copies the whole file; returns its size. on_bytes: called with the size so far; what it raises ends the copy.

        Raises FileRefused, FileTooLarge, OSError with the file's name if it cannot be read and without if the copy
        cannot be written.
        """
        source = self._open_file(name)
        try:
            size = 0
            with destination.open("wb", buffering=0) as copy:
                while part := os.read(source, _COPY_BYTES):
                    size += len(part)
                    if size > max_bytes:
                        raise FileTooLarge
                    on_bytes(size)
                    _write(copy.fileno(), part)
                os.fsync(copy.fileno())
            return size
        finally:
            os.close(source)

    def remove(self, name: str) -> None:
        """Removes the file, also one that is still being written. Raises OSError."""
        for each in (name, name + TEMPORARY):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(os.stat(each, dir_fd=self._descriptor, follow_symlinks=False).st_mode):
                    os.unlink(each, dir_fd=self._descriptor)

    def close(self) -> None:
        """Closes the folder. Valid twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _status(self, name: str) -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        return None

    def _open_file(self, name: str) -> int:
        try:
            descriptor = os.open(name, _OPEN_FILE, dir_fd=self._descriptor)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
                raise FileRefused(f"{name} is a symbolic link or no file") from exc
            raise FileRefused(f"{name} cannot be opened: {exc.strerror}") from exc
        found = os.fstat(descriptor)
        problem = ""
        if not stat.S_ISREG(found.st_mode):
            problem = "is not a regular file"
        elif found.st_uid != self._uid:
            problem = f"belongs to uid {found.st_uid}, not to the process's user {self._uid}"
        elif found.st_nlink != 1:
            problem = f"has {found.st_nlink} names"
        if problem:
            os.close(descriptor)
            raise FileRefused(f"{name} {problem}")
        return descriptor


def _opened(root: Path, folder: str) -> int:
    descriptor = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in Path(folder).parts[1:]:
        try:
            inner = os.open(part, _OPEN_FOLDER, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def _why_not(key: ProcessKey, folder: str, exc: OSError) -> str:
    what = f"{folder} of process {key.pid}, where its libkineto writes,"
    if exc.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{what} cannot be opened by this daemon ({exc.strerror}): it takes root or the process's own user; use "
            "the system's daemon, or let kinetod's agent record (--recorder agent)"
        )
    if exc.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"{what} is or lies behind a symbolic link, which is not followed; let kinetod's agent record"
    if exc.errno == errno.ENOENT:
        return f"{what} does not exist, or the process has ended"
    return f"{what} cannot be opened: {exc.strerror}"


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
