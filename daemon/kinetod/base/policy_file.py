"""The policies of helper services with rights: files that only root can write, and lists of users in them."""

import os
import pwd
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

MAX_FILE_BYTES = 64 << 10
ANYBODY = "*"
ORDINARY_USERS = "1000-4294967294"  # lower uids are accounts of the host's services
_MAX_UID = 2**32 - 2


class PolicyError(Exception):
    """The policy file is unusable, so no caller is served. The message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Uids:
    """A set of users: inclusive ranges of numbers; `everybody` means everybody but root."""

    everybody: bool = False
    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, uid: int) -> bool:
        return (self.everybody and uid != 0) or any(low <= uid <= high for low, high in self.ranges)


class CallersAndUsers(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The keys common to all policy files. By default the front end may call, for all users who are people."""

    callers: list[str | int] = msgspec.field(default_factory=lambda: ["kineto"])
    users: list[str | int] = msgspec.field(default_factory=lambda: [ORDINARY_USERS])
    denied_users: list[str | int] = []


@dataclass(frozen=True, slots=True)
class PolicyUsers:
    """The users named by a policy file. own_uid: of the service that reads it."""

    callers: Uids
    users: Uids
    denied: Uids
    own_uid: int = field(default_factory=os.geteuid)


File = TypeVar("File", bound=CallersAndUsers)


def read_policy(path: Path, form: type[File]) -> File:
    """Reads a policy file that only root can have written. Raises PolicyError."""
    try:
        return msgspec.toml.decode(_read(path), type=form)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise PolicyError(f"{path}: {exc}") from exc


def users_of(file: CallersAndUsers, path: Path, uid_of: Callable[[str], int] | None = None) -> PolicyUsers:
    """The users named by the file. uid_of: the number of a name, or KeyError. Raises PolicyError."""
    lists = {}
    for name in ("callers", "users", "denied_users"):
        try:
            lists[name] = _uids(getattr(file, name), uid_of or _number)
        except ValueError as exc:
            raise PolicyError(f"{path}: {name}: {exc}") from exc
    if lists["callers"].everybody:
        raise PolicyError(f"{path}: callers: must name individual users; {ANYBODY!r} would include root")
    return PolicyUsers(lists["callers"], lists["users"], lists["denied_users"])


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise PolicyError(f"{path}: {exc.strerror}; without this file no caller is served") from exc
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PolicyError(f"{path} is not a regular file")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise PolicyError(f"{path} is writable by users other than root; run chown root {path}; chmod 0644 {path}")
        text = os.read(descriptor, MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise PolicyError(f"{path}: {exc.strerror}; without this file no caller is served") from exc
    finally:
        os.close(descriptor)
    if len(text) > MAX_FILE_BYTES:
        raise PolicyError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    return text


def _number(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _uids(entries: Sequence[str | int], look_up: Callable[[str], int]) -> Uids:
    """Parses names, numbers, ranges "1000-60000", and "*". Raises ValueError."""
    ranges = [_range(str(entry), look_up) for entry in entries if entry != ANYBODY]
    return Uids(everybody=ANYBODY in entries, ranges=tuple(ranges))


def _range(entry: str, look_up: Callable[[str], int]) -> tuple[int, int]:
    low, dash, high = entry.partition("-")
    if low.isascii() and low.isdecimal() and (not dash or (high.isascii() and high.isdecimal())):
        first, last = int(low), int(high or low)
        if not first <= last <= _MAX_UID:
            raise ValueError(f"{entry!r} is not a valid range of user ids")
        return first, last
    try:
        uid = look_up(entry)
    except KeyError:
        raise ValueError(f"there is no user {entry!r}") from None
    return uid, uid
