"""The listening sockets of the small services beside the daemon: passed by the service manager, or their own."""

import contextlib
import os
import socket
import stat
from pathlib import Path

from kinetod.base.errors import StartError

FIRST_PASSED = 3
BACKLOG = 64


def passed_socket() -> socket.socket | None:
    """The one that the service manager passes, as sd_listen_fds(3) says. Raises StartError."""
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if not count or pid != str(os.getpid()):
        return None
    if count != "1":
        raise StartError(f"expected one socket, but {count} were passed")
    try:
        if not stat.S_ISSOCK(os.fstat(FIRST_PASSED).st_mode):
            raise OSError("it is not a socket")
        listener = socket.socket(fileno=FIRST_PASSED)
    except OSError as exc:
        raise StartError(f"the descriptor that was passed cannot be used: {exc}") from exc
    listener.set_inheritable(False)
    if (listener.family, listener.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        raise StartError("a SOCK_SEQPACKET Unix socket is expected (ListenSequentialPacket=)")
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise StartError("a listening socket is expected (Accept=no)")
    return listener


def own_socket(path: Path, *, for_group: bool = False) -> socket.socket:
    """Creates the socket for this user, or also its group; the policy decides who is served. Raises StartError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    old_mask = os.umask(0o117 if for_group else 0o177)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        listener.bind(str(path))
    except OSError as exc:
        listener.close()
        raise StartError(f"cannot listen on {path}: {exc.strerror}") from exc
    finally:
        os.umask(old_mask)
    listener.listen(BACKLOG)
    return listener
