"""Connects to a helper service, for the front end."""

import asyncio
import os
import socket
from pathlib import Path

from kineto_protos import unix_peer

_QUEUE_PAUSE_S = 0.02


class NotOurService(OSError):
    """Somebody else listens. uid: who."""

    def __init__(self, uid: int) -> None:
        super().__init__(f"the socket belongs to uid {uid}, neither root nor the daemon's own user")
        self.uid = uid


async def connected(path: Path) -> socket.socket:
    """A non-blocking connection to the service at `path`, which must be root's or our own user's (SO_PEERCRED).

    A Unix socket connects at once, or not at all while the other side's queue is full (EAGAIN), which asyncio would
    take for connected; that is waited for. Raises OSError, NotOurService.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                sock.connect(str(path))
                break
            except BlockingIOError:
                await asyncio.sleep(_QUEUE_PAUSE_S)
        _pid, uid, _gid = unix_peer.credentials(sock)
        if uid not in (0, os.geteuid()):
            raise NotOurService(uid)
    except BaseException:
        sock.close()
        raise
    return sock
