"""Whose Unix socket an address names, found out before anything is said there.

Theory of operation
    Anybody can make a folder in /tmp and a socket in it. So kinetoctl speaks only to a daemon of root, of its own
    user, or of a user to whom root has given the socket's folder in /run: the agent's rule
    (`kineto_agent.control.link`).

    gRPC connects by itself, again and again, and shows nothing of the other end. What is checked here must therefore
    stay true. The folder is opened, its owner and mode are those of the open folder, and gRPC gets a path through its
    descriptor: whatever becomes of the way to it, only the folder's owner and root can put a socket there. What lies
    there is then connected to once, for the kernel to name the peer, and let go again. That is left out where folder
    and socket are both the caller's own, as those of tunnels are: nobody else can have made them.

    A daemon that starts anew may have made its folder anew, too; `is_there` says whether the path still leads here.
"""

import contextlib
import os
import pwd
import socket
import stat
import struct
from pathlib import Path

from kineto_protos.endpoints import SYSTEM_PARENT, vouched_for

from kinetoctl.errors import UntrustedSocket

_UCRED = struct.Struct("3i")  # pid, uid, gid
_CONNECT_LIMIT_S = 1.0  # of a daemon whose queue is full
_ROOT = 0


class SocketFolder:
    """The folder of a daemon's socket, held open. Blocking, for a moment."""

    def __init__(self, path: str, *, uid: int | None = None, run: Path = SYSTEM_PARENT) -> None:
        """uid: the caller's; run: where only root makes folders. Raises UntrustedSocket, OSError."""
        self._given = Path(path)
        self._path = self._given.resolve()
        self._uid = os.geteuid() if uid is None else uid
        self._run = run
        self._fd = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def address(self) -> str:
        """The gRPC address of the socket in this very folder."""
        return f"unix:{self._within}"

    @property
    def _within(self) -> str:
        return f"/proc/self/fd/{self._fd}/{self._path.name}"

    def is_there(self) -> bool:
        """Whether the path still leads to this folder."""
        try:
            found = self._given.resolve().parent.stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def close(self) -> None:
        """Let it go; its address leads nowhere any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check(self) -> None:
        folder = os.fstat(self._fd)
        if not self._is_known(folder.st_uid):
            raise self._untrusted(f"{self._path.parent} belongs to {_name(folder.st_uid)}, neither root nor you")
        if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise self._untrusted(f"others than its owner can put sockets into {self._path.parent}")
        found = os.stat(self._path.name, dir_fd=self._fd, follow_symlinks=False)
        if folder.st_uid == found.st_uid == self._uid:
            return
        peer = self._peer()
        if peer is not None and not self._is_known(peer):
            raise self._untrusted(f"it is a socket of {_name(peer)}, neither root nor you")

    def _is_known(self, uid: int) -> bool:
        return uid in (_ROOT, self._uid) or vouched_for(self._path, uid, self._run)

    def _peer(self) -> int | None:
        """The user who listens; None: nobody does, or not now."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(_CONNECT_LIMIT_S)
            connection.connect(self._within)
            _pid, uid, _gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            return int(uid)
        return None

    def _untrusted(self, why: str) -> UntrustedSocket:
        return UntrustedSocket(f"nothing was sent to unix:{self._path}: {why}")


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"
