r"""The sockets on which libkineto's datagrams arrive: an abstract name, or a file in a folder.

Theory of operation
    The abstract name is `\0dynolog\0`: the zero at its end is a part of it. It belongs to a network namespace, and the
    kernel refuses a second socket of that name. Clients there have abstract names as well, and an answer to such a name
    can reach its sender only.

    With KINETO_IPC_SOCKET_DIR the daemon's socket is `<folder>/dynolog`, and the client's a file beside it. The client
    discards answers that do not come from below the folder as it spells it, so the socket is bound by that path. What a
    client calls its address is a path in its own mount namespace, which could mean somebody else's socket in ours, or
    lead there through a symbolic link: so only a socket of the sender's user, directly in the folder, with the name of
    a client, is sent to, by a descriptor that was opened without following links.

    Nobody but root and this daemon's user can replace what lies on the way to such a folder: `checked_folder` refuses
    others. The folder itself must be writable by the clients' users, and then have the sticky bit.
"""

import contextlib
import errno
import os
import re
import socket
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kinetod.base.unix_sockets import remove_stale_socket
from kinetod.kineto_ipc.datagrams import MAX_DATAGRAM_BYTES
from kinetod.kineto_ipc.poller_registry import Sender
from kinetod.processes.identity import PROC

NAME = b"\0dynolog\0"
ABSTRACT_IN_PROC = "@dynolog@"  # NAME as /proc/net/unix writes it
FILE_NAME = "dynolog"
_CLIENT = re.compile(r"dynoconfigclient[\w-]{1,64}", re.ASCII)
_MAX_FOLDER_BYTES = 107 - len("/dynoconfigclient") - 36  # a client's path ends in a UUID, and has to fit sun_path
_UCRED = struct.Struct("iII")
_TIMESPEC = struct.Struct("@ll")
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; of a message, too
# No room for descriptors: the kernel drops those.
_ANCILLARY_SPACE = socket.CMSG_SPACE(_UCRED.size) + socket.CMSG_SPACE(_TIMESPEC.size)


class NameTaken(OSError):
    """Another process has a socket of this name."""


class FolderRefused(OSError):
    """The folder is not safe, or not there. The text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Datagram:
    """One datagram as it arrived. sender.pid: 0 if the kernel cannot name it in this PID namespace. whole: whether it
    is not longer than the longest that is taken. sent_ns: when the kernel took it, in Unix time; 0 if it does not say.
    """

    content: bytes
    sender: Sender
    whole: bool
    sent_ns: int = 0

    def age_ns(self) -> int:
        """How long ago it was sent."""
        return time.time_ns() - self.sent_ns if self.sent_ns else 0


class PollSocket(Protocol):
    """A socket that libkineto's datagrams arrive on."""

    def fileno(self) -> int:
        """Its descriptor."""

    def receive(self) -> Datagram | None:
        """The next datagram; None: there is none. Raises OSError."""

    def can_answer(self, sender: Sender) -> bool:
        """Whether the sender has an address that an answer may go to."""

    def send(self, answer: bytes, sender: Sender) -> bool:
        """Whether the answer was sent. Never waits."""

    def close(self) -> None:
        """Removes the name and closes the socket."""


