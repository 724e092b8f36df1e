r"""The sockets on which libkineto's datagrams arrive: an abstract name, or a file in a folder.

Theory of operation
    The abstract name is `\0dynolog\0`, including the zero at its end. It belongs to a network namespace, and the kernel
    refuses a second socket of that name. Its clients have abstract names as well, so an answer can reach only its
    sender.

    With KINETO_IPC_SOCKET_DIR the daemon's socket is `<folder>/dynolog`, and the client's a file beside it. The client
    discards answers that do not come from below the folder as it spells it, so the socket is bound by that path. A
    client's address is a path in its own mount namespace, which could be somebody else's socket in ours, or lead to one
    through a symbolic link: so answers go only to a socket of the sender's user, directly in the folder, with a
    client's name, through a descriptor opened without following links.

    Only root and this daemon's user may be able to replace parts of the path to such a folder: `checked_folder` refuses
    others. The folder itself must be writable by the clients' users, and then have the sticky bit.

    `holder` finds the process that has a name already: the one to stop so that this daemon can answer polls.
    /proc/net/unix leads from the name to the socket's inode, and processes' descriptors from there to the process. A
    daemon without rights over other users' processes cannot read those; it then guesses a process called dynolog.
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

from kineto_protos import unix_peer

from kinetod.base.safe_text import clean
from kinetod.base.unix_sockets import remove_stale_socket
from kinetod.processes.identity import PROC, lines

Address = bytes | str  # as returned by recvmsg: bytes of an abstract name, text of a path
MAX_DATAGRAM_BYTES = 4096
NAME = b"\0dynolog\0"
ABSTRACT_IN_PROC = "@dynolog@"  # NAME as /proc/net/unix writes it
FILE_NAME = "dynolog"
_CLIENT = re.compile(r"dynoconfigclient[\w-]{1,64}", re.ASCII)
_MAX_FOLDER_BYTES = 107 - len("/dynoconfigclient") - 36  # a client's path ends in a UUID, and must fit into sun_path
_UCRED = struct.Struct("iII")
_TIMESPEC = struct.Struct("@ll")
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; of a message, too
# No room for descriptors: the kernel drops those.
_ANCILLARY_SPACE = socket.CMSG_SPACE(_UCRED.size) + socket.CMSG_SPACE(_TIMESPEC.size)
DYNOLOG = "dynolog"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_INODE, _PATH = 6, 7  # columns of /proc/net/unix


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has the socket. guessed: only its name suggests that."""

    pid: int
    name: str
    guessed: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name}{', judging by its name' if self.guessed else ''})"


def holder(name: str, proc: Path = PROC, *, seen_by: str = "self") -> Holder | None:
    """The process that has the socket; None if it cannot be found. Blocking.

    name: a path, or an abstract name with @ for each zero, as in /proc/net/unix. seen_by: a pid in its network
    namespace.
    """
    with contextlib.suppress(OSError):
        inodes = _inodes(name, proc / seen_by)
        folders = [folder for folder in proc.iterdir() if folder.name.isdecimal()]
        for folder in folders:
            if _has(folder, inodes):
                return Holder(int(folder.name), _name(folder))
        for folder in folders:
            if _name(folder) == DYNOLOG:
                return Holder(int(folder.name), DYNOLOG, guessed=True)
    return None


def _inodes(name: str, folder: Path) -> set[str]:
    found = set()
    for line in lines((folder / "net/unix").read_bytes())[1:]:
        columns = line.split(None, _PATH)
        if len(columns) > _PATH and columns[_PATH] == name:
            found.add(columns[_INODE])
    return found


