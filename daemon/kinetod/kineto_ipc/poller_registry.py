"""The processes that poll, and the configurations that wait for them.

Theory of operation
    A process is who the kernel says with each of its datagrams (SCM_CREDENTIALS): its pid leads to the entry, and a
    pidfd, opened at its first datagram, tells when the process ends, so that no other process that gets the number
    later can pass for it. What /proc says of its user must fit what the kernel said. Where the kernel has no pidfds
    (gVisor), the start time is read again at each poll.

    A process that executes another program keeps pid and start time. Its libkineto is loaded anew then and has another
    address, and so has a process in which two copies of libkineto poll. The credentials of /proc, among them a digest
    that is new with each program, tell the two apart, as far as the daemon may read them.

    A configuration is given to each copy of libkineto once. A copy reads one answer at each poll, the oldest one that
    lies in its socket. So one that has earlier answers there, which came too late for it, reads the configuration at a
    later poll; to be given it again, it would record twice. Until the configuration shows somewhere its polls get no
    answer: with each of them it reads one that lies there.

    A configuration counts as sent as soon as it is the answer to a poll: whoever withdraws it while it is being sent
    learns that libkineto may have it. If it cannot be sent, that is taken back.

    Two threads use it: the one that answers polls, and the event loop. One lock guards all state; nothing is read from
    /proc and nothing is sent while it is held. Events go to the event loop, in their order.
"""

import asyncio
import contextlib
import os
import select
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kinetod.base import metrics
from kinetod.base.errors import Precondition, Reason
from kinetod.kineto_ipc.datagrams import Drop, Poll, Registration
from kinetod.kineto_ipc.polling_process import OfferEvent, PollingProcess
from kinetod.processes import credentials
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import PROC, ProcessKey, start_time_ns

FORGET_S = 60.0  # since the last datagram, as Dynolog does
MAX_PROCESSES = 8192
MAX_PROCESSES_PER_USER = 2048
MAX_ADDRESSES = 8  # of a process; it has one for each copy of libkineto
MAX_ROOT_PROCESSES = MAX_PROCESSES // 2  # those of all containers that run as root
Address = bytes | str  # as recvmsg gives it: bytes of an abstract name, text of a path


class Dropped(Exception):
    """The datagram gets no answer."""

    def __init__(self, why: Drop) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a datagram: the kernel's word (ids are the real ones), and the address that it came from."""

    pid: int
    uid: int
    gid: int
    address: Address


class Offer:
    """OfferedConfiguration. Everything but `withdraw` is the registry's."""

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
        self.open = True  # more can happen to it
        self._silent = False
        self._lock = lock
        self._loop = loop
        self._on_event = on_event

    def withdraw(self) -> None:
        """Ends the offer; no event comes after that. Call it on the event loop."""
        self._silent = True
        with self._lock:
            self.open = False

    def tell(self, event: OfferEvent) -> None:
        """Hands an event to the event loop. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon is stopping
            self._loop.call_soon_threadsafe(self._deliver, event)

    def _deliver(self, event: OfferEvent) -> None:
        if not self._silent:
            self._on_event(event)


@dataclass(eq=False, kw_only=True)
class Poller:
    """PollingProcess."""

    key: ProcessKey
    uid: int
    gid: int
    program: Credentials
    pidfd: int | None
    real_uid: int
    addresses: set[Address]  # several where several copies of libkineto poll
    registry: "PollerRegistry"
    seen_s: float  # monotonic time of its last datagram
    pids: tuple[int, ...] = ()
    job_id: int = 0
    last_poll_ns: int = 0  # 0: it has registered, but not polled
    tracing: bool = False
    registered: tuple[int, int] | None = None  # job and GPU
    offered: Offer | None = field(default=None)

    def offer(self, configuration: bytes, on_event: Callable[[OfferEvent], None]) -> Offer:
        """As PollingProcess.offer has it."""
        return self.registry.offer(self, configuration, on_event)


@dataclass(frozen=True, slots=True)
class PollAnswer:
    """What a poll is answered with. configuration: empty if there is none."""

    poller: Poller
    offered: Offer | None
    address: Address = b""

    @property
    def configuration(self) -> bytes:
        """The configuration's text."""
        return b"" if self.offered is None else self.offered.configuration