class AbstractSocket:
    """The abstract name, in the network namespace in which `sock` was made."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        """Its descriptor."""
        return self._sock.fileno()

    def receive(self) -> Datagram | None:
        """The next datagram; None: there is none. Raises OSError."""
        return _receive(self._sock)

    def can_answer(self, sender: Sender) -> bool:
        """Whether the sender has an abstract name."""
        return isinstance(sender.address, bytes) and sender.address.startswith(b"\0")

    def send(self, answer: bytes, sender: Sender) -> bool:
        """Whether the answer was sent. Never waits."""
        with contextlib.suppress(OSError):
            self._sock.sendto(answer, socket.MSG_DONTWAIT, sender.address)
            return True
        return False

    def close(self) -> None:
        """Closes the socket; its name is free then."""
        self._sock.close()


class FolderSocket:
    """The socket in a folder. Making it raises NameTaken, FolderRefused, OSError; StartError for what is not a
    datagram socket.
    """

    def __init__(self, folder: Path) -> None:
        checked_folder(folder)
        self._prefix = f"{folder}/"
        path = folder / FILE_NAME
        if _has_owner(path):
            raise NameTaken(errno.EADDRINUSE, f"another process has the socket {path}")
        remove_stale_socket(path)
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._sock = unbound_socket()
        try:
            self._sock.bind(str(path))
            self._file = self._opened()
        except BaseException:
            self._sock.close()
            os.close(self._folder)
            raise

    def _opened(self) -> tuple[int, int]:
        """Opens the socket to everybody; returns device and inode of its file."""
        file = os.open(FILE_NAME, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            Path(f"/proc/self/fd/{file}").chmod(0o666)
            found = os.fstat(file)
            return found.st_dev, found.st_ino
        finally:
            os.close(file)

    def fileno(self) -> int:
        """Its descriptor."""
        return self._sock.fileno()

    def receive(self) -> Datagram | None:
        """The next datagram; None: there is none. Raises OSError."""
        return _receive(self._sock)

    def can_answer(self, sender: Sender) -> bool:
        """Whether the sender's address is a client's, directly in the folder."""
        address = sender.address
        return (
            isinstance(address, str)
            and address.startswith(self._prefix)
            and _CLIENT.fullmatch(address, len(self._prefix)) is not None
        )

    def send(self, answer: bytes, sender: Sender) -> bool:
        """Whether the answer was sent, to a socket of the sender's user. Never waits."""
        with contextlib.suppress(OSError):
            name = str(sender.address)[len(self._prefix) :]
            file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                found = os.fstat(file)
                if stat.S_ISSOCK(found.st_mode) and found.st_uid == sender.uid:
                    self._sock.sendto(answer, socket.MSG_DONTWAIT, f"/proc/self/fd/{file}")
                    return True
            finally:
                os.close(file)
        return False

    def is_there(self) -> bool:
        """Whether the file still is this socket's: somebody may have removed it."""
        with contextlib.suppress(OSError):
            found = os.stat(FILE_NAME, dir_fd=self._folder, follow_symlinks=False)
            return (found.st_dev, found.st_ino) == self._file
        return False

    def close(self) -> None:
        """Removes the file, if it still is this socket's, and closes the socket."""
        with contextlib.suppress(OSError):
            if self.is_there():
                os.unlink(FILE_NAME, dir_fd=self._folder)
        self._sock.close()
        os.close(self._folder)


def _has_owner(path: Path) -> bool:
    """Whether a process receives at this socket."""
    with unbound_socket() as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False


def unbound_socket() -> socket.socket:
    """A socket of the kind that clients send to; each datagram brings its sender's credentials and its time."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with contextlib.suppress(OSError):  # gVisor has no times
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return sock


def queue_length(proc: Path = PROC) -> int:
    """How many datagrams the kernel keeps for a socket that is made now in this network namespace; 0: unknown."""
    with contextlib.suppress(OSError, ValueError):
        return int((proc / "sys/net/unix/max_dgram_qlen").read_text())
    return 0


def bound_socket(name: bytes = NAME) -> socket.socket:
    """A socket with an abstract name, in this thread's network namespace. Raises NameTaken, OSError."""
    sock = unbound_socket()
    try:
        sock.bind(name)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise NameTaken(exc.errno, "another process has the abstract socket @dynolog") from exc
        raise
    return sock


def checked_folder(folder: Path) -> None:
    """Raises FolderRefused if anybody but root and this user could replace the folder, or the socket in it.

    Likewise if it is not there, or its path is too long.
    """
    if (length := len(os.fsencode(folder))) > _MAX_FOLDER_BYTES:
        raise FolderRefused(
            errno.ENAMETOOLONG,
            f"{folder}: a path of {length} characters leaves no room for the names of libkineto's sockets; use one of "
            f"at most {_MAX_FOLDER_BYTES}",
        )
    for path in (*reversed(folder.parents), folder):
        _check_step(path)
    real = folder.resolve()
    for path in (*reversed(real.parents), real):
        _check_step(path)


def _check_step(path: Path) -> None:
    try:
        found = path.lstat()
    except OSError as exc:
        raise FolderRefused(
            exc.errno, f"{path}: {exc.strerror}; create it, or remove it from dynolog.socket_dirs"
        ) from exc
    trusted = found.st_uid in (0, os.geteuid())
    if not trusted:
        raise FolderRefused(
            errno.EPERM,
            f"{path} belongs to uid {found.st_uid}, who could replace the socket; give it to root or the daemon's user",
        )
    if stat.S_ISLNK(found.st_mode):
        return  # its owner is trusted, and nobody else can replace it: what it leads to is checked as well
    if not stat.S_ISDIR(found.st_mode):
        raise FolderRefused(errno.ENOTDIR, f"{path} is not a folder; remove it from dynolog.socket_dirs")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise FolderRefused(
            errno.EPERM, f"others than its owner can replace the socket in {path}; set the sticky bit: chmod +t {path}"
        )


def _receive(sock: socket.socket) -> Datagram | None:
    try:
        content, ancillary, flags, address = sock.recvmsg(MAX_DATAGRAM_BYTES, _ANCILLARY_SPACE, socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
        return None
    pid, uid, gid, sent_ns = 0, 0, 0, 0
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) == _UCRED.size:
            pid, uid, gid = _UCRED.unpack(data)
        elif level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            sent_ns = seconds * 10**9 + nanoseconds
    return Datagram(content, Sender(pid, uid, gid, address or b""), not flags & socket.MSG_TRUNC, sent_ns)
