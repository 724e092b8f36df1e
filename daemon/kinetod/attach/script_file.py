"""A short-lived file that a process in any namespace can open: the script of `remote_debug`.

Theory of operation
    The file is made in the process's own view of the file system, through /proc/PID/root, and with the process's own
    rights: the user and group id of this thread's file accesses are those of the process while it is made and while
    it is removed. So nothing can be had by it that the process could not do itself, the file has the right owner from
    the start, and it works on a file system that belongs to a user namespace in which we are nobody.

    Paths are resolved as the process would (openat2 with RESOLVE_IN_ROOT): a symbolic link in a container cannot lead
    into the host's files. A directory is taken only if nobody but root and the process's owner can put another file
    in the place of ours.
"""

import contextlib
import ctypes
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PLACES = ("/tmp", "/dev/shm", "/var/tmp")  # then its working directory
_NAME = re.compile(r"\.kineto-attach-\d+\.py")
_SYS_OPENAT2 = 437  # on every architecture
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_NO_CHANGE = -1  # setfsuid and setfsgid only tell then

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFile:
    """One that is there. `path` is how the process names it."""

    path: str
    pid: int

    def remove(self) -> None:
        """Nothing happens where it is gone already, or the process is."""
        remove(self.pid, self.path)


def place(
    pid: int, token: int, content: bytes, note: Callable[[str], None], *, proc: Path = Path("/proc")
) -> ScriptFile:
    """Write the file. Raises OSError with the reason of the first place if no place takes it.

    note: told of each path before there is a file; whoever is killed then can be cleaned up after.
    """
    first: OSError | None = None
    name = f".kineto-attach-{token}.py"
    with _Rights.of(pid, proc) as rights:
        for folder in dict.fromkeys((*PLACES, _working_directory(proc / str(pid)))):
            try:
                with _opened(proc / str(pid) / "root", folder) as directory:
                    _check_directory(directory, {0, rights.uid, (proc / str(pid) / "root").stat().st_uid})
                    path = f"{folder.rstrip('/')}/{name}"
                    note(path)
                    _write(directory, name, content, rights.uid)
                    return ScriptFile(path=path, pid=pid)
            except OSError as exc:
                first = first or exc
    assert first is not None
    raise first


def remove(pid: int, path: str, *, proc: Path = Path("/proc")) -> None:
    """Remove such a file, also one that a killed helper has left. Another file is never touched."""
    if not is_ours(path):
        return
    folder, _, name = path.rpartition("/")
    with (
        contextlib.suppress(OSError),
        _Rights.of(pid, proc),
        _opened(proc / str(pid) / "root", folder) as directory,
    ):
        os.unlink(name, dir_fd=directory)


def is_ours(path: str) -> bool:
    """Whether the path is one of such files."""
    folder, _, name = path.rpartition("/")
    return bool(_NAME.fullmatch(name)) and folder.startswith("/")


class _Rights:
    """File accesses of this thread are those of a user and a group."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self._gid = gid

    @classmethod
    def of(cls, pid: int, proc: Path) -> "_Rights":
        """A process's. Raises OSError if it is gone."""
        status = (proc / str(pid) / "status").read_text()
        found = {key: value.split() for key, _, value in (line.partition(":") for line in status.splitlines())}
        return cls(int(found["Uid"][3]), int(found["Gid"][3]))  # real, effective, saved, of the file system

    def __enter__(self) -> "_Rights":
        # The group first: it cannot be changed once the user is another.
        self._before = (_libc.setfsuid(_NO_CHANGE), _libc.setfsgid(self._gid))
        _libc.setfsuid(self.uid)
        return self

    def __exit__(self, *_exc: object) -> None:
        uid, gid = self._before
        _libc.setfsuid(uid)
        _libc.setfsgid(gid)


def _working_directory(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return str((folder / "cwd").readlink())
    return PLACES[0]


@contextlib.contextmanager
def _opened(root: Path, folder: str) -> Iterator[int]:
    """A directory as a process with that root sees it. Raises OSError."""
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = struct.pack(
            "<QQQ", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS
        )
        found = _libc.syscall(_SYS_OPENAT2, top, os.fsencode(folder), how, ctypes.c_size_t(len(how)))
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    finally:
        os.close(top)
    try:
        yield found
    finally:
        os.close(found)


def _check_directory(directory: int, trusted: set[int]) -> None:
    """Raises PermissionError if anybody but these users could put another file in the place of ours."""
    facts = os.fstat(directory)
    shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX
    if shared or facts.st_uid not in trusted:
        raise PermissionError(f"others may replace files in that directory of user {facts.st_uid}")


def _write(directory: int, name: str, content: bytes, uid: int) -> None:
    """Raises OSError; then there is no file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, flags, 0o400, dir_fd=directory)
    try:
        if os.fstat(file).st_uid != uid:
            raise PermissionError(f"the file would not belong to user {uid}: this process cannot act for that user")
        if os.write(file, content) != len(content):
            raise OSError("the file system is full")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(file)
