"""Checks who owns the Unix socket at an address before anything is sent to it.

Theory of operation
    Anybody can create a folder in /tmp and a socket in it. Therefore kinetoctl only connects to a daemon of root, of
    its own user, or of a user to whom root has given the socket's folder in /run. The agent has the same rule
    (`kineto_agent.control.link`).

    gRPC connects on its own, repeatedly, and does not reveal the peer, so what is checked here must stay true. The
    folder is opened, and its owner and mode are read from the open folder. gRPC gets a path through the folder's
    descriptor: whatever happens to the original path, only the folder's owner and root can put a socket there. One
    connection is then made and closed, so that the kernel names the peer. This is skipped if the caller owns both
    folder and socket, as with tunnels: nobody else can have made them.

    A restarted daemon may have made a new folder; `is_there` says whether the path still leads to this one.
"""

import contextlib
import os
import pwd
import socket
import stat
from pathlib import Path

from kineto_protos import unix_peer
from kineto_protos.endpoints import SYSTEM_PARENT, vouched_for

from kinetoctl.errors import UntrustedSocket

_CONNECT_LIMIT_S = 1.0  # of a daemon whose queue is full
_ROOT = 0


class SocketFolder:
    """The folder of a daemon's socket, held open. Making one blocks briefly."""

    def __init__(self, path: str, *, uid: int | None = None, run: Path = SYSTEM_PARENT) -> None:
        """uid: that of the caller; run: a folder in which only root makes folders. Raises UntrustedSocket, OSError."""
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
        """The gRPC address of the socket, by way of the open folder."""
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
        """Close the folder; its address is invalid afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check(self) -> None:
        folder = os.fstat(self._fd)
        if not self._is_known(folder.st_uid):
            raise self._untrusted(f"{self._path.parent} belongs to {_name(folder.st_uid)}, not to root or you")
        if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise self._untrusted(f"users other than its owner can put sockets into {self._path.parent}")
        found = os.stat(self._path.name, dir_fd=self._fd, follow_symlinks=False)
        if folder.st_uid == found.st_uid == self._uid:
            return
        peer = self._peer()
        if peer is not None and not self._is_known(peer):
            raise self._untrusted(f"{_name(peer)} listens there, not root or you")

    def _is_known(self, uid: int) -> bool:
        return uid in (_ROOT, self._uid) or vouched_for(self._path, uid, self._run)

    def _peer(self) -> int | None:
        """The user who listens, or None if nobody answers."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(_CONNECT_LIMIT_S)
            connection.connect(self._within)
            return unix_peer.credentials(connection)[1]
        return None

    def _untrusted(self, why: str) -> UntrustedSocket:
        return UntrustedSocket(f"nothing was sent to unix:{self._path}: {why}")


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"
