"""Network namespaces in which processes look for a daemon: containers with a network of their own.

Theory of operation
    The abstract name of the daemon's socket means another socket in each network namespace. Namespaces of interest are
    those of processes that were started with KINETO_USE_DAEMON and without a folder for the sockets. The daemon
    searches for them repeatedly, since containers come and go; a socket keeps its namespace alive, so it is closed when
    the last such process has gone.

    A process can block the reader of its environment through its mappings. So one thread reads them, with a deadline
    for its callers; a late result becomes the next answer.
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
from kinetod.kineto_ipc.namespace_socket import BOUND
from kinetod.processes.identity import PROC, ProcessKey, start_time_ns
from kinetod.supervise.child import python
from kinetod.supervise.thread_deadline import WithinDeadline

MAX_NAMESPACES = 256
MAX_PER_USER = 128
MAX_INHABITANTS = 4  # of a namespace that are listed
LOOK_S = 5.0
_ENTER_S = 10.0  # Python starts within 0.2 s on a quiet machine
_ENVIRON_BYTES = 1 << 20
_MAX_REPLY_BYTES = 1000
# The environment variables that libkineto reads, in its own spelling (Config.cpp, init.cpp).
USE_DAEMON = "KINETO_USE_DAEMON"  # set, whatever its value: poll a daemon
SOCKET_DIR = "KINETO_IPC_SOCKET_DIR"  # folder of the sockets; otherwise they are abstract
CONFIG_FILE = "KINETO_CONFIG"  # instead of /etc/libkineto.conf
TRACE_DIR = "KINETO_ONDEMAND_TRACE_DIR"  # folder where it may write traces, from torch 2.14 on
VARIABLES = (USE_DAEMON, SOCKET_DIR, CONFIG_FILE, TRACE_DIR)


@dataclass(frozen=True, slots=True)
class NamespacesSeen:
    """inhabited: the namespaces of interest; opened: new sockets by namespace; problems: why others have none."""

    inhabited: frozenset[int] = frozenset()
    opened: Mapping[int, socket.socket] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)


class NamespaceOpener(Protocol):
    """Creates sockets in other network namespaces: this daemon, or the attach helper service."""

    async def poll_sockets(self, served: Collection[int]) -> NamespacesSeen | None:
        """Searches for namespaces, and opens those that are not served; None if that is impossible now."""


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
    """A socket in the namespace of these processes, created by a separate process. Blocking. Raises OSError."""
    why = "all its processes have ended"
    for key in keys:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            arguments = (str(key.pid), str(key.start_time_ns), str(namespace))
            try:
                subprocess.run(
                    python("kinetod.kineto_ipc.namespace_socket", *arguments),
                    check=False,  # its answer reports the result
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
        why = clean(said.decode("utf-8", "replace"), _MAX_REPLY_BYTES) or "the process that was to enter it crashed"
    raise OSError(why)


class OwnRights:
    """NamespaceOpener of the daemon itself: needs CAP_SYS_ADMIN and the right to read other users' environments."""

    def __init__(self) -> None:
        own = own_namespace()
        self._look = WithinDeadline("network namespaces", lambda: inhabited(own))

    async def poll_sockets(self, served: Collection[int]) -> NamespacesSeen | None:
        """See NamespaceOpener."""
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