def _has(folder: Path, inodes: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                match = _SOCKET.fullmatch(str(descriptor.readlink()))
                if match and match[1] in inodes:
                    return True
    return False


def _name(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return clean((folder / "comm").read_text(errors="replace").rstrip("\n"), 32)
    return ""


class NameTaken(OSError):
    """Another process has a socket of this name."""


class FolderRefused(OSError):
    """The folder is unsafe or missing. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a datagram: the kernel's credentials (real ids), and its address."""

    pid: int
    uid: int
    gid: int
    address: Address


@dataclass(frozen=True, slots=True)
class Datagram:
    """One datagram as received. sender.pid: 0 if the kernel cannot name it in this PID namespace. whole: whether it
    fits into the longest accepted size. sent_ns: when the kernel accepted it, in Unix time; 0 if unknown.
    """

    content: bytes
    sender: Sender
    whole: bool
    sent_ns: int = 0

    def age_ns(self) -> int:
        """Time since it was sent."""
        return time.time_ns() - self.sent_ns if self.sent_ns else 0


class PollSocket(Protocol):
    """A socket that libkineto's datagrams arrive on."""

    def fileno(self) -> int:
        """Its descriptor."""

    def receive(self) -> Datagram | None:
        """Returns the next datagram; None: there is none. Raises OSError."""

    def can_answer(self, sender: Sender) -> bool:
        """Whether the sender has an address that an answer may go to."""

    def send(self, answer: bytes, sender: Sender) -> bool:
        """Sends an answer without waiting; returns whether it was sent."""

    def close(self) -> None:
        """Removes the name and closes the socket."""


class AbstractSocket:
    """The abstract name, in the network namespace where `sock` was created."""

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
        """Sends an answer without waiting; returns whether it was sent."""
        with contextlib.suppress(OSError):
            self._sock.sendto(answer, socket.MSG_DONTWAIT, sender.address)
            return True
        return False

    def close(self) -> None:
        """Closes the socket, which frees its name."""
        self._sock.close()


class FolderSocket:
    """A socket in a folder. The constructor raises NameTaken, FolderRefused, OSError, and StartError for a path that is
    not a datagram socket.
    """

    def __init__(self, folder: Path) -> None:
        checked_folder(folder)
        self._prefix = f"{folder}/"
        path = folder / FILE_NAME
        if _has_owner(path):
            raise NameTaken(errno.EADDRINUSE, f"another process is using the socket {path}")
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
        """Sends an answer to a socket of the sender's user, without waiting; returns whether it was sent."""
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
        """Whether the file still belongs to this socket: it may have been removed."""
        with contextlib.suppress(OSError):
            found = os.stat(FILE_NAME, dir_fd=self._folder, follow_symlinks=False)
            return (found.st_dev, found.st_ino) == self._file
        return False

    def close(self) -> None:
        """Removes the file, if it still belongs to this socket, and closes the socket."""
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
    """A socket of the kind that clients send to; each datagram carries its sender's credentials and its time."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    unix_peer.refuse_descriptors(sock)
    with contextlib.suppress(OSError):  # gVisor does not support times
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return sock


def queue_length(proc: Path = PROC) -> int:
    """How many datagrams the kernel queues for a new socket in this network namespace; 0: unknown."""
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
            raise NameTaken(exc.errno, "another process is using the abstract socket @dynolog") from exc
        raise
    return sock


def checked_folder(folder: Path) -> None:
    """Raises FolderRefused if anybody but root and this user could replace the folder, or the socket in it."""
    if (length := len(os.fsencode(folder))) > _MAX_FOLDER_BYTES:
        raise FolderRefused(
            errno.ENAMETOOLONG,
            f"{folder}: a path of {length} characters leaves no room for the names of libkineto's sockets; use "
            f"one of at most {_MAX_FOLDER_BYTES} characters",
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
            f"{path} belongs to uid {found.st_uid}, who could replace the socket; chown it to root or to the daemon's "
            "user",
        )
    if stat.S_ISLNK(found.st_mode):
        return  # its owner is trusted, and nobody else can replace it: its target is checked as well
    if not stat.S_ISDIR(found.st_mode):
        raise FolderRefused(errno.ENOTDIR, f"{path} is not a folder; remove it from dynolog.socket_dirs")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise FolderRefused(
            errno.EPERM,
            f"users other than the owner of {path} can replace the socket in it; set the sticky bit: chmod +t {path}",
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
