"""`python -m kinetod.trace_writing.trace_writer`: writes traces into a user's folder with only that user's rights.

Theory of operation
    Its parent (the daemon, or the kinetod-writer service) passes a request on standard input and open descriptors of
    the stored traces; the answer is one line of JSON: the problem of each file, "" for written ones. Before it touches
    a path, this process becomes the user: groups, group and user, without any capability, so that the kernel applies
    that user's permissions and quota.

    - It ends itself at its deadline, by a timer whose signal it does not catch: its parent may not be allowed to kill
      another user's process.
    - The folder is entered from one of the allowed roots, part by part, and never through a symbolic link. So it is
      below that root whatever its users do in between.
    - If the user is root, every folder on the path must be root's, and writable by others only with the sticky bit:
      root's rights must not be used where others control the meaning of a name.
    - The source must be a regular file that looks like a trace, with its initial length and no longer than allowed, so
      that nothing that blocks or grows is read.
    - A file is written under an unguessable name, and renamed when it is complete. It replaces a file of that name only
      if that is the same user's and a trace, as Kineto and this daemon write them.
"""

import contextlib
import json
import os
import secrets
import signal
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from kinetod.base.libc import change_user, drop_capabilities

ROOT = 0
FILE_MODE = 0o644  # like Kineto's with the usual umask
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 4096
_OTHER_KINDS = (".pftrace", ".memory_snapshot.pickle", ".execution_trace.json")  # recognised by name
_HIDDEN = {"ProtectHome=no": ("/home", "/root", "/run/user"), "PrivateTmp=no": ("/tmp", "/var/tmp")}  # by units
_SIGNS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"displayTimeUnit"')


class WriteRefused(Exception):
    """A file cannot be written; the message says why."""


def become(uid: int) -> None:
    """Permanently becomes a user, without any capability. Raises WriteRefused."""
    try:
        if uid != os.geteuid():
            change_user(uid)
        drop_capabilities()  # the kernel keeps them unless the user was root before
    except OSError as exc:
        raise WriteRefused(f"this process cannot switch to uid {uid}: {exc.strerror}") from exc


def opened_root(root: str, unit: str) -> int:
    """A descriptor of the root. unit: systemd unit whose settings limit what this process sees. Raises WriteRefused."""
    try:
        folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise WriteRefused(f"{root}: {exc.strerror}{_hidden(root, unit, exc)}") from exc
    if os.fstatvfs(folder).f_flag & os.ST_RDONLY:
        os.close(folder)
        raise WriteRefused(
            f"{root} is read-only for {unit}; if others can write to it, add the line ReadWritePaths={root} below "
            f"[Service] (`systemctl edit {unit}`), then `systemctl restart {unit}`"
        )
    return folder


def _hidden(root: str, unit: str, error: OSError) -> str:
    """Advice if the unit hides the root from this process."""
    for line, folders in _HIDDEN.items():
        for folder in folders:
            if f"{root}/".startswith(f"{folder}/") and (
                isinstance(error, FileNotFoundError) or not os.access(folder, os.X_OK, effective_ids=True)
            ):
                return f"; if others can see it, add the line {line} below [Service] (`systemctl edit {unit}`)"
    return ""


def entered(root: str, parts: list[str], unit: str) -> int:
    """A descriptor of a folder below `root`. Raises WriteRefused."""
    path, folder = root, opened_root(root, unit)
    try:
        for part in parts:
            _check_safe(folder, path)
            path = f"{path.rstrip('/')}/{part}"
            outer = folder
            try:
                folder = os.open(part, _FOLDER, dir_fd=outer)
            finally:
                os.close(outer)
        _check_safe(folder, path)
        if os.fstatvfs(folder).f_flag & os.ST_RDONLY:
            raise WriteRefused(f"{path} is on a read-only file system")
        if not os.access(f"/proc/self/fd/{folder}", os.W_OK | os.X_OK, effective_ids=True):
            raise WriteRefused(f"{path} is not writable by uid {os.geteuid()}")
    except NotADirectoryError as exc:
        raise WriteRefused(f"{path} is not a folder, or is a symbolic link; use its real path") from exc
    except OSError as exc:
        raise WriteRefused(f"{path}: {exc.strerror}") from exc
    return folder


