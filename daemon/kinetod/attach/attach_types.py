"""The values that the parts of an attach exchange, and the ways in which it can fail.

Theory of operation
    attach_pool.py (in the daemon)  asks a warm helper process for one attach, with a deadline
    attach_worker.py (the process)     inspects the target, refuses it or runs a method, hands back the channel
    a method                    makes the target run the bootstrap: pending_call, native_thread
    bootstrap (in the target)   makes a socketpair, names its ends by a memfd, receives the agent, runs it

    A method ends when the interpreter or the new thread has the code, without waiting for it to run; the channel
    shows whether it ran. So a method may be followed by another with the same bootstrap, whose token makes sure that
    it runs only once. When the channel is there, or the deadline has passed, `finish` is called.
"""

import contextlib
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kinetod.processes import credentials
from kinetod.processes.credentials import REPLACED, Credentials
from kinetod.processes.identity import BOOT_TIME_NS, PROC, ProcessKey, start_time_ns

NEWEST_TRIED = (3, 15)  # of Python
MAX_BOOTSTRAP_BYTES = 3416  # it travels through one page of the target


class AttachCode(StrEnum):
    """Why an attach failed. docs/errors.md documents all codes."""

    NOT_PERMITTED = "ATTACH_NOT_PERMITTED"  # the kernel or the owner rule forbids it
    TRACED = "ATTACH_TRACED"  # another tracer holds it
    # kernel thread, pid 1, zombie, stopped, frozen, uninterruptible, ourselves; or it does not let us in
    UNSUITABLE = "ATTACH_UNSUITABLE"
    UNSUPPORTED = "ATTACH_UNSUPPORTED"  # no interpreter with exported symbols, too old, frozen, 32 bits
    LIMIT = "ATTACH_LIMIT"  # too little memory, address space, threads or descriptors are left to it
    SECCOMP = "ATTACH_SECCOMP"  # its filter forbids a call that we need
    TIMEOUT = "ATTACH_TIMEOUT"  # the interpreter did not run the code in time
    GONE = "ATTACH_GONE"  # it ended meanwhile
    REPLACED = "ATTACH_REPLACED"  # it executed another program, or changed its rights, since the attach was allowed
    FAILED = "ATTACH_FAILED"  # anything else


class AttachError(Exception):
    """The attach failed. `reason` says what happened and what to do next."""

    def __init__(self, code: AttachCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def replaced(pid: int, difference: str) -> AttachError:
    """The error for a process that has changed since it was approved. difference: in which respect."""
    return AttachError(
        AttachCode.REPLACED,
        f"process {pid} has changed since the attach was approved: {REPLACED} or changed its credentials "
        f"({difference}); nothing was traced. Check who owns it now, then try again",
    )


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Code for the target. The token grows with every attach on this machine (Unix ns)."""

    token: int
    source: bytes  # ASCII, for Python 3.9 and later, at most MAX_BOOTSTRAP_BYTES


@dataclass(frozen=True, slots=True)
class Stop:
    """What injecting the code cost the target."""

    tid: int = 0  # 0: no thread was stopped
    stopped_ns: int = 0  # the longest time that a thread stood still
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Attached:
    """How an attach was made, and what it cost."""

    method: str
    stopped_ns: int
    latency_ns: int  # from the request until the bootstrap's channel was there


@dataclass(frozen=True, slots=True)
class Approval:
    """Permission to enter the process while it has these credentials, for an administrator or another user."""

    credentials: Credentials
    administrator: bool = False


class Deadline:
    """A point in monotonic time."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; 0 when it has passed."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s == 0.0


# What an attach may end with because the process has executed another program, whose rights may be others, too.
_BY_ANOTHER_PROGRAM = frozenset(
    {AttachCode.GONE, AttachCode.UNSUITABLE, AttachCode.FAILED, AttachCode.TIMEOUT, AttachCode.NOT_PERMITTED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """One attach. token: of the bootstrap. approved: the credentials that the process must have throughout."""

    key: ProcessKey
    approved: Credentials
    deadline: Deadline
    token: int
    boot_time_ns: int = BOOT_TIME_NS
    received_ns: int = 0  # monotonic

    def check_process(self) -> Credentials:
        """The credentials, including those that only we may read. Raises AttachError if they are not those approved."""
        with contextlib.suppress(OSError):
            found = credentials.read(self.key.pid)
            if start_time_ns(self.key.pid, PROC, boot_time_ns=self.boot_time_ns) == self.key.start_time_ns:
                if difference := self.approved.difference(found):
                    raise replaced(self.key.pid, difference)
                return found
        raise AttachError(AttachCode.GONE, f"process {self.key.pid} has ended; `kinetoctl ps --all` lists the others")

    def explained(self, error: AttachError) -> AttachError:
        """Returns this error, or a better one if the process has been replaced meanwhile."""
        if error.code in _BY_ANOTHER_PROGRAM:
            try:
                self.check_process()
            except AttachError as better:
                return better
        return error


class Helpers(Protocol):
    """Attaches for the daemon: its own helper processes, or the attach helper service."""

    async def start(self) -> None:
        """Starts them. Raises OSError."""

    def pids(self) -> set[int]:
        """The pids of those that are the daemon's own processes."""

    async def attach(self, key: ProcessKey, approval: Approval, *, deadline_s: float) -> tuple[Attached, socket.socket]:
        """Brings the agent into a process. The channel is the caller's. Raises AttachError."""

    async def stop(self) -> None:
        """Frees what they hold."""
