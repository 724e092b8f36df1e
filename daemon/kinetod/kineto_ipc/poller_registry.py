"""The processes that poll, and the configurations that wait for them.

Theory of operation
    The kernel identifies the sender of each datagram (SCM_CREDENTIALS): its pid leads to the entry, and a pidfd, opened
    at its first datagram, shows when the process ends, so that another process that reuses the number cannot pass for
    it. Its user in /proc must match the kernel's credentials. Where the kernel has no pidfds (gVisor), the start time
    is read again at each poll.

    A process that executes another program keeps pid and start time. Its libkineto is loaded anew then and has another
    address, and so has a process in which two copies of libkineto poll. The credentials of /proc, among them a digest
    that is new with each program, distinguish the two, if the daemon may read them.

    A configuration is given to each copy of libkineto once. A copy reads one answer at each poll, the oldest in its
    socket. So a copy with earlier answers there, which came too late for it, reads the configuration at a later poll;
    if it were sent again, it would record twice. Until the configuration takes effect, its polls get no answer: each
    poll reads one that is already there.

    A configuration counts as sent as soon as it is chosen as an answer: a caller that withdraws it while it is being
    sent learns that libkineto may have it. If sending fails, this is undone.

    Two threads use it: the one that answers polls, and the event loop. One lock guards all state; nothing is read from
    /proc and nothing is sent while it is held. Events go to the event loop, in their order.
"""

import asyncio
import contextlib
import os
import select
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Protocol

from kinetod.base import metrics
from kinetod.base.errors import Precondition, Reason
from kinetod.kineto_ipc.poll_sockets import MAX_DATAGRAM_BYTES, Address, Sender
from kinetod.processes import credentials
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import PROC, ProcessKey, start_time_ns

FORGET_S = 60.0  # since the last datagram, as in Dynolog
MAX_PROCESSES = 8192
MAX_PROCESSES_PER_USER = 2048
MAX_ADDRESSES = 8  # per process; there is one for each copy of libkineto
MAX_ROOT_PROCESSES = MAX_PROCESSES // 2  # for all containers that run as root
MAX_PIDS = 64  # libkineto sends at most 11: itself and 10 ancestors
EVENTS, ACTIVITIES = 1, 2  # bits of Poll.wants
_HEADER = struct.Struct("<Q32s")
_POLL = struct.Struct("<iiq")
_REGISTRATION = struct.Struct("<iiq")
_COUNT = struct.Struct("<i")
_POLL_TYPE, _REGISTRATION_TYPE = b"req", b"ctxt"


# A process whose libkineto polls, and the fate of a configuration that is offered to it.
#
# libkineto asks every 5 s whether there is a configuration for it. So nothing can be pushed to a process: a
# configuration is offered, and waits for the next poll that says that the process can take one. Later polls show its
# fate: while a trace is armed or recorded, they say that the process can take none. Each copy of libkineto in the
# process gets it once: an answer that it does not read at this poll is read at a later one.
class OfferEvent(Enum):
    """Events of an offer, in the order in which they can happen."""

    SENT = "sent"  # a poll was answered with it, for the first time or for another copy of libkineto
    TAKEN = "taken"  # a later poll says that the profiler is armed or records
    OVER = "over"  # TAKEN, and a still later poll says that the profiler is free again
    GONE = "gone"  # the process has ended, has executed another program, or has not polled for a minute


class OfferedConfiguration(Protocol):
    """A configuration that waits for a process, or is in effect."""

    times_sent: int

    def withdraw(self) -> None:
        """Ends the offer; no event follows. Idempotent; allowed at any time."""


class PollingProcess(Protocol):
    """One process, as described by its datagrams' credentials, which the kernel vouches for, and by its own claims."""

    key: ProcessKey
    uid: int
    gid: int
    pids: tuple[int, ...]  # claimed, in its own PID namespace: its own, then its ancestors'
    job_id: int  # claimed
    last_poll_ns: int  # Unix time
    tracing: bool  # its last poll reports a profiler that is armed or records, whoever asked for it

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


# libkineto's datagrams, as bytes and as values: polls, registrations, and the answers to both.
#
# A datagram is a header (the body's length as u64, a type in 32 bytes padded with zeros) and a body, little-endian
# without a version field. The layouts are those of dynolog/src/ipcfabric/Utils.h and FabricManager.h, as torch 2.13
# sends them.
# Types are compared by their beginning, as in Dynolog. A datagram whose length does not exactly match its header and
# counts is ignored.
class Drop(StrEnum):
    """Why a datagram is not answered: label values of the metric."""

    MALFORMED = "malformed"  # not one of libkineto's datagrams
    UNNAMED = "unnamed"  # its sender has no address to answer to
    UNIDENTIFIED = "unidentified"  # the kernel names no process of this PID namespace as the sender, or it has ended
    TOO_OFTEN = "too_often"  # its process, or all processes of its user, send too many
    TOO_MANY = "too_many"  # too many processes poll
    LATE = "late"  # read so late that its sender no longer waits: an answer would stay there until the next poll
    PENDING = "pending"  # its sender was sent a configuration already, and may not have read it yet
    UNREAD = "unread"  # the sender does not read its answers, or has closed its socket


