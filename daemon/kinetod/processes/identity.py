"""Identifies the process at the other end of a socket: kernel credentials, start time, a handle that shows its death.

An agent's own statements about itself are never used here. A pid alone is no identity (numbers are reused): together
with the start time it is, and a pidfd keeps pointing at the same process whatever happens to the number.

`ProcessFolder` is a process's folder in /proc, opened once: it always reads that process, even if its number is reused.
One descriptor and plain calls instead of paths: every list of processes reads ten files of each.
"""

import array
import contextlib
import fcntl
import os
import signal
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kineto_protos import unix_peer

_CHUNK_BYTES = 64 << 10
PROC = Path("/proc")
_SO_PEERPIDFD = 77  # Linux 6.5
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_STAT_START_TIME = 19  # index in /proc/PID/stat after the name: field 22 in proc(5)
_STAT_FLAGS = 6  # field 9
_PF_EXITING = 0x4
_STAT_EXIT_CODE = 49  # field 52; zombies only
# Linux 6.13 and 6.15: struct pidfd_info, _IOWR(0xFF, 11, 64 bytes); the exit code is kept once reaped
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_BYTES = 64
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_EXIT_CODE_OFFSET = 60


def lines(content: bytes) -> list[str]:
    r"""Splits a file of /proc that contains foreign names (of processes, files, control groups) into lines.

    The kernel escapes only \n in them. str.splitlines, and files opened as text, also end lines at \r, \f and others: a
    process could choose a name that adds lines of its own, and pretend to be of any user, job or pod.
    """
    return content.decode("utf-8", "replace").split("\n")


def text_of(path: Path) -> str:
    """The text of a file in /proc or /sys; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class ProcessFolder:
    """Every method raises OSError if the process is gone or the kernel refuses. Blocking."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self.pid = pid
        self._kept: dict[str, bytes] = {}
        self._fd = os.open(f"{proc}/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the descriptor."""
        os.close(self._fd)

    def open(self, name: str) -> int:
        """Opens a file for reading; the caller owns the descriptor."""
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)

    def read(self, name: str) -> bytes:
        """Reads a whole file."""
        fd = self.open(name)
        try:
            parts = []
            while part := os.read(fd, _CHUNK_BYTES):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def read_once(self, name: str) -> bytes:
        """Reads a whole file once; later calls return the same content."""
        if name not in self._kept:
            self._kept[name] = self.read(name)
        return self._kept[name]

    def link(self, name: str) -> str:
        """The target of a link."""
        return os.readlink(name, dir_fd=self._fd)

    def owner(self, name: str) -> int:
        """The user who owns a file."""
        return os.stat(name, dir_fd=self._fd).st_uid

    def entries(self, name: str) -> list[str]:
        """The names in a folder."""
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.listdir(fd)  # noqa: PTH208 - of a descriptor
        finally:
            os.close(fd)

    def links(self, name: str) -> list[str]:
        """The targets of the links in a folder, without links that have disappeared."""
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            found = []
            for entry in os.listdir(fd):  # noqa: PTH208 - of a descriptor
                try:
                    found.append(os.readlink(entry, dir_fd=fd))
                except OSError:
                    continue
            return found
        finally:
            os.close(fd)


class Unidentified(Exception):
    """The peer cannot be distinguished from others; it gets no service."""


@dataclass(frozen=True, slots=True, order=True)
class ProcessKey:
    """One process, never another that gets the same number later. Unix nanoseconds."""

    pid: int
    start_time_ns: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start_time_ns}"


@dataclass(slots=True, eq=False)
class Identity:
    """A peer as the kernel knows it. pidfd is None where the kernel has none (gVisor), and once it is closed."""

    key: ProcessKey
    uid: int
    gid: int
    pidfd: int | None

    @property
    def pid(self) -> int:
        """The pid in the daemon's PID namespace."""
        return self.key.pid

    def alive(self, proc: Path = PROC) -> bool:
        """Whether the process still exists, is no zombie and not on its way out (then it has closed its files).

        Its main thread may have ended before the others.
        """
        with contextlib.suppress(OSError, ValueError, IndexError):
            tasks = proc / str(self.pid) / "task"
            runs = _runs(self.pid, proc) or any(_runs(int(task.name), tasks) for task in tasks.iterdir())
            return runs and start_time_ns(self.pid, proc) == self.key.start_time_ns
        return False

    def close(self) -> None:
        """Frees the pidfd. Does nothing the second time: its number may be another descriptor's by then."""
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)


def _boot_time_ns(proc: Path = PROC) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "stat").read_text().splitlines():
            if line.startswith("btime "):
                return int(line.split()[1]) * 10**9
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


BOOT_TIME_NS = _boot_time_ns()  # read once: the kernel's value moves when the clock is set


