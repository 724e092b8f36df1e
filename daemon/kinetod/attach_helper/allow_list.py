"""The helper's policy: who may call it and whose processes it may enter, from a file that only root can write.

Theory of operation
    The front end decides what its users may do; it serves a network and can be broken into. So the helper trusts
    nobody: the kernel identifies its callers, and /proc a target's owner. The file is read again for every request. If
    it is missing, wrong or writable by others, everything is refused.

    A process counts as a user's if all its user ids (real, effective, saved, file system) are allowed: a program that
    changes its rights does not belong to the user who started it. Root's processes are the host's services and the
    containers' programs; by default only those in a PID namespace of their own are allowed.

    A process is protected if the kernel would not let its own user trace it: it changes its user or group, is not
    dumpable, has capabilities on the host, or is in a user namespace that is neither its user's nor a container's. A
    protected process is entered for administrators of the front end only, if at all. Processes of this service's own
    user and of its callers are never entered: breaking into one part must not give the rights of another.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kinetod.base.policy_file import CallersAndUsers, PolicyError, Uids, read_policy, users_of
from kinetod.processes.credentials import Credentials

DEFAULT_FILE = Path("/etc/kinetod/attach.toml")
NEVER, IN_CONTAINERS, ADMINISTRATORS, ALWAYS = "never", "containers", "administrators", "always"
_NS_GET_OWNER_UID = 0xB704  # ioctl_ns(2), Linux 4.11


class _File(CallersAndUsers, forbid_unknown_fields=True, kw_only=True):
    root: str = IN_CONTAINERS
    protected: str = ADMINISTRATORS
    kubelet_socket: str = ""


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """Owner of a process. container: it is in another PID namespace than this service, which is in the host's.
    protected: why its own user could not trace it; empty: the kernel would permit it.
    """

    uids: tuple[int, ...]
    container: bool
    protected: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """root: NEVER, IN_CONTAINERS or ALWAYS. protected: NEVER, ADMINISTRATORS or ALWAYS. kubelet_socket: the socket that
    a front end gets connections to; None: none.
    """

    callers: Uids
    users: Uids
    denied: Uids
    root: str
    path: Path = DEFAULT_FILE
    kubelet_socket: Path | None = None
    protected: str = ADMINISTRATORS
    own_uid: int = field(default_factory=os.geteuid)

    def refuses_caller(self, uid: int) -> str:
        """Why this user is not served; empty if it is."""
        if uid == 0 or uid in self.callers:
            return ""
        return f"uid {uid} is not allowed to use the attach helper; `callers` in {self.path} lists who is"

    def refuses_owner(self, owner: ProcessOwner, *, administrator: bool = False) -> str:
        """Why a process is not entered; empty if it may be. administrator: whether the front end asks for one."""
        if why := self._refuses_uids(owner):
            return why
        if not owner.protected or self.protected == ALWAYS or (self.protected == ADMINISTRATORS and administrator):
            return ""
        who = "only administrators" if self.protected == ADMINISTRATORS else "nobody"
        return f"it is protected: {owner.protected}; {who} can attach to such processes (protected in {self.path})"

    def _refuses_uids(self, owner: ProcessOwner) -> str:
        for uid in dict.fromkeys(owner.uids):
            if uid == 0:
                if self.root == ALWAYS or (self.root == IN_CONTAINERS and owner.container):
                    continue
                which = "outside containers " if self.root == IN_CONTAINERS else ""
                return f"processes of root {which}are left alone (root = {self.root!r} in {self.path})"
            if uid == self.own_uid:
                return f"uid {uid} is the attach helper itself"
            if uid in self.callers:
                return f"uid {uid} is a caller of the helper, which does not attach to processes of its callers"
            if uid in self.denied or uid not in self.users:
                return f"processes of uid {uid} are left alone (users and denied_users in {self.path})"
        return "" if owner.uids else "its owner cannot be determined"


def load(path: Path = DEFAULT_FILE, *, uid_of: Callable[[str], int] | None = None) -> Policy:
    """Reads the policy file. Raises PolicyError."""
    file = read_policy(path, _File)
    if file.root not in (NEVER, IN_CONTAINERS, ALWAYS):
        raise PolicyError(f"{path}: root: must be {NEVER!r}, {IN_CONTAINERS!r} or {ALWAYS!r}, not {file.root!r}")
    if file.protected not in (NEVER, ADMINISTRATORS, ALWAYS):
        raise PolicyError(
            f"{path}: protected: must be {NEVER!r}, {ADMINISTRATORS!r} or {ALWAYS!r}, not {file.protected!r}"
        )
    named = users_of(file, path, uid_of)
    socket = Path(file.kubelet_socket) if file.kubelet_socket else None
    if socket is not None and not socket.is_absolute():
        raise PolicyError(f"{path}: kubelet_socket: must be an absolute path, not {file.kubelet_socket!r}")
    return Policy(named.callers, named.users, named.denied, file.root, path, socket, file.protected)


def owner(pid: int, rights: Credentials, proc: Path = Path("/proc")) -> ProcessOwner:
    """The owner of a process with these credentials."""
    container = _is_in_another(proc, pid, "ns/pid")
    return ProcessOwner(rights.uids, container, _protected(pid, rights, container, proc))


def _protected(pid: int, rights: Credentials, container: bool, proc: Path) -> str:
    if rights.changes_rights:
        return "it can change its user or group"
    if rights.dumpable is False:
        return "it is not dumpable"
    if _is_in_another(proc, pid, "ns/user"):
        own = container or _namespace_owner(pid, proc) == rights.uid
        return "" if own else "it is in another user's user namespace"
    return "it has capabilities" if rights.capabilities and rights.uid != 0 else ""


def _is_in_another(proc: Path, pid: int, namespace: str) -> bool:
    """Whether it is in another namespace than this service. False if that cannot be read."""
    with contextlib.suppress(OSError):
        return (proc / str(pid) / namespace).readlink() != (proc / "self" / namespace).readlink()
    return False


def _namespace_owner(pid: int, proc: Path) -> int:
    """The uid that created its user namespace; -1 if that cannot be determined."""
    with contextlib.suppress(OSError), (proc / str(pid) / "ns/user").open("rb", buffering=0) as namespace:
        (uid,) = struct.unpack("=I", fcntl.ioctl(namespace, _NS_GET_OWNER_UID, bytes(4)))
        return int(uid)
    return -1
