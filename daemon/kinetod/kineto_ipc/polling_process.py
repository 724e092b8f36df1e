"""A process whose libkineto polls, and what becomes of a configuration that is offered to it.

Theory of operation
    libkineto asks every 5 s whether there is a configuration for it. So nothing can be sent to a process: a
    configuration is offered, and waits for the next poll that says that the process can take one. Its fate then shows
    in the polls: while a trace is armed or recorded, they say that the process can take none. Each copy of
    libkineto in the process is given it once: an answer that it does not read at this poll it reads at a later one.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from kinetod.processes.identity import ProcessKey


class OfferEvent(Enum):
    """What has happened to an offer, in the order in which it can happen."""

    SENT = "sent"  # a poll was answered with it, for the first time or of another copy of libkineto
    TAKEN = "taken"  # a later poll says that the profiler is armed or records
    OVER = "over"  # TAKEN, and a still later poll says that the profiler is free again
    GONE = "gone"  # the process has ended, has executed another program, or has not polled for a minute


class OfferedConfiguration(Protocol):
    """A configuration that waits for a process, or is being carried out."""

    times_sent: int

    def withdraw(self) -> None:
        """Ends the offer; no event comes after that. Valid at any time, also twice."""


class PollingProcess(Protocol):
    """One process as its datagrams' credentials, which the kernel vouches for, and its claims describe it."""

    key: ProcessKey
    uid: int
    gid: int
    pids: tuple[int, ...]  # as it claims, in its own PID namespace: its own, then its ancestors'
    job_id: int  # as it claims
    last_poll_ns: int  # Unix time
    tracing: bool  # its last poll says that its profiler is armed or records, for whomever

    def offer(self, configuration: bytes, on_event: Callable[[OfferEvent], None]) -> OfferedConfiguration:
        """Offers a configuration from the next poll on until it is TAKEN, withdrawn or GONE.

        on_event is called on the event loop. Raises Busy (kinetod.base.errors.Precondition with Reason.BUSY) while
        another offer is open.
        """


class PollingProcesses(Protocol):
    """All processes that poll."""

    def get(self, key: ProcessKey) -> PollingProcess | None:
        """The process with this key, if it polls."""

    def all(self) -> list[PollingProcess]:
        """All of them, by pid."""