def _check_safe(folder: int, path: str) -> None:
    status = os.fstat(folder)
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if os.geteuid() == ROOT and (status.st_uid != ROOT or (others_write and not status.st_mode & stat.S_ISVTX)):
        raise WriteRefused(f"{path} can be changed by users other than root, so nothing is written there as root")


def written(source: int, folder: int, name: str, max_bytes: int) -> None:
    """Copies a file into the folder under this name. Raises WriteRefused."""
    try:
        size = _size_of(source, name, max_bytes)
        _check_replaceable(folder, name)
        temporary = f".kinetod-{secrets.token_hex(8)}.tmp"
        with os.fdopen(os.open(temporary, _NEW, FILE_MODE, dir_fd=folder), "wb") as copy:
            try:
                os.fchmod(copy.fileno(), FILE_MODE)  # whatever the daemon's umask
                _copy(source, copy, size)
                copy.flush()
                os.fsync(copy.fileno())
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
    except OSError as exc:
        raise WriteRefused(exc.strerror or str(exc)) from exc


def _size_of(source: int, name: str, max_bytes: int) -> int:
    """The size of a descriptor that may be copied. Raises WriteRefused, OSError."""
    status = os.fstat(source)
    if not stat.S_ISREG(status.st_mode):
        raise WriteRefused("the source is not a regular file")
    if status.st_size > max_bytes:
        raise WriteRefused(f"the trace has {status.st_size} bytes, but at most {max_bytes} are allowed")
    if not name.endswith(_OTHER_KINDS) and not is_trace(os.pread(source, _HEAD_BYTES, 0)):
        raise WriteRefused("the source is not a trace")
    return status.st_size


def _copy(source: int, copy: BinaryIO, size: int) -> None:
    """Copies exactly `size` bytes, even if the source grows. Raises WriteRefused, OSError."""
    done = 0
    while chunk := os.pread(source, min(_CHUNK_BYTES, size - done), done):
        copy.write(chunk)
        done += len(chunk)
    if done != size:
        raise WriteRefused("the stored trace shrank while it was being read")


def _check_replaceable(folder: int, name: str) -> None:
    """Raises WriteRefused for a file that must stay, OSError."""
    try:
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise WriteRefused(f"it already exists and is not a trace that can be replaced ({exc.strerror})") from exc
    with os.fdopen(found, "rb") as file:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise WriteRefused("it already exists and is not a regular file of this user")
        if not name.endswith(_OTHER_KINDS) and not is_trace(file.read(_HEAD_BYTES)):
            raise WriteRefused("it already exists and is not a trace; remove it, or use another file name")


def is_trace(head: bytes) -> bool:
    """Whether a file with this beginning is a Chrome trace, plain or compressed, or is empty."""
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, _HEAD_BYTES)
        except zlib.error:
            return False
    text = head.lstrip()
    return not head or (text[:1] == b"{" and any(sign in text for sign in _SIGNS))


def results(question: Mapping[str, Any]) -> Iterator[str]:
    """Yields the problem of each file of a request; without files, of its folder; without a user, of its root.

    A root that only a user may see is assumed to be in order.
    """
    root, unit = question["root"], question["unit"]
    try:
        if question["uid"] is None:
            yield _problem_of(root, unit)
            return
        become(question["uid"])
        folder = entered(root, question["parts"], unit)
    except WriteRefused as exc:
        yield from [str(exc)] * max(1, len(question["files"]))
        return
    if not question["files"]:
        yield ""
    for descriptor, name in question["files"]:
        try:
            written(descriptor, folder, name, question["max_bytes"])
        except WriteRefused as exc:
            yield f"{name}: {exc}"
        else:
            yield ""


def _problem_of(root: str, unit: str) -> str:
    try:
        os.close(opened_root(root, unit))
    except WriteRefused as exc:
        seen_by_users = isinstance(exc.__cause__, PermissionError) and not _hidden(root, unit, exc.__cause__)
        return "" if seen_by_users else str(exc)
    return ""


def main() -> int:
    """Ends when all files have been written or refused."""
    os.umask(0o022)
    question = json.loads(sys.stdin.buffer.read())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, question["deadline_s"])
    sys.stdout.write(json.dumps(list(results(question))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
