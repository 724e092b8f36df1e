"""Who is at the other end of a Unix socket, according to the kernel; one reader for daemon and clients."""

import socket
import struct

_UCRED = struct.Struct("iII")  # pid, uid, gid; uids go up to 2^32 - 2


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid of the process that connected, listens, or made the pair. Raises OSError."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid
