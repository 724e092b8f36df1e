"""Network namespaces in which processes look for a daemon: containers with a network of their own.

Theory of operation
    The abstract name of the daemon's socket means another socket in each network namespace. Namespaces of interest are
    those of processes that were started with KINETO_USE_DAEMON and without a folder for the sockets. They are looked
    for again and again, since containers come and go; a socket keeps its namespace alive, so it is closed when the last
    such process has gone.

    What a process maps can block whoever reads its environment. So there is one thread for that, with a deadline for
    those who wait; what it finds later is the next answer.
"""

import asyncio
import contextlib
import socket
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kinetod.attach.inspect.process_inspection import read_file
from kinetod.base.safe_text import clean
from kinetod.kineto_ipc.libkineto_variables import SOCKET_DIR, USE_DAEMON
from kinetod.kineto_ipc.namespace_socket import BOUND
from kinetod.processes.identity import PROC, ProcessKey, start_time_ns
from kinetod.supervise.child import python
from kinetod.supervise.thread_deadline import WithinDeadline

MAX_NAMESPACES = 256
MAX_PER_USER = 128
MAX_INHABITANTS = 4  # of a namespace that are named
LOOK_S = 5.0
_ENTER_S = 10.0  # a Python starts within 0.2 s on a quiet machine
_ENVIRON_BYTES = 1 << 20
_MAX_REPLY_BYTES = 1000


@dataclass(frozen=True, slots=True)
class NamespacesSeen:
    """inhabited: the namespaces of interest; opened: a new socket in each of these; problems: why others have none."""

    inhabited: frozenset[int] = frozenset()
    opened: Mapping[int, socket.socket] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)


class NamespaceOpener(Protocol):
    """Makes sockets in other network namespaces: this daemon, or the attach helper service."""

    async def poll_sockets(self, served: Collection[int]) -> NamespacesSeen | None:
        """Looks for namespaces, and opens those that are not served; None if that cannot be done now."""


def own_namespace() -> int:
    """The inode of this process's network namespace."""
    return (PROC / "self/ns/net").stat().st_ino


def inhabited(own: int, proc: Path = PROC) -> dict[int, list[ProcessKey]]:
    """The first processes of each namespace of interest, with start times of a machine booted at 0. Blocking."""
    found: dict[int, list[ProcessKey]] = {}
    per_user: Counter[int] = Counter()
    for folder in proc.iterdir():
        with contextlib.suppress(OSError, ValueError):
            namespace = (folder / "ns/net").stat().st_ino if folder.name.isdecimal() else own
            if namespace == own or not _looks_for_socket(folder):
                continue
            pid = int(folder.name)
            if namespace not in found:
                uid = folder.stat().st_uid
                if len(found) >= MAX_NAMESPACES or per_user[uid] >= MAX_PER_USER:
                    continue
                per_user[uid] += 1
            keys = found.setdefault(namespace, [])
            if len(keys) < MAX_INHABITANTS:
                keys.append(ProcessKey(pid, start_time_ns(pid, proc, boot_time_ns=0)))
    return {namespace: keys for namespace, keys in found.items() if keys}


def _looks_for_socket(folder: Path) -> bool:
    variables = dict(
        entry.split(b"=", 1) for entry in read_file(folder / "environ", _ENVIRON_BYTES).split(b"\0") if b"=" in entry
    )
    return USE_DAEMON.encode() in variables and not variables.get(SOCKET_DIR.encode())


def open_in(namespace: int, keys: Iterable[ProcessKey]) -> socket.socket:
    """A socket in the namespace of these processes, made by a process of its own. Blocking. Raises OSError."""
    why = "all its processes have ended"
    for key in keys:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            arguments = (str(key.pid), str(key.start_time_ns), str(namespace))
            try:
                subprocess.run(
                    python("kinetod.kineto_ipc.namespace_socket", *arguments),
                    check=False,  # its answer tells how it went
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_ENTER_S,
                )
            except subprocess.TimeoutExpired:
                raise OSError(f"entering it took longer than {_ENTER_S:g} s") from None
            theirs.close()
            said, descriptors, _, _ = socket.recv_fds(ours, _MAX_REPLY_BYTES, 1)
        if said == BOUND and descriptors:
            sock = socket.socket(fileno=descriptors[0])
            sock.set_inheritable(False)
            sock.setblocking(False)
            return sock
        why = clean(said.decode("utf-8", "replace"), _MAX_REPLY_BYTES) or "the process that should enter it crashed"
    raise OSError(why)


class OwnRights:
    """NamespaceOpener, by the daemon itself: needs CAP_SYS_ADMIN and the right to read other users' environments."""

    def __init__(self) -> None:
        own = own_namespace()
        self._look = WithinDeadline("network namespaces", lambda: inhabited(own))

    async def poll_sockets(self, served: Collection[int]) -> NamespacesSeen | None:
        """As NamespaceOpener has it."""
        try:
            found = await asyncio.to_thread(self._look.get, LOOK_S)
        except TimeoutError:
            return None
        opened, problems = dict[int, socket.socket](), dict[int, str]()
        for namespace in found.keys() - set(served):
            try:
                opened[namespace] = await asyncio.to_thread(open_in, namespace, found[namespace])
            except OSError as exc:
                problems[namespace] = str(exc)
        return NamespacesSeen(frozenset(found), opened, problems)