class BadDatagram(Exception):
    """The datagram is not one of libkineto's. The message says why."""


@dataclass(frozen=True, slots=True)
class Poll:
    """ "Is there a configuration for me?" wants: bits of EVENTS and ACTIVITIES. pids: claimed, its own first."""

    wants: int
    job_id: int
    pids: tuple[int, ...]

    @property
    def free(self) -> bool:
        """Whether its activity profiler can take a configuration; otherwise it is armed or records."""
        return bool(self.wants & ACTIVITIES)


@dataclass(frozen=True, slots=True)
class Registration:
    """An older libkineto announces itself; all values are claims."""

    gpu: int
    pid: int
    job_id: int


def decode(datagram: bytes) -> Poll | Registration:
    """Decodes a datagram of a libkineto. Raises BadDatagram."""
    if not _HEADER.size <= len(datagram) <= MAX_DATAGRAM_BYTES:
        raise BadDatagram(f"{len(datagram)} bytes; expected {_HEADER.size} to {MAX_DATAGRAM_BYTES}")
    size, kind = _HEADER.unpack_from(datagram)
    body = datagram[_HEADER.size :]
    if size != len(body):
        raise BadDatagram(f"its header states {size} bytes, but {len(body)} follow")
    if kind.startswith(_POLL_TYPE):
        return _poll(body)
    if kind.startswith(_REGISTRATION_TYPE):
        return _registration(body)
    raise BadDatagram("its type is neither req nor ctxt")


def _poll(body: bytes) -> Poll:
    if len(body) < _POLL.size:
        raise BadDatagram(f"a poll of {len(body)} bytes")
    wants, count, job_id = _POLL.unpack_from(body)
    if not 0 <= count <= MAX_PIDS:
        raise BadDatagram(f"a poll of {count} pids")
    if len(body) != _POLL.size + 4 * count:
        raise BadDatagram(f"a poll of {count} pids in {len(body)} bytes")
    return Poll(wants, job_id, struct.unpack_from(f"<{count}i", body, _POLL.size))


def _registration(body: bytes) -> Registration:
    if len(body) != _REGISTRATION.size:
        raise BadDatagram(f"a registration of {len(body)} bytes")
    return Registration(*_REGISTRATION.unpack(body))


def poll_answer(configuration: bytes = b"") -> bytes:
    """The answer to a poll; empty: there is no configuration."""
    return _HEADER.pack(len(configuration), _POLL_TYPE) + configuration


def registration_answer(count: int) -> bytes:
    """The answer to a registration: the number of processes registered for the same job and GPU; -1: it failed."""
    return _HEADER.pack(_COUNT.size, _REGISTRATION_TYPE) + _COUNT.pack(count)


class Dropped(Exception):
    """The datagram gets no answer."""

    def __init__(self, why: Drop) -> None:
        super().__init__(why)
        self.why = why


class Offer:
    """Implements OfferedConfiguration. Only the registry uses anything but `withdraw`."""

    def __init__(
        self,
        lock: threading.Lock,
        loop: asyncio.AbstractEventLoop,
        configuration: bytes,
        on_event: Callable[[OfferEvent], None],
    ) -> None:
        self.configuration = configuration
        self.times_sent = 0
        self.taken_by: Address | None = None
        self.sent_to: set[Address] = set()
        self.open = True  # further events can happen
        self._silent = False
        self._lock = lock
        self._loop = loop
        self._on_event = on_event

    def withdraw(self) -> None:
        """Ends the offer; no event follows. Call it on the event loop."""
        self._silent = True
        with self._lock:
            self.open = False

    def tell(self, event: OfferEvent) -> None:
        """Passes an event to the event loop. Call it from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon is stopping
            self._loop.call_soon_threadsafe(self._deliver, event)

    def _deliver(self, event: OfferEvent) -> None:
        if not self._silent:
            self._on_event(event)


@dataclass(eq=False, kw_only=True)
class Poller:
    """Implements PollingProcess."""

    key: ProcessKey
    uid: int
    gid: int
    program: Credentials
    pidfd: int | None
    real_uid: int
    addresses: set[Address]  # several if several copies of libkineto poll
    registry: "PollerRegistry"
    seen_s: float  # monotonic time of its last datagram
    pids: tuple[int, ...] = ()
    job_id: int = 0
    last_poll_ns: int = 0  # 0: it has registered, but not polled
    tracing: bool = False
    registered: tuple[int, int] | None = None  # job and GPU
    offered: Offer | None = field(default=None)

    def offer(self, configuration: bytes, on_event: Callable[[OfferEvent], None]) -> Offer:
        """See PollingProcess.offer."""
        return self.registry.offer(self, configuration, on_event)


@dataclass(frozen=True, slots=True)
class PollAnswer:
    """Answer to a poll. configuration: empty if there is none."""

    poller: Poller
    offered: Offer | None
    address: Address = b""

    @property
    def configuration(self) -> bytes:
        """The configuration's text."""
        return b"" if self.offered is None else self.offered.configuration


