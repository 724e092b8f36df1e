"""Unix sockets: packets with descriptors, and sockets left behind in the file system."""

import array
import asyncio
import errno
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from kinetod.base.errors import StartError

# Our packets carry one descriptor at most; with room for four, those that come on top can be closed.
DESCRIPTORS_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)


def descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a packet by SCM_RIGHTS. The caller owns them."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


async def receive(sock: socket.socket, max_bytes: int, max_fds: int = 4) -> tuple[bytes, list[int]]:
    """Waits for one packet of a non-blocking socket. The caller owns the descriptors. Raises OSError."""
    space = socket.CMSG_SPACE(max_fds * array.array("i").itemsize)
    loop = asyncio.get_running_loop()
    while True:
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC  # socket.recv_fds takes no flags
            data, ancillary, _, _ = sock.recvmsg(max_bytes, space, flags)
            return data, descriptors(ancillary)
        except BlockingIOError:
            readable = asyncio.Event()
            loop.add_reader(sock, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(sock)


async def send(sock: socket.socket, packet: bytes, fds: list[int], deadline_s: float) -> None:
    """Sends a packet with descriptors on a non-blocking socket. Raises OSError, TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                socket.send_fds(sock, [packet], fds, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                writable = asyncio.Event()
                loop.add_writer(sock, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(sock)


def remove_stale_socket(path: Path) -> None:
    """Removes a socket that nobody has open. Raises StartError if somebody has, or if it is not a socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"{path} exists but is not a socket; move it away or choose another path")
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(path))
            except OSError as exc:
                if exc.errno == errno.EPROTOTYPE:
                    continue
                if exc.errno in (errno.ECONNREFUSED, errno.ENOENT):
                    break
                raise StartError(f"{path} cannot be checked: {exc.strerror}") from exc
            raise StartError(f"something already listens on {path}; stop it or choose another path")
    path.unlink(missing_ok=True)
