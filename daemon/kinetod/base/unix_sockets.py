"""Unix sockets: packets with descriptors, listening at a path, and removing stale sockets there.

Descriptors of strangers
    Any user can pass any descriptor to a socket that the user can write to, and closing it may block: close(2) of a
    FUSE file waits for its file system, and even the kernel's own close of a descriptor that was never received (recv
    without room for it, close of a socket that has it in its queue) waits for a TCP socket that lingers. Therefore:
    - sockets that need none refuse them (`unix_peer.refuse_descriptors`), as far as the kernel can;
    - a blocked close is interrupted by a signal: `BriefTurns` sends one when a turn of the event loop takes long;
    - anything but a memfd is closed on a thread (`close_strangers`); each user has one such thread at a time.
"""

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import selectors
import signal
import socket
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from kineto_protos import unix_peer

from kinetod.base.errors import StartError

# Our packets carry at most one descriptor; with room for four, additional ones can be closed.
DESCRIPTORS_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)
INTERRUPT_S = 0.01  # into a turn of the loop, and repeatedly until its end
MAX_CLOSING = 64  # users with a thread that closes descriptors
_F_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)

_closing: set[int] = set()


class BriefTurns(selectors.EpollSelector):
    """The selector of the main thread's loop: interrupts a system call that blocks a turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGALRM, lambda *_: None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits as its base does, without interruption."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            return super().select(timeout)
        finally:
            signal.setitimer(signal.ITIMER_REAL, INTERRUPT_S, INTERRUPT_S)

    def close(self) -> None:
        """Ends the interruptions, too."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        super().close()


def is_memfd(fd: int) -> bool:
    """Whether a descriptor is shared memory (memfd, tmpfs, hugetlbfs), which involves nobody's file system."""
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS) >= 0
    except OSError:
        return False


def descriptors_space(uid: int) -> int:
    """Room for descriptors in a packet of this user; 0 while an earlier one does not close."""
    return 0 if uid in _closing else DESCRIPTORS_SPACE


def close_strangers(fds: Sequence[int], uid: int) -> None:
    """Closes a user's descriptors without waiting. Call it on the event loop."""
    slow = [fd for fd in fds if not is_memfd(fd)]
    for fd in set(fds).difference(slow):
        os.close(fd)
    if not slow:
        return

    def close() -> None:
        for fd in slow:
            with contextlib.suppress(OSError):
                os.close(fd)
        _closing.discard(uid)

    _closing.add(uid)  # permanently, if there are too many
    if len(_closing) <= MAX_CLOSING:
        threading.Thread(target=close, name=f"closing for uid {uid}", daemon=True).start()


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


def listen_at(path: Path, kind: int, *, mode: int, backlog: int, takes_descriptors: bool = True) -> socket.socket:
    """A non-blocking socket with this mode, whatever the umask; a stale one makes room. Raises StartError."""
    remove_stale_socket(path)
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    if not takes_descriptors:
        unix_peer.refuse_descriptors(sock)
    old_mask = os.umask(0o777 & ~mode)
    try:
        sock.bind(str(path))
        sock.listen(backlog)
    except OSError as exc:
        sock.close()
        raise StartError(f"cannot listen on {path}: {exc.strerror}; is it in use?") from exc
    finally:
        os.umask(old_mask)
    return sock


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
                raise StartError(f"cannot check whether {path} is in use: {exc.strerror or exc}") from exc
            raise StartError(f"something is already listening on {path}; stop it or choose another path")
    path.unlink(missing_ok=True)
