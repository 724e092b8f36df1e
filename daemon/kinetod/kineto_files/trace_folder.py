"""The folder into which a process's libkineto writes, as the process sees it, and our files in it.

Theory of operation
    The folder is reached through /proc/PID/root and held open, so that it stays the same one if the process ends. It
    belongs to the process's user or is writable by everybody, and the process controls its root: no component of the
    path may be a symbolic link, and a file counts only if it is a regular one with a single name, belongs to the
    process's user and is in the folder itself, since a process in its own namespace may mount any file there. It is
    inspected before it is opened, since opening a device or a FIFO may have effects. Nothing in it is read here; the
    decode worker does that in its sandbox.

    All of this blocks, possibly for long if the folder is on somebody else's file system; call it in threads, or in a
    process that can be abandoned.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from kinetod.kineto_files.interface import FileRefused, FileTooLarge, FolderUnreachable, Sight
from kinetod.processes.identity import BOOT_TIME_NS, PROC, ProcessKey, start_time_ns

OPEN_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
TEMPORARY = ".tmp"  # libkineto's suffix until the file is complete
_FIND_FILE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_COPY_BYTES = 1 << 20


class TraceFolder:
    """The open folder of one process. uid: required owner of the files."""

    def __init__(self, descriptor: int, uid: int) -> None:
        self._descriptor = descriptor
        self._uid = uid

    @classmethod
    def open(
        cls,
        key: ProcessKey,
        folder: str,
        uid: int,
        proc: Path = PROC,
        *,
        boot_time_ns: int = BOOT_TIME_NS,
        check: Callable[[int], None] = lambda _descriptor: None,
    ) -> "TraceFolder":
        """Opens it. folder: absolute, as the process sees it; boot_time_ns: the origin of the key's start time.

        check: called with each folder on the path before anything in it is looked up. Raises FolderUnreachable, and the
        check's exceptions.
        """
        try:
            descriptor = _opened(proc / str(key.pid) / "root", folder, check)
        except OSError as exc:
            raise FolderUnreachable(_why_not(key, folder, exc)) from exc
        with contextlib.suppress(OSError):
            if start_time_ns(key.pid, proc, boot_time_ns=boot_time_ns) == key.start_time_ns:
                return cls(descriptor, uid)
        os.close(descriptor)
        raise FolderUnreachable(f"process {key.pid} has ended")

    @property
    def descriptor(self) -> int:
        """The descriptor of the folder, owned by this object."""
        return self._descriptor

    def look(self, name: str) -> Sight:
        """Checks for the file. Raises OSError."""
        writing = self._status(name + TEMPORARY)
        return Sight(None if writing is None else writing.st_size, self._status(name) is not None)

    def open_file(self, name: str) -> int:
        """Opens the complete file for reading; the caller owns the descriptor. Raises FileRefused."""
        try:
            found = os.open(name, _FIND_FILE, dir_fd=self._descriptor)
        except OSError as exc:
            raise FileRefused(f"{name} cannot be opened: {exc.strerror}") from exc
        try:
            check_file(found, name, self._uid)
            if mount_id(found) != mount_id(self._descriptor):
                raise FileRefused(f"{name} is a mount point")
            return os.open(f"/proc/self/fd/{found}", _OPEN_FILE)
        except OSError as exc:
            raise FileRefused(f"{name} cannot be opened: {exc.strerror}") from exc
        finally:
            os.close(found)

    def remove(self, name: str) -> None:
        """Removes the file, even while it is being written. Raises OSError."""
        for each in (name, name + TEMPORARY):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(os.stat(each, dir_fd=self._descriptor, follow_symlinks=False).st_mode):
                    os.unlink(each, dir_fd=self._descriptor)

    def close(self) -> None:
        """Closes the folder. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _status(self, name: str) -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        return None


def check_file(descriptor: int, name: str, uid: int) -> None:
    """Raises FileRefused unless it is a regular file of this user with a single name."""
    found = os.fstat(descriptor)
    if stat.S_ISLNK(found.st_mode):
        raise FileRefused(f"{name} is a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise FileRefused(f"{name} is not a regular file")
    if found.st_uid != uid:
        raise FileRefused(f"{name} belongs to uid {found.st_uid}, not to the process's user {uid}")
    if found.st_nlink != 1:
        raise FileRefused(f"{name} has {found.st_nlink} hard links")


def copy_file(
    source: int, destination: Path, *, max_bytes: int, on_bytes: Callable[[int], None] = lambda _count: None
) -> int:
    """Copies a complete file and closes its descriptor; returns its size. on_bytes: called with the size so far.

    Raises FileTooLarge, OSError, and exceptions of on_bytes.
    """
    try:
        if os.fstat(source).st_size > max_bytes:
            raise FileTooLarge
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


def mount_id(descriptor: int) -> int:
    """The kernel's number of the mount that contains an open file. Raises OSError."""
    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
        if line.startswith("mnt_id:"):
            return int(line.split()[1])
    raise OSError(errno.ENOSYS, "the kernel does not report its mount")


def _opened(root: Path, folder: str, check: Callable[[int], None]) -> int:
    descriptor = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in Path(folder).parts[1:]:
        try:
            check(descriptor)
            inner = os.open(part, OPEN_FOLDER, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    try:
        check(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _why_not(key: ProcessKey, folder: str, exc: OSError) -> str:
    what = f"{folder} of process {key.pid}, where its libkineto writes,"
    if exc.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{what} cannot be opened by this daemon ({exc.strerror}): only root, the attach helper and the "
            "process's own user can; use the system daemon, or let kinetod's agent record (--recorder agent)"
        )
    if exc.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"{what} is or contains a symbolic link, which kinetod does not follow; use --recorder agent"
    if exc.errno == errno.ENOENT:
        return f"{what} does not exist, or the process has ended"
    return f"{what} cannot be opened: {exc.strerror}"


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