class PollerRegistry:
    """Implements PollingProcesses. loop: where events are delivered."""

    def __init__(self, loop: asyncio.AbstractEventLoop, proc: Path = PROC) -> None:
        self._loop = loop
        self._proc = proc
        self._lock = threading.Lock()
        self._pollers: dict[int, Poller] = {}
        self._by_pidfd: dict[int, Poller] = {}
        self._per_user: Counter[int] = Counter()
        self._ends = select.epoll()  # of the pidfds

    # for the event loop

    def get(self, key: ProcessKey) -> Poller | None:
        """The process with this key, if it polls."""
        with self._lock:
            poller = self._pollers.get(key.pid)
        return poller if poller is not None and poller.key == key and poller.last_poll_ns else None

    def all(self) -> list[PollingProcess]:
        """All processes that poll, by pid."""
        with self._lock:
            pollers = sorted(self._pollers.items())
        return [each for _, each in pollers if each.last_poll_ns]

    def count(self) -> int:
        """The number of processes that poll."""
        with self._lock:
            return sum(1 for each in self._pollers.values() if each.last_poll_ns)

    def offer(self, poller: Poller, configuration: bytes, on_event: Callable[[OfferEvent], None]) -> Offer:
        """Offers a configuration to a process. Raises Precondition."""
        made = Offer(self._lock, self._loop, configuration, on_event)
        with self._lock:
            if poller.offered is not None and poller.offered.open:
                raise Precondition(
                    Reason.BUSY,
                    f"libkineto in process {poller.key.pid} already has the configuration of another capture; try "
                    "again once that capture has ended",
                    pid=poller.key.pid,
                )
            gone = self._pollers.get(poller.key.pid) is not poller
            made.open = not gone
            poller.offered = made
        if gone:
            made.tell(OfferEvent.GONE)
        return made

    # for the thread that answers

    def knows(self, sender: Sender) -> bool:
        """Whether the sender can be identified without reading /proc, if the kernel has pidfds.

        This holds for datagrams received before the last call of `forget_ended`.
        """
        known = self._pollers.get(sender.pid)
        return (
            known is not None
            and sender.address in known.addresses
            and known.real_uid == sender.uid
            and (known.pidfd is not None or self._lives(known))
        )

    def polled(self, poll: Poll, sender: Sender, *, now_s: float, now_ns: int, answered: bool = True) -> PollAnswer:
        """Records a poll and returns the answer, if it is to be answered. Raises Dropped."""
        poller = self._poller(sender, now_s)
        with self._lock:
            poller.pids, poller.job_id = poll.pids, poll.job_id
            poller.last_poll_ns, poller.seen_s, poller.tracing = now_ns, now_s, not poll.free
            offered = poller.offered
            if offered is None or not offered.open:
                poller.offered = None
                return PollAnswer(poller, None)
            if offered.taken_by is None:
                if poll.free:
                    if sender.address in offered.sent_to:
                        raise Dropped(Drop.PENDING)
                    if not answered:
                        return PollAnswer(poller, None)
                    offered.times_sent += 1
                    offered.sent_to.add(sender.address)
                    return PollAnswer(poller, offered, sender.address)
                if offered.times_sent:  # otherwise it traces for another client
                    offered.taken_by = sender.address
                    metrics.POLLED_CONFIGURATIONS.labels("taken").inc()
                    offered.tell(OfferEvent.TAKEN)
            elif poll.free and sender.address == offered.taken_by:
                poller.offered, offered.open = None, False
                offered.tell(OfferEvent.OVER)
            return PollAnswer(poller, None)

    def sent(self, answer: PollAnswer) -> None:
        """Notes that the answer to a poll has been sent."""
        if (offered := answer.offered) is None:
            return
        metrics.POLLED_CONFIGURATIONS.labels("sent").inc()
        with self._lock:
            if offered.open:
                offered.tell(OfferEvent.SENT)

    def not_sent(self, answer: PollAnswer) -> None:
        """Notes that the answer could not be sent."""
        if (offered := answer.offered) is not None:
            with self._lock:
                offered.times_sent -= 1
                offered.sent_to.discard(answer.address)

    def registered(self, registration: Registration, sender: Sender, *, now_s: float) -> int:
        """Records a registration; returns how many there are for its job and GPU. Raises Dropped."""
        poller = self._poller(sender, now_s)
        with self._lock:
            poller.seen_s = now_s
            poller.registered = (registration.job_id, registration.gpu)
            return sum(1 for each in self._pollers.values() if each.registered == poller.registered)

    def fileno(self) -> int:
        """A descriptor that becomes readable when a process has ended."""
        return self._ends.fileno()

    def forget_ended(self) -> None:
        """Forgets the processes that have ended."""
        while ended := self._ends.poll(0):  # a call returns at most 1023
            for pidfd, _ in ended:
                self._forget(self._by_pidfd[pidfd])

    def forget_silent(self, now_s: float) -> None:
        """Forgets processes that have sent nothing for FORGET_S."""
        for each in [each for each in self._pollers.values() if now_s - each.seen_s >= FORGET_S]:
            self._forget(each)

    def close(self) -> None:
        """Forgets all of them."""
        for each in list(self._pollers.values()):
            self._forget(each)
        self._ends.close()

    def _poller(self, sender: Sender, now_s: float) -> Poller:
        """The entry of a sender, created if necessary. Raises Dropped."""
        known = self._pollers.get(sender.pid)  # only this thread changes it
        if known is None:
            return self._arrived(sender, now_s)
        if self.knows(sender):
            return known
        found = self._look(sender)
        if self._lives(known) and not known.program.difference(found):
            if len(known.addresses) >= MAX_ADDRESSES:
                known.addresses.clear()
            known.addresses.add(sender.address)
            return known
        self._forget(known)
        return self._arrived(sender, now_s)

    def _lives(self, known: Poller) -> bool:
        """Whether the pid still belongs to this process."""
        if known.pidfd is not None:
            end = select.poll()
            end.register(known.pidfd, select.POLLIN)
            return not end.poll(0)
        with contextlib.suppress(OSError):
            return start_time_ns(known.key.pid, self._proc) == known.key.start_time_ns
        return False

    def _look(self, sender: Sender) -> Credentials:
        """Raises Dropped if the process has ended, or its user differs from the kernel's credentials of the sender."""
        try:
            found = credentials.read(sender.pid, proc=self._proc)
        except ProcessLookupError as exc:
            raise Dropped(Drop.UNIDENTIFIED) from exc
        if sender.uid not in found.uids:
            raise Dropped(Drop.UNIDENTIFIED)
        return found

    def _arrived(self, sender: Sender, now_s: float) -> Poller:
        room = MAX_ROOT_PROCESSES if sender.uid == 0 else MAX_PROCESSES_PER_USER
        if len(self._pollers) >= MAX_PROCESSES or self._per_user[sender.uid] >= room:
            raise Dropped(Drop.TOO_MANY)
        pidfd: int | None = None
        try:
            with contextlib.suppress(OSError):  # gVisor has none
                pidfd = os.pidfd_open(sender.pid)
            key = ProcessKey(sender.pid, start_time_ns(sender.pid, self._proc))
            found = self._look(sender)
            if key.start_time_ns != start_time_ns(sender.pid, self._proc):
                raise ProcessLookupError
        except (OSError, Dropped) as exc:
            if pidfd is not None:
                os.close(pidfd)
            raise Dropped(Drop.UNIDENTIFIED) from exc
        poller = Poller(
            key=key,
            uid=found.uid,
            gid=found.gid,
            real_uid=sender.uid,
            program=found,
            pidfd=pidfd,
            addresses={sender.address},
            registry=self,
            seen_s=now_s,
        )
        if pidfd is not None:
            self._by_pidfd[pidfd] = poller
            self._ends.register(pidfd, select.EPOLLIN)
        with self._lock:
            self._pollers[sender.pid] = poller
        self._per_user[sender.uid] += 1
        return poller

    def _forget(self, poller: Poller) -> None:
        with self._lock:
            del self._pollers[poller.key.pid]
            offered, poller.offered = poller.offered, None
            if offered is not None and offered.open:
                offered.open = False
                offered.tell(OfferEvent.GONE)
        self._per_user[poller.real_uid] -= 1
        if not self._per_user[poller.real_uid]:
            del self._per_user[poller.real_uid]
        if poller.pidfd is not None:
            self._ends.unregister(poller.pidfd)
            del self._by_pidfd[poller.pidfd]
            os.close(poller.pidfd)