class PollerRegistry:
    """PollingProcesses. loop: where events are delivered."""

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
        """All that poll, by pid."""
        with self._lock:
            pollers = sorted(self._pollers.items())
        return [each for _, each in pollers if each.last_poll_ns]

    def count(self) -> int:
        """How many poll."""
        with self._lock:
            return sum(1 for each in self._pollers.values() if each.last_poll_ns)

    def offer(self, poller: Poller, configuration: bytes, on_event: Callable[[OfferEvent], None]) -> Offer:
        """Offers a configuration to a process. Raises Precondition."""
        made = Offer(self._lock, self._loop, configuration, on_event)
        with self._lock:
            if poller.offered is not None and poller.offered.open:
                raise Precondition(
                    Reason.BUSY,
                    f"process {poller.key.pid} already has a configuration for its libkineto; try again once the "
                    "capture that it belongs to has ended",
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
        """Whether the sender can be told from all others without reading /proc, as far as the kernel has pidfds.

        That holds for what was received before `forget_ended` was called last.
        """
        known = self._pollers.get(sender.pid)
        return (
            known is not None
            and sender.address in known.addresses
            and known.real_uid == sender.uid
            and (known.pidfd is not None or self._lives(known))
        )

    def polled(self, poll: Poll, sender: Sender, *, now_s: float, now_ns: int, answered: bool = True) -> PollAnswer:
        """Takes note of a poll; says what to answer, if it is to be answered. Raises Dropped."""
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
                if offered.times_sent:  # otherwise it traces for somebody else
                    offered.taken_by = sender.address
                    metrics.polled_configuration("taken")
                    offered.tell(OfferEvent.TAKEN)
            elif poll.free and sender.address == offered.taken_by:
                poller.offered, offered.open = None, False
                offered.tell(OfferEvent.OVER)
            return PollAnswer(poller, None)

    def sent(self, answer: PollAnswer) -> None:
        """Notes that the answer to a poll has been sent."""
        if (offered := answer.offered) is None:
            return
        metrics.polled_configuration("sent")
        with self._lock:
            if offered.open:
                offered.tell(OfferEvent.SENT)

    def not_sent(self, answer: PollAnswer) -> None:
        """Notes that it could not be sent."""
        if (offered := answer.offered) is not None:
            with self._lock:
                offered.times_sent -= 1
                offered.sent_to.discard(answer.address)

    def registered(self, registration: Registration, sender: Sender, *, now_s: float) -> int:
        """Takes note of a registration; returns how many there are for its job and GPU. Raises Dropped."""
        poller = self._poller(sender, now_s)
        with self._lock:
            poller.seen_s = now_s
            poller.registered = (registration.job_id, registration.gpu)
            return sum(1 for each in self._pollers.values() if each.registered == poller.registered)

    def fileno(self) -> int:
        """A descriptor that is readable when a process has ended."""
        return self._ends.fileno()

    def forget_ended(self) -> None:
        """Forgets the processes that have ended."""
        while ended := self._ends.poll(0):  # a call tells of 1023 at most
            for pidfd, _ in ended:
                self._forget(self._by_pidfd[pidfd])

    def forget_silent(self, now_s: float) -> None:
        """Forgets those that have sent nothing for FORGET_S."""
        for each in [each for each in self._pollers.values() if now_s - each.seen_s >= FORGET_S]:
            self._forget(each)

    def close(self) -> None:
        """Forgets all of them."""
        for each in list(self._pollers.values()):
            self._forget(each)
        self._ends.close()

    def _poller(self, sender: Sender, now_s: float) -> Poller:
        """The entry of a sender, a new one if need be. Raises Dropped."""
        known = self._pollers.get(sender.pid)  # this thread alone changes what is in there
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
        """Whether its pid still is this process's."""
        if known.pidfd is not None:
            end = select.poll()
            end.register(known.pidfd, select.POLLIN)
            return not end.poll(0)
        with contextlib.suppress(OSError):
            return start_time_ns(known.key.pid, self._proc) == known.key.start_time_ns
        return False

    def _look(self, sender: Sender) -> Credentials:
        """Raises Dropped if the process has ended, or is not whose the kernel said that the sender was."""
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
            with contextlib.suppress(OSError):  # there are none in gVisor
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
