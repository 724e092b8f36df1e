"""Values that the parts of an attach exchange, and the errors with which an attach can fail.

Theory of operation
    attach_pool.py (in the daemon)  asks a warm helper process for one attach, with a deadline
    attach_worker.py (the process)     inspects the target, refuses it or runs a method, hands back the channel
    a method                    makes the target run the bootstrap: pending_call, native_thread
    bootstrap (in the target)   makes a socketpair, names its ends by a memfd, receives the agent, runs it

    A method ends when the interpreter or the new thread has the code, without waiting for it to run; the channel
    shows whether it ran. So another method may be tried with the same bootstrap, whose token makes sure that it runs
    only once. `finish` is called once the channel is open or the deadline has passed.
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

NEWEST_TRIED = (3, 15)  # Python version
MAX_BOOTSTRAP_BYTES = 3040  # it must fit into one page of the target
# how often, and how long apart, to look at the rights of a process that could not be entered
_LOOKS, _LOOK_S = 50, 0.002


class AttachCode(StrEnum):
    """Why an attach failed. docs/errors.md documents all codes."""

    NOT_PERMITTED = "ATTACH_NOT_PERMITTED"  # the kernel or the owner rule forbids it
    TRACED = "ATTACH_TRACED"  # another tracer holds it
    # kernel thread, pid 1, zombie, stopped, frozen, uninterruptible, ourselves; or access is refused
    UNSUITABLE = "ATTACH_UNSUITABLE"
    UNSUPPORTED = "ATTACH_UNSUPPORTED"  # no interpreter with exported symbols, too old, frozen, 32 bits
    LIMIT = "ATTACH_LIMIT"  # too little memory, address space, threads or descriptors left
    SECCOMP = "ATTACH_SECCOMP"  # its filter forbids a call that we need
    TIMEOUT = "ATTACH_TIMEOUT"  # the interpreter did not run the code in time
    GONE = "ATTACH_GONE"  # it ended during the attach
    # since the attach was approved, it has executed another program or changed its credentials
    REPLACED = "ATTACH_REPLACED"
    FAILED = "ATTACH_FAILED"  # anything else


_BY_CHANCE = frozenset({AttachCode.UNSUITABLE, AttachCode.UNSUPPORTED, AttachCode.FAILED})


class AttachError(Exception):
    """The attach failed. `reason` says why and what to do next."""

    def __init__(self, code: AttachCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def replaced(pid: int, difference: str) -> AttachError:
    """Error for a process that has changed since it was approved. difference: what changed, for logs only."""
    respect = f" ({difference})" if difference else ""
    return AttachError(
        AttachCode.REPLACED,
        f"process {pid} has changed since the attach was approved: {REPLACED} or changed its credentials{respect}; "
        "nothing was traced. Check who owns it now, then try again",
    )


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Code to run in the target. Tokens (Unix ns) grow with every attach on this machine."""

    token: int
    source: bytes  # ASCII, for Python 3.9 and later, at most MAX_BOOTSTRAP_BYTES


@dataclass(frozen=True, slots=True)
class Stop:
    """What the injection cost the target."""

    tid: int = 0  # 0: no thread was stopped
    stopped_ns: int = 0  # longest time that a thread was stopped
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Attached:
    """How the agent was attached, and at what cost."""

    method: str
    stopped_ns: int
    latency_ns: int  # from the request until the bootstrap's channel was open


@dataclass(frozen=True, slots=True)
class Approval:
    """Permission for an administrator or another user to enter the process while it has these credentials."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """One attach."""

    key: ProcessKey
    approved: Credentials
    deadline: Deadline
    token: int
    boot_time_ns: int = BOOT_TIME_NS
    received_ns: int = 0  # monotonic

    def check_process(self) -> Credentials:
        """Returns the credentials, including fields that only we can read. Raises AttachError if they are not those
        approved.
        """
        with contextlib.suppress(OSError):
            found = credentials.read(self.key.pid)
            if start_time_ns(self.key.pid, PROC, boot_time_ns=self.boot_time_ns) == self.key.start_time_ns:
                if difference := self.approved.difference(found):
                    raise replaced(self.key.pid, difference)
                return found
        raise AttachError(
            AttachCode.GONE, f"process {self.key.pid} has ended; `kinetoctl ps --all` lists running processes"
        )

    def explained(self, error: AttachError) -> AttachError:
        """Returns this error, or a better one if the process has been replaced, keeps changing its credentials (so that
        opening its files succeeds at random), or has not ended after all.
        """
        try:
            found = self.check_process()
            for _look in range(_LOOKS if error.code in _BY_CHANCE else 0):
                time.sleep(_LOOK_S)
                self.check_process()
        except AttachError as better:
            return better
        if error.code is AttachCode.GONE and found.program:
            reason = f"process {self.key.pid} is running, but its files in /proc could not be read; try again"
            return AttachError(AttachCode.FAILED, reason)
        return error


class Helpers(Protocol):
    """Attaches on behalf of the daemon: its own helper processes, or the attach helper service."""

    async def start(self) -> None:
        """Starts them. Raises OSError."""

    def pids(self) -> set[int]:
        """Pids of the helpers that are the daemon's own processes."""

    async def attach(self, key: ProcessKey, approval: Approval, *, deadline_s: float) -> tuple[Attached, socket.socket]:
        """Injects the agent into a process. The caller owns the returned channel. Raises AttachError."""

    async def stop(self) -> None:
        """Releases their resources."""


class Status(StrEnum):
    """The names of pb.CheckStatus."""

    OK = "OK"
    NOTE = "NOTE"
    PROBLEM = "PROBLEM"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. code: for a PROBLEM, the code that an attach would fail with."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    code: AttachCode = AttachCode.FAILED
