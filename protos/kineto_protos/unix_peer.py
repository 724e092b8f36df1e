"""Identifies the other end of a Unix socket, and restricts what it may pass; for daemon and clients."""

import contextlib
import socket
import struct

_SO_PASSRIGHTS = 83  # Linux 6.16
_UCRED = struct.Struct("iII")  # pid, uid, gid; uids go up to 2^32 - 2


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid of the process that connected, listens, or made the pair. Raises OSError."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def refuse_descriptors(sock: socket.socket) -> None:
    """Prevents passing descriptors to a socket and those accepted from it; kernels before 6.16 cannot.

    Closing a stranger's descriptor may block, even if it was never received.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
