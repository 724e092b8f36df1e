"""Guards the store: folders and files that somebody else could replace are not used.

Theory of operation
    Only the daemon's user (and root) may write anywhere in the store. So nobody can replace a folder or file by a link
    while a capture is written, read or removed, and paths can be used repeatedly. `check_store` ensures this at the
    start: the state folder and its direct entries belong to the user or root, nobody else may write there, and no other
    user of the host can change a path to it if the daemon is root's.

    Reading (`open_regular`) nevertheless requires a regular file: links are not followed, and a FIFO or device does not
    block.
"""

import contextlib
import hashlib
import io
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from kinetod.base.errors import StartError

log = logging.getLogger(__name__)

ROOT = 0
FOLDERS = ("captures", "trash", "dynolog")
FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "lock")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_store(state_dir: Path) -> None:
    """Checks that only this user and root can change the store, and removes needless rights. Raises StartError."""
    _check(state_dir, stat.S_ISDIR, "a folder")
    for parent in state_dir.resolve().parents if _is_root_of_host() else ():
        _check_parent(state_dir, parent)
    for names, is_right, what in ((FOLDERS, stat.S_ISDIR, "a folder"), (FILES, stat.S_ISREG, "a regular file")):
        for name in names:
            _check(state_dir / name, is_right, what)


def _is_root_of_host(uid_map: Path = Path("/proc/self/uid_map")) -> bool:
    """Whether this is root of the host; to root of a user namespace the host's folders seem to belong to nobody."""
    return os.geteuid() == ROOT and uid_map.read_text().split()[1:] == ["0", "4294967295"]


def _check(path: Path, is_right: Callable[[int], bool], what: str) -> None:
    try:
        link, status = path.lstat(), path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise _refused(path, "is a dangling link") from None
        return
    except OSError as exc:
        raise StartError(f"{path} cannot be examined: {exc.strerror}; check the store's permissions") from exc
    if not is_right(status.st_mode):
        raise _refused(path, f"is not {what}")
    for found in (link, status):
        if found.st_uid not in (ROOT, os.geteuid()):
            raise _refused(path, f"belongs to uid {found.st_uid}")
    if status.st_mode & _OTHERS_WRITE:
        _tighten(path, status)


def _tighten(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    try:
        path.chmod(mode & ~_OTHERS_WRITE)
    except OSError as exc:
        raise _refused(path, f"is writable by other users (mode {mode:04o})") from exc
    log.warning("%s was writable by other users (mode %04o); only its owner can write to it now", path, mode)


def _check_parent(state_dir: Path, parent: Path) -> None:
    status = parent.stat()
    if status.st_uid != ROOT:
        raise _refused(state_dir, f"is in {parent}, which belongs to uid {status.st_uid}")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        raise _refused(state_dir, f"is in {parent}, where any user can rename it (mode {mode:04o})")


def _refused(path: Path, problem: str) -> StartError:
    return StartError(
        f"the store is not safe: {path} {problem}; move it away, chown it to uid {os.geteuid()}, "
        "or use another --state-dir"
    )


def open_regular(path: Path) -> io.FileIO:
    """Opens a file of the store, unbuffered, for reading. Raises OSError, also if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    return io.FileIO(descriptor, "rb")


def empty(folder: Path) -> None:
    """Empties a folder but keeps it; removes a file or link of that name."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        folder.unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()


def folder_bytes(folder: Path) -> int:
    """Total bytes of all files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(root, name).lstat().st_blocks * 512
    return total


def file_digest(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file. Raises OSError."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return os.fstat(file.fileno()).st_size, digest.hexdigest()