def _stat_fields(pid: int, proc: Path = PROC) -> list[str]:
    """The fields of /proc/PID/stat after the process name, which may contain anything."""
    return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _runs(tid: int, folder: Path) -> bool:
    """Whether a thread is neither dead nor on its way out."""
    with contextlib.suppress(OSError):
        stat = _stat_fields(tid, folder)
        return stat[0] not in ("Z", "X") and not int(stat[_STAT_FLAGS]) & _PF_EXITING
    return False


def start_time_ns(pid: int, proc: Path = PROC, *, boot_time_ns: int = BOOT_TIME_NS) -> int:
    """Start of a process in Unix ns, the same value throughout the daemon's life. Raises OSError if it is gone.

    A helper process uses the daemon's `boot_time_ns`, so that both compute the same value.
    """
    try:
        ticks = int(_stat_fields(pid, proc)[_STAT_START_TIME])
    except (IndexError, ValueError) as exc:
        raise ProcessLookupError(f"/proc/{pid}/stat cannot be read") from exc
    return started_ns(ticks, boot_time_ns=boot_time_ns)


def started_ns(ticks: int, *, boot_time_ns: int = BOOT_TIME_NS) -> int:
    """Unix nanoseconds, from the kernel's field 22 of /proc/PID/stat."""
    return boot_time_ns + ticks * 10**9 // _CLOCK_TICKS


def identify(sock: socket.socket, proc: Path = PROC) -> Identity:
    """Identifies the process that connected. Raises Unidentified."""
    pid, uid, gid = unix_peer.credentials(sock)
    if pid <= 0:
        raise Unidentified("the peer is not visible in this PID namespace; run the daemon in the host's (hostPID)")
    pidfd = _peer_pidfd(sock, pid)
    try:
        key = ProcessKey(pid, start_time_ns(pid, proc))
    except OSError as exc:
        if pidfd is not None:
            os.close(pidfd)
        raise Unidentified(f"process {pid} ended right after connecting") from exc
    return Identity(key, uid, gid, pidfd)


def identity_of(key: ProcessKey, proc: Path = PROC) -> Identity:
    """Identifies a process for which one of our own processes is the peer of a socket. Raises Unidentified."""
    pidfd: int | None = None
    try:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(key.pid)
        ids = {}
        for line in lines((proc / str(key.pid) / "status").read_bytes()):
            name, _, values = line.partition(":")
            if name in ("Uid", "Gid"):
                ids[name] = int(values.split()[1])  # the effective one
        if start_time_ns(key.pid, proc) != key.start_time_ns:
            raise ProcessLookupError("its pid was reused")
        return Identity(key, ids["Uid"], ids["Gid"], pidfd)
    except (OSError, ValueError, IndexError, KeyError) as exc:
        if pidfd is not None:
            os.close(pidfd)
        raise Unidentified(f"process {key.pid} has ended") from exc


def _peer_pidfd(sock: socket.socket, pid: int) -> int | None:
    try:
        pidfd: int = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return _opened_pidfd(sock, pid)
    os.set_inheritable(pidfd, False)
    return pidfd


def _opened_pidfd(sock: socket.socket, pid: int) -> int | None:
    """For kernels before 6.5. The peer still holds its end afterwards, so the number was not reused in between."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        hung_up = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        hung_up = False
    except OSError:
        hung_up = True
    if hung_up:
        os.close(pidfd)
        raise Unidentified(f"process {pid} hung up right after connecting")
    return pidfd


def how_it_ended(identity: Identity, proc: Path = PROC) -> str:
    """How a process ended, for people: "it was killed by SIGKILL"; empty if not known (yet)."""
    status = _exit_status_of_pidfd(identity.pidfd)
    if status is None:
        status = _exit_status_of_zombie(identity, proc)
    if status is None:  # its parent may have waited for it in between: from then on the pidfd knows
        status = _exit_status_of_pidfd(identity.pidfd)
    if status is None:
        return ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(number).name}"
        return f"it was killed by signal {number}"
    return f"it exited with status {os.WEXITSTATUS(status)}"


def _exit_status_of_pidfd(pidfd: int | None) -> int | None:
    if pidfd is None:
        return None
    info = array.array("B", bytes(_PIDFD_INFO_BYTES))
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info, True)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info, 0)
    (status,) = struct.unpack_from("=i", info, _PIDFD_INFO_EXIT_CODE_OFFSET)
    return status if mask & _PIDFD_INFO_EXIT else None


def _exit_status_of_zombie(identity: Identity, proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = _stat_fields(identity.pid, proc)
        same = start_time_ns(identity.pid, proc) == identity.key.start_time_ns
        status = int(stat[_STAT_EXIT_CODE])
        # If we may not trace the process, the kernel always says 0.
        if same and stat[0] == "Z" and (status or os.geteuid() in (0, identity.uid)):
            return status
    return None
