"""A process's owner, rights and program as one value, to be compared with a later reading.

Theory of operation
    A pid and a start time name a process, not a program: both outlive execve, by which a process of one user becomes
    one of another (set-user-id programs, sudo). So a decision about a process is a decision about its Credentials, and
    an action compares them again, while a thread of it is stopped or at a point after which no change goes unnoticed.

    `program` is a digest of the auxiliary vector, which the kernel lays out anew at random for each execve: another
    value is another program, also of the same file and the same user. `executable` names the file. Both, and the user
    namespace, are visible only to those who may trace the process; None and "" mean unknown and are not compared.
"""

import contextlib
import ctypes
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kinetod.base.libc import LIBC

PROC = Path("/proc")
_AUXV_BYTES = 4096  # usually about 320
_STATUS_BYTES = 1 << 16  # usually 1.5 KiB; a user may have many groups
_STATUS = re.compile(rb"\nUid:\t([\d\t]+)\nGid:\t([\d\t]+)\n(?:.*\n)*?CapPrm:\t([0-9a-f]+)\n")
_AT_FDCWD, _AT_STATX_DONT_SYNC, _STATX_INO = -100, 0x4000, 0x100
_STATX_BYTES, _STATX_INO_OFFSET, _STATX_DEV_OFFSET = 256, 32, 136  # struct statx: stx_ino, stx_dev_major and _minor
_statx = getattr(LIBC, "statx", None)  # glibc 2.28
REPLACED = "the process replaced itself with another program (exec)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Ids are real, effective, saved and file system."""

    uids: tuple[int, ...]
    gids: tuple[int, ...]
    capabilities: int  # permitted capabilities
    dumpable: bool | None  # None: unknown (root's processes)
    user_namespace: int | None = None  # inode
    executable: tuple[int, int] | None = None  # device and inode
    program: str = ""

    @property
    def uid(self) -> int:
        """The effective user."""
        return self.uids[1]

    @property
    def gid(self) -> int:
        """The effective group."""
        return self.gids[1]

    @property
    def changes_rights(self) -> bool:
        """Whether the program can act for another user or group than it does now."""
        return len(set(self.uids)) > 1 or len(set(self.gids)) > 1

    def to_dict(self) -> dict[str, Any]:
        """The credentials as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Credentials":
        """Reads the result of `to_dict`. Raises ValueError."""
        try:
            executable, namespace = values.get("executable"), values.get("user_namespace")
            dumpable = values["dumpable"]
            return cls(
                uids=_four(values["uids"]),
                gids=_four(values["gids"]),
                capabilities=int(values["capabilities"]),
                dumpable=None if dumpable is None else bool(dumpable),
                user_namespace=None if namespace is None else int(namespace),
                executable=None if executable is None else (int(executable[0]), int(executable[1])),
                program=str(values.get("program", "")),
            )
        except (KeyError, TypeError, IndexError) as exc:
            raise ValueError(f"not credentials: {exc!r}") from exc

    def difference(self, found: "Credentials") -> str:
        """The first difference, for people; empty if nothing known to both differs."""
        return "; ".join(_differences(self, found))


def _four(values: Any) -> tuple[int, ...]:
    ids = tuple(map(int, values))
    if len(ids) != 4:
        raise ValueError(f"expected four ids, got {len(ids)}")
    return ids


def _differences(approved: Credentials, found: Credentials) -> Iterator[str]:
    if approved.uids != found.uids:
        yield f"its user ids changed from {_listed(approved.uids)} to {_listed(found.uids)}"
    if approved.gids != found.gids:
        yield f"its group ids changed from {_listed(approved.gids)} to {_listed(found.gids)}"
    if approved.capabilities != found.capabilities:
        yield f"its capabilities changed from {approved.capabilities:#x} to {found.capabilities:#x}"
    if None not in (approved.dumpable, found.dumpable) and approved.dumpable != found.dumpable:
        yield f"it has become {'dumpable' if found.dumpable else 'undumpable'}"
    for field in fields(Credentials)[4:]:  # those that may be unknown
        before, now = getattr(approved, field.name), getattr(found, field.name)
        if before and now and before != now:
            yield f"its {field.name.replace('_', ' ')} changed"


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, dict.fromkeys(ids)))


def read(pid: int, tid: int = 0, proc: Path = PROC) -> Credentials:
    """Reads the credentials of a process or of one of its threads. Raises ProcessLookupError if it is gone.

    Uses plain calls, since a thread may be stopped. Never waits for the program's file, wherever it is.
    """
    folder = f"{proc}/{pid}/task/{tid}" if tid else f"{proc}/{pid}"
    try:
        return _read(folder)
    except (OSError, ValueError, IndexError) as exc:
        raise ProcessLookupError(f"process {pid} has ended") from exc


def _read(folder: str) -> Credentials:
    ids = _STATUS.search(_content(f"{folder}/status", _STATUS_BYTES))
    if ids is None:
        raise ValueError("a status without ids")
    uids = _four(ids[1].split())
    return Credentials(
        uids=uids,
        gids=_four(ids[2].split()),
        capabilities=int(ids[3], 16),
        dumpable=_dumpable(folder, uids[1]),
        user_namespace=_namespace(folder),
        executable=_executable(f"{folder}/exe"),
        program=program(folder),
    )


def _dumpable(folder: str, uid: int) -> bool | None:
    """The kernel assigns the files of a non-dumpable process to root, but not the folder itself."""
    return None if uid == 0 else os.stat(f"{folder}/environ").st_uid == uid  # noqa: PTH116


def _namespace(folder: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(os.readlink(f"{folder}/ns/user").partition("[")[2][:-1])  # noqa: PTH115
    return None


def _executable(path: str) -> tuple[int, int] | None:
    """The identity of the executable, if the kernel knows it without asking a file server."""
    if _statx is None:
        with contextlib.suppress(OSError):
            found = os.stat(path)  # noqa: PTH116
            return found.st_dev, found.st_ino
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_DONT_SYNC, _STATX_INO, buffer):
        return None
    inode = int.from_bytes(buffer.raw[_STATX_INO_OFFSET : _STATX_INO_OFFSET + 8], "little")
    major, minor = (
        int.from_bytes(buffer.raw[at : at + 4], "little") for at in (_STATX_DEV_OFFSET, _STATX_DEV_OFFSET + 4)
    )
    return os.makedev(major, minor), inode


def program(folder: str) -> str:
    """Identifies the program running there; empty if that is hidden. folder: /proc/PID."""
    with contextlib.suppress(OSError):
        if vector := _content(f"{folder}/auxv", _AUXV_BYTES):
            return hashlib.sha256(vector).hexdigest()[:32]
    return ""


def _content(path: str, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)
