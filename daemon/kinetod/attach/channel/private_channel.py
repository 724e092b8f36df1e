"""Finds the private channel that a bootstrap opens, and takes our end of it.

Theory of operation
    The bootstrap makes a socket pair and a memfd called `kineto-<token>-<descriptor>`: that descriptor of the target
    is our end. The names are visible in /proc/PID/fd, and pidfd_getfd (Linux 5.6) copies the descriptor. No path, port
    or namespace is needed.

    Nothing announces the memfd, so /proc/PID/fd is polled, at first every 0.2 ms, later less often. Each poll checks
    new descriptors; every few polls check all of them, since numbers are reused.

    A descriptor is accepted only if it is such a socket, created by that process while it belonged to the approved
    user. An execve closes the target's end.
"""

import contextlib
import ctypes
import errno
import os
import select
import socket
import time

from kineto_protos import unix_peer

from kinetod.attach.attach_types import AttachCode, AttachError, Deadline, replaced
from kinetod.base.libc import LIBC
from kinetod.processes.credentials import Credentials

_PIDFD_GETFD = 438  # the same on every architecture
_FIRST_PAUSE_S = 0.0002
_PAUSE_GROWTH = 1.3
_LAST_PAUSE_S = 0.01
_FULL_LOOK_EVERY = 8
_DENIED = (errno.EPERM, errno.EACCES)
_ENDED = (errno.ESRCH, errno.ENOENT)


def await_channel(
    pid: int, token: int, deadline: Deadline, approved: Credentials | None = None
) -> socket.socket | None:
    """Returns our end of this bootstrap's channel, a SOCK_SEQPACKET socket; None if the deadline passes first.

    approved: the user that must own it according to the kernel; None: anybody. Looks once even if the deadline has
    passed.
    Raises AttachError: NOT_PERMITTED, GONE, UNSUPPORTED (the kernel has no pidfd_getfd), REPLACED (another user's) or
    FAILED (the descriptor is not a channel).
    """
    process = _open_process(pid)
    try:
        channel = _await(process, pid, f"/memfd:kineto-{token}-", deadline)
    finally:
        os.close(process)
    if channel is not None and approved is not None:
        _pid, uid, gid = _peer(channel)
        if (uid, gid) != (approved.uid, approved.gid):
            let_go(channel)
            raise replaced(pid, f"its channel was created by uid {uid}, gid {gid}")
    return channel


def let_go(channel: socket.socket) -> None:
    """Shuts the channel down and closes it. The target may hold our end, too: closing alone would leave its end
    waiting.
    """
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_WR)
    channel.close()


def _await(process: int, pid: int, prefix: str, deadline: Deadline) -> socket.socket | None:
    seen: set[str] = set()
    pause_s, looks = _FIRST_PAUSE_S, 0
    while True:
        if looks % _FULL_LOOK_EVERY == 0:
            seen.clear()
        number = _find(pid, prefix, seen)
        if number is not None:
            return _checked(take_descriptor(process, pid, number), pid)
        if deadline.passed:
            return None
        _check_alive(process, pid)
        time.sleep(min(pause_s, max(deadline.left_s, _FIRST_PAUSE_S)))
        pause_s = min(pause_s * _PAUSE_GROWTH, _LAST_PAUSE_S)
        looks += 1


def _open_process(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as exc:
        if exc.errno == errno.ESRCH:
            raise _gone(pid) from exc
        raise AttachError(AttachCode.FAILED, f"pidfd_open of process {pid}: {exc}") from exc


def _check_alive(process: int, pid: int) -> None:
    poller = select.poll()
    poller.register(process, select.POLLIN)
    if poller.poll(0):
        raise _gone(pid)


def _find(pid: int, prefix: str, seen: set[str]) -> int | None:
    """Returns the number in the memfd's name. `seen`: descriptors to skip."""
    folder = f"/proc/{pid}/fd"
    try:
        for entry in os.listdir(folder):  # noqa: PTH208 - looked at every 0.2 ms
            if entry in seen:
                continue
            seen.add(entry)
            try:
                name = os.readlink(f"{folder}/{entry}")  # noqa: PTH115
            except FileNotFoundError:  # it has been closed by now
                continue
            number = name.removeprefix(prefix).partition(" ")[0]
            if name.startswith(prefix) and number.isascii() and number.isdigit() and len(number) < 10:
                return int(number)
    except OSError as exc:
        raise _translated(exc, pid, f"{folder} cannot be read") from exc
    return None


def take_descriptor(process: int, pid: int, number: int) -> int:
    """Copies that descriptor of the process with this pidfd. Raises AttachError."""
    descriptor: int = LIBC.syscall(_PIDFD_GETFD, process, number, 0)
    if descriptor < 0:
        exc = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        raise _translated(exc, pid, f"its descriptor {number} cannot be copied with pidfd_getfd")
    return descriptor


def _checked(descriptor: int, pid: int) -> socket.socket:
    try:
        channel = socket.socket(fileno=descriptor)
    except OSError as exc:
        os.close(descriptor)
        raise AttachError(AttachCode.FAILED, f"process {pid} offers a channel that is not a socket: {exc}") from exc
    owner = 0
    if channel.family == socket.AF_UNIX:
        owner = _peer(channel)[0]
    if channel.type != socket.SOCK_SEQPACKET or owner != pid:
        channel.close()
        reason = f"process {pid} offers a channel that is not its own (created by process {owner})"
        raise AttachError(AttachCode.FAILED, reason)
    return channel


def _peer(channel: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid of the creator of the pair."""
    pid, uid, gid = unix_peer.credentials(channel)
    return pid, uid, gid


def _translated(exc: OSError, pid: int, what: str) -> AttachError:
    if exc.errno in _ENDED:
        return _gone(pid)
    if exc.errno in _DENIED:
        reason = f"process {pid}: {what} ({exc.strerror}): run kinetod as root or as the owner of the process"
        return AttachError(AttachCode.NOT_PERMITTED, reason)
    if exc.errno == errno.EBADF:
        return closed_by_the_program(pid)
    if exc.errno == errno.ENOSYS:
        return AttachError(AttachCode.UNSUPPORTED, f"process {pid}: {what}: Linux 5.6 or later is needed")
    return AttachError(AttachCode.FAILED, f"process {pid}: {what}: {exc}")


def closed_by_the_program(pid: int) -> AttachError:
    """Error for a channel that the program closed before the agent could be sent."""
    reason = (
        f"process {pid} closed the agent's channel before the agent could be sent: it closes descriptors that "
        "it did not open (as daemonizing programs do); try again"
    )
    return AttachError(AttachCode.UNSUITABLE, reason)


def _gone(pid: int) -> AttachError:
    return AttachError(AttachCode.GONE, f"process {pid} has ended")
