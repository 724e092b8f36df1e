"""Who may ask the attach helper, and whose processes it touches: a file that only root can write.

Theory of operation
    The front end decides what a user of it may do; it serves a network and can be broken into. So the helper asks
    nobody: it knows its callers by the kernel's word, and a target's owner by /proc. The file is read again for
    every request. One that is missing, wrong or writable by others refuses everything.

    A process counts as a user's if all its user ids (real, effective, saved, of the file system) are allowed: a
    program that changes its rights is none of the one who started it. Root's processes are the host's services and
    the containers' programs; by default only those in a PID namespace of their own are allowed.
"""

import contextlib
import os
import pwd
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

DEFAULT_FILE = Path("/etc/kinetod/attach.toml")
MAX_FILE_BYTES = 64 << 10
ANYBODY = "*"
NEVER, IN_CONTAINERS, ALWAYS = "never", "containers", "always"
_MAX_UID = 2**32 - 2


class PolicyError(Exception):
    """The file cannot be used; nobody gets anything. The text names it and says what to do."""


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    callers: list[str | int] = msgspec.field(default_factory=lambda: ["kineto"])
    users: list[str | int] = msgspec.field(default_factory=lambda: [ANYBODY])
    denied_users: list[str | int] = []
    root: str = IN_CONTAINERS
    kubelet_socket: str = ""


@dataclass(frozen=True, slots=True)
class Uids:
    """Some users: ranges of numbers, both ends included; `everybody` is everybody but root."""

    everybody: bool = False
    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, uid: int) -> bool:
        return (self.everybody and uid != 0) or any(low <= uid <= high for low, high in self.ranges)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a process is. container: it is in another PID namespace than this service, which is in the host's."""

    uids: tuple[int, ...]
    container: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """root: NEVER, IN_CONTAINERS or ALWAYS. kubelet_socket: what a front end gets connections to; None: to nothing."""

    callers: Uids
    users: Uids
    denied: Uids
    root: str
    path: Path = DEFAULT_FILE
    kubelet_socket: Path | None = None

    def refuses_caller(self, uid: int) -> str:
        """Why this user gets nothing; empty: it is served."""
        if uid == 0 or uid in self.callers:
            return ""
        return f"uid {uid} may not ask the attach helper; `callers` in {self.path} names those who may"

    def refuses_owner(self, owner: Owner) -> str:
        """Why a process is left alone; empty: it is not."""
        for uid in dict.fromkeys(owner.uids):
            if uid == 0:
                if self.root == ALWAYS or (self.root == IN_CONTAINERS and owner.container):
                    continue
                which = "outside of containers " if self.root == IN_CONTAINERS else ""
                return f"processes of root {which}are left alone (root = {self.root!r} in {self.path})"
            if uid in self.callers:
                return f"uid {uid} is who asks, and none of its own processes is entered"
            if uid in self.denied or uid not in self.users:
                return f"processes of uid {uid} are left alone (users and denied_users in {self.path})"
        return "" if owner.uids else "its owner cannot be told"


def load(path: Path = DEFAULT_FILE, *, uid_of: Callable[[str], int] | None = None) -> Policy:
    """Raises PolicyError."""
    text = _read(path)
    try:
        file = msgspec.toml.decode(text, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise PolicyError(f"{path}: {exc}") from exc
    if file.root not in (NEVER, IN_CONTAINERS, ALWAYS):
        raise PolicyError(f"{path}: root: must be {NEVER!r}, {IN_CONTAINERS!r} or {ALWAYS!r}, not {file.root!r}")
    look_up = uid_of or (lambda name: pwd.getpwnam(name).pw_uid)
    lists = {}
    for name in ("callers", "users", "denied_users"):
        try:
            lists[name] = _uids(getattr(file, name), look_up)
        except ValueError as exc:
            raise PolicyError(f"{path}: {name}: {exc}") from exc
    if lists["callers"].everybody:
        raise PolicyError(f"{path}: callers: must name users; everybody would be root")
    socket = Path(file.kubelet_socket) if file.kubelet_socket else None
    if socket is not None and not socket.is_absolute():
        raise PolicyError(f"{path}: kubelet_socket: must be an absolute path, not {file.kubelet_socket!r}")
    return Policy(lists["callers"], lists["users"], lists["denied_users"], file.root, path, socket)


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise PolicyError(f"{path}: {exc.strerror}; without it nobody is served") from exc
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PolicyError(f"{path} is no file")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise PolicyError(f"{path} can be written by others than root; chown root {path}; chmod 0644 {path}")
        text = os.read(descriptor, MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise PolicyError(f"{path}: {exc.strerror}; without it nobody is served") from exc
    finally:
        os.close(descriptor)
    if len(text) > MAX_FILE_BYTES:
        raise PolicyError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    return text


def _uids(entries: list[str | int], look_up: Callable[[str], int]) -> Uids:
    """Names, numbers, ranges "1000-60000", and "*". Raises ValueError."""
    ranges = []
    for entry in entries:
        if entry == ANYBODY:
            continue
        ranges.append(_range(str(entry), look_up))
    return Uids(everybody=ANYBODY in entries, ranges=tuple(ranges))


def _range(entry: str, look_up: Callable[[str], int]) -> tuple[int, int]:
    low, dash, high = entry.partition("-")
    if low.isascii() and low.isdecimal() and (not dash or (high.isascii() and high.isdecimal())):
        first, last = int(low), int(high or low)
        if not first <= last <= _MAX_UID:
            raise ValueError(f"{entry!r} is no range of user ids")
        return first, last
    try:
        uid = look_up(entry)
    except KeyError:
        raise ValueError(f"there is no user {entry!r}") from None
    return uid, uid


def owner(pid: int, proc: Path = Path("/proc")) -> Owner:
    """Of a process. Raises OSError if it is gone."""
    uids: tuple[int, ...] = ()
    for line in (proc / str(pid) / "status").read_text(errors="replace").splitlines():
        if line.startswith("Uid:"):
            uids = tuple(map(int, line.split()[1:5]))
    container = False
    with contextlib.suppress(OSError):  # what cannot be read is not believed to be a container
        container = (proc / str(pid) / "ns/pid").readlink() != (proc / "self/ns/pid").readlink()
    return Owner(uids, container)
