"""Listens for libkineto's polls: opens the sockets, retries those that fail, and reports their state.

Theory of operation
    The places are the abstract name in the daemon's own network namespace, the folders of dynolog.socket_dirs, and the
    network namespaces of containers. Each of the first two is opened at the start and, if that fails, retried every
    RETRY_S: while Dynolog runs, it owns the name, and stopping it is enough to switch. A removed socket file is created
    again.

    Sockets are created in threads, since folders may be on slow disks, and then belong to the thread that answers
    polls.
"""

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from kinetod.base import metrics
from kinetod.base.errors import StartError
from kinetod.kineto_ipc.door_findings import ABSTRACT, DoorState
from kinetod.kineto_ipc.network_namespaces import NamespaceOpener, own_namespace
from kinetod.kineto_ipc.poll_sockets import (
    FILE_NAME,
    NAME,
    AbstractSocket,
    Datagram,
    FolderSocket,
    NameTaken,
    PollSocket,
    Sender,
    bound_socket,
    holder,
    queue_length,
)
from kinetod.kineto_ipc.poller_registry import (
    BadDatagram,
    Drop,
    Dropped,
    Poll,
    PollerRegistry,
    decode,
    poll_answer,
    registration_answer,
)

MOST_FAILURES = 6  # a socket keeps its namespace alive: it is closed after this many failed searches
log = logging.getLogger(__name__)

MAX_WAITING = 256  # datagrams that were received and wait for their answers; beyond it, one per turn from each socket
ANSWERS = 8  # per turn, before the sockets are polled again
SWEEP_S = 1.0
LATE_NS = 60 * 10**6  # of the 90 ms; libkineto checks for the last time after 80 ms
MAX_NEWCOMERS = 4096  # that wait to be registered
MEET_WITHIN_S = 0.1
_JOIN_S = 5.0
PROCESS_PER_S, PROCESS_BURST = 5.0, 20.0
USER_PER_S, USER_BURST = 500.0, 2000.0
MAX_PROCESSES_PER_USER = 4096
MAX_USERS = 4096


# The thread that only answers polls.
#
# A libkineto waits 90 ms for an answer. So this thread waits neither for a disk nor for the event loop. The kernel's
# queue is short (10 datagrams in a new network namespace: net.unix.max_dgram_qlen) and shared by all senders, and a
# libkineto that finds it full waits for at least 10 ms. Receiving costs a third of answering. So each turn first
# receives what the sockets have, as far as there is room, and then answers a few. A datagram without an answer costs
# little: limits are checked first, before it is queued here.
# A late answer is not lost: it stays in the client's socket and is read as the answer to the next poll, 5 s later, and
# so are all further ones, since libkineto reads one at each poll. The process would be one answer behind permanently,
# and would read each configuration 5 s late. So a poll sent more than LATE_NS ago gets no answer. Its content still
# counts.
# Nothing can be waiting for a process that polls for the first time. So it is answered at once and registered later,
# which reads /proc. That takes six times as long as an answer, and a job may start hundreds of processes. So they are
# registered one at a time, in turns with nothing else to do; if there is no such turn, in another one once
# MEET_WITHIN_S has passed.
# Each turn checks once which processes are alive, after their datagrams were received and before they are answered: a
# process alive then has sent the datagrams received under its pid.
# Sockets are handed over and taken back through a queue, which a pipe announces.
class PollThread:
    """Answers on the sockets added to it. Everything but `start` may be called on the event loop at any time."""

    def __init__(self, registry: PollerRegistry) -> None:
        self._registry = registry
        self._limits = PollLimits()
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ear, self._mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._sockets: dict[int, PollSocket] = {}
        self._ready = select.epoll()
        self._waiting: deque[tuple[PollSocket, Datagram]] = deque()
        self._newcomers = Newcomers()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="libkineto polls", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._ready.register(self._ear, select.EPOLLIN)
        self._ready.register(self._registry.fileno(), select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """Closes all sockets and ends the thread. Blocking, for milliseconds."""
        self._order(self._end)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._ready.close()
            os.close(self._ear)
            os.close(self._mouth)

    def add(self, sock: PollSocket) -> None:
        """Takes ownership of this socket and answers on it."""
        self._order(lambda: self._add(sock))

    def remove(self, sock: PollSocket) -> None:
        """Closes a socket that was added."""
        self._order(lambda: self._remove(sock))

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        with contextlib.suppress(OSError):  # a full pipe also wakes the thread
            os.write(self._mouth, b"\0")

    def _add(self, sock: PollSocket) -> None:
        self._sockets[sock.fileno()] = sock
        self._ready.register(sock.fileno(), select.EPOLLIN)

    def _remove(self, sock: PollSocket) -> None:
        if self._sockets.pop(sock.fileno(), None) is not None:
            self._ready.unregister(sock.fileno())
            self._waiting = deque(each for each in self._waiting if each[0] is not sock)
        sock.close()

    def _end(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        swept_s = time.monotonic()
        while not self._stopping:
            try:
                busy = self._waiting or self._newcomers
                self._turn([descriptor for descriptor, _ in self._ready.poll(0 if busy else SWEEP_S)])
                if (now_s := time.monotonic()) - swept_s >= SWEEP_S:
                    swept_s = now_s
                    self._registry.forget_silent(now_s)
                    self._limits.forget_quiet(now_s)
                    metrics.POLLING_PROCESSES.set(self._registry.count())
            except Exception:  # one bad turn must not end the answers to all others
                log.exception("answering polls failed")
                time.sleep(SWEEP_S)
        for sock in list(self._sockets.values()):
            self._remove(sock)

    def _turn(self, ready: list[int]) -> None:
        if self._ear in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ear, 4096)
            while not self._orders.empty():
                self._orders.get()()
        sockets = [self._sockets[descriptor] for descriptor in ready if descriptor in self._sockets]
        for sock in sockets:
            self._receive(sock, max(1, (MAX_WAITING - len(self._waiting)) // len(sockets)))
        self._registry.forget_ended()
        for _ in range(min(ANSWERS, len(self._waiting))):
            sock, datagram = self._waiting.popleft()
            try:
                self._answer(sock, datagram)
            except Dropped as exc:
                metrics.POLLS_DROPPED.labels(exc.why).inc()
        idle = not ready and not self._waiting
        if self._newcomers and (idle or time.monotonic() - self._newcomers.next_since_s >= MEET_WITHIN_S):
            self._meet()

    def _meet(self) -> None:
        """Makes the next one known that has polled for the first time."""
        poll, sender = self._newcomers.take()
        try:
            self._registry.polled(poll, sender, now_s=time.monotonic(), now_ns=time.time_ns(), answered=False)
        except Dropped as exc:
            metrics.POLLS_DROPPED.labels(exc.why).inc()

    def _receive(self, sock: PollSocket, most: int) -> None:
        """Receives a socket's datagrams; those beyond a limit are not queued for an answer."""
        for _ in range(most):
            try:
                datagram = sock.receive()
            except OSError as exc:
                log.warning("cannot receive a datagram from libkineto: %s", exc.strerror)
                return
            if datagram is None:
                return
            if (why := self._refusal(datagram)) is not None:
                metrics.POLLS_DROPPED.labels(why).inc()
            else:
                self._waiting.append((sock, datagram))

    def _refusal(self, datagram: Datagram) -> Drop | None:
        """Why a datagram is dropped unread; None if it is not."""
        sender = datagram.sender
        if sender.pid <= 0:
            return Drop.UNIDENTIFIED
        if not self._limits.allows(sender.uid, sender.pid, time.monotonic()):
            return Drop.TOO_OFTEN
        return None if datagram.whole else Drop.MALFORMED

    def _answer(self, sock: PollSocket, datagram: Datagram) -> None:
        """Answers a datagram. Raises Dropped."""
        sender, now_s = datagram.sender, time.monotonic()
        try:
            message = decode(datagram.content)
        except BadDatagram as exc:
            raise Dropped(Drop.MALFORMED) from exc
        if not sock.can_answer(sender):
            raise Dropped(Drop.UNNAMED)
        if not isinstance(message, Poll):
            count = self._registry.registered(message, sender, now_s=now_s)
            if not sock.send(registration_answer(count), sender):
                raise Dropped(Drop.UNREAD)
            return
        if not self._registry.knows(sender):
            if not self._newcomers.add(message, sender, now_s):
                raise Dropped(Drop.TOO_MANY)
            if datagram.age_ns() > LATE_NS:
                raise Dropped(Drop.LATE)
            if not sock.send(poll_answer(), sender):
                raise Dropped(Drop.UNREAD)
            metrics.POLLS_ANSWERED.inc()
            return
        late = datagram.age_ns() > LATE_NS
        answer = self._registry.polled(message, sender, now_s=now_s, now_ns=time.time_ns(), answered=not late)
        if late:
            raise Dropped(Drop.LATE)
        if not sock.send(poll_answer(answer.configuration), sender):
            self._registry.not_sent(answer)
            raise Dropped(Drop.UNREAD)
        self._registry.sent(answer)
        metrics.POLLS_ANSWERED.inc()


class Newcomers:
    """Those that wait to become known. Turns go round the users, and of too many the last one goes of whoever has most,
    so that nobody waits for, or is dropped because of, a user who starts thousands of processes.
    """

    def __init__(self, most: int = MAX_NEWCOMERS) -> None:
        self._most = most
        self._count = 0
        self._of_user: OrderedDict[int, deque[tuple[Poll, Sender, float]]] = OrderedDict()  # the next one's first

    def __len__(self) -> int:
        return self._count

    @property
    def next_since_s(self) -> float:
        """When the one whose turn is next polled."""
        return next(iter(self._of_user.values()))[0][-1]

    def add(self, poll: Poll, sender: Sender, now_s: float) -> bool:
        """Whether there is room for one more of this user."""
        own = self._of_user.setdefault(sender.uid, deque())
        own.append((poll, sender, now_s))
        self._count += 1
        if self._count <= self._most:
            return True
        most = max(self._of_user.values(), key=len)
        last = own if len(own) == len(most) else most
        last.pop()
        self._count -= 1
        if last is not own:
            metrics.POLLS_DROPPED.labels(Drop.TOO_MANY).inc()
        if not own:
            del self._of_user[sender.uid]
        return last is not own

    def take(self) -> tuple[Poll, Sender]:
        """The next one. Raises KeyError if there is none."""
        uid, own = self._of_user.popitem(last=False)
        poll, sender, _ = own.popleft()
        self._count -= 1
        if own:
            self._of_user[uid] = own
        return poll, sender


# How many datagrams of a process, and of all processes of a user, are looked at.
#
# Token buckets, charged before a datagram is processed: first the process's, so that a flooding process uses up only
# its own, then the user's, against one that forks. A libkineto polls every 5 s, and a job may start a thousand
# processes at once. Memory is bounded: a user's processes are forgotten together once they are too many; with too many
# users the first one is forgotten, and all users are once they have been quiet. A forgotten process starts with a full
# bucket.
#
# Root's processes share one bucket, including those of containers that run as root.
@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float

    def take(self, now_s: float, per_s: float, burst: float) -> bool:
        self.tokens = min(burst, self.tokens + (now_s - self.at_s) * per_s)
        self.at_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass(slots=True)
class _User:
    bucket: _Bucket
    processes: dict[int, _Bucket] = field(default_factory=dict)


class PollLimits:
    """Not thread-safe; times are monotonic seconds."""

    def __init__(self) -> None:
        self._users: dict[int, _User] = {}

    def allows(self, uid: int, pid: int, now_s: float) -> bool:
        """Whether to look at one more datagram of this process."""
        user = self._users.get(uid)
        if user is None:
            if len(self._users) >= MAX_USERS:
                del self._users[next(iter(self._users))]
            user = self._users[uid] = _User(_Bucket(USER_BURST, now_s))
        process = user.processes.get(pid)
        if process is None:
            if len(user.processes) >= MAX_PROCESSES_PER_USER:
                user.processes.clear()
            process = user.processes[pid] = _Bucket(PROCESS_BURST, now_s)
        return process.take(now_s, PROCESS_PER_S, PROCESS_BURST) and user.bucket.take(now_s, USER_PER_S, USER_BURST)

    def forget_quiet(self, now_s: float) -> None:
        """Forgets entries whose buckets are full again: that makes no difference to them."""
        for uid, user in list(self._users.items()):
            for pid, bucket in list(user.processes.items()):
                if (now_s - bucket.at_s) * PROCESS_PER_S >= PROCESS_BURST:
                    del user.processes[pid]
            if not user.processes and (now_s - user.bucket.at_s) * USER_PER_S >= USER_BURST:
                del self._users[uid]


class Namespaces:
    """The sockets in other network namespaces, answered by `thread`. retry_s: pause before retrying one."""

    def __init__(self, opener: NamespaceOpener, thread: PollThread, retry_s: float) -> None:
        self._opener = opener
        self._thread = thread
        self._retry_s = retry_s
        self._open: dict[int, AbstractSocket] = {}
        self._problems: dict[int, tuple[str, float]] = {}  # and the time of the failure
        self._failures = 0

    def served(self) -> frozenset[int]:
        """The inodes of those with a socket."""
        return frozenset(self._open)

    def problems(self) -> Mapping[int, str]:
        """Why others have none, by inode."""
        return {namespace: why for namespace, (why, _) in self._problems.items()}

    async def look(self) -> None:
        """Opens sockets in new namespaces, and closes those that are no longer needed."""
        now_s = asyncio.get_running_loop().time()
        lately = {each for each, (_, at_s) in self._problems.items() if now_s - at_s < self._retry_s}
        seen = await self._opener.poll_sockets({*self._open, *lately})
        if seen is None:
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                self._close(self._open)
            return
        self._failures = 0
        for namespace, sock in seen.opened.items():
            self._open[namespace] = made = AbstractSocket(sock)
            self._thread.add(made)
            self._problems.pop(namespace, None)
            log.info("libkineto's polls are answered in network namespace %d", namespace)
        for namespace, why in seen.problems.items():
            if self._problems.get(namespace, ("", 0.0))[0] != why:
                log.warning("libkineto's polls are not answered in network namespace %d: %s", namespace, why)
            self._problems[namespace] = why, now_s
        self._close(self._open.keys() - seen.inhabited)
        for namespace in self._problems.keys() - seen.inhabited:
            del self._problems[namespace]

    def _close(self, namespaces: Collection[int]) -> None:
        for namespace in list(namespaces):
            self._thread.remove(self._open.pop(namespace))
            log.info("no process in network namespace %d is looking for a daemon any more", namespace)


RETRY_S = 30.0
LOOK_S = 10.0  # libkineto tries for some 10 s to send its first poll, and again after 5 s


class PollDoor:
    """Serves polls between `start` and `stop`. folders: of dynolog.socket_dirs; name: the abstract one.

    namespaces: creates sockets in the network namespaces of containers; None: only the daemon's own is served.
    """

    def __init__(
        self,
        folders: Sequence[Path] = (),
        *,
        namespaces: NamespaceOpener | None = None,
        name: bytes = NAME,
        retry_s: float = RETRY_S,
        look_s: float = LOOK_S,
    ) -> None:
        self.processes = PollerRegistry(asyncio.get_running_loop())
        self._thread = PollThread(self.processes)
        self._places: Mapping[str, Path | None] = {ABSTRACT: None, **{str(folder): folder for folder in folders}}
        self._name = name
        self._namespaces = Namespaces(namespaces, self._thread, retry_s) if namespaces is not None else None
        self._retry_s = retry_s
        self._look_s = look_s
        self._open: dict[str, PollSocket] = {}
        self._problems: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def state(self) -> DoorState:
        """Where polls are answered now, and why not elsewhere."""
        others = self._namespaces
        return DoorState(
            served=tuple(self._open),
            namespaces=others.served() if others is not None else frozenset(),
            own_namespace=own_namespace(),
            problems=dict(self._problems),
            namespace_problems=others.problems() if others is not None else {},
            processes=self.processes.count(),
            queue_length=queue_length(),
        )

    async def start(self) -> None:
        """Opens all sockets, and keeps retrying those that fail."""
        self._thread.start()
        await self._open_all()
        self._tasks.append(asyncio.create_task(_again(self._open_all, self._retry_s), name="sockets for libkineto"))
        if self._namespaces is not None:
            looking = _again(self._namespaces.look, self._look_s, at_once=True)
            self._tasks.append(asyncio.create_task(looking, name="network namespaces for libkineto"))

    async def stop(self) -> None:
        """Closes everything; processes then find no daemon and try again at their next poll."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.stop)
        self.processes.close()

    async def _open_all(self) -> None:
        for place, folder in self._places.items():
            await self._open_one(place, folder)

    async def _open_one(self, place: str, folder: Path | None) -> None:
        known = self._open.get(place)
        if known is not None:
            if not isinstance(known, FolderSocket) or await asyncio.to_thread(known.is_there):
                return
            log.warning("the socket in %s was removed; recreating it", place)
            del self._open[place]
            self._thread.remove(known)
        sock = await asyncio.to_thread(self._opened, folder)
        if isinstance(sock, str):
            self._failed(place, sock)
            return
        self._open[place] = sock
        self._thread.add(sock)
        self._problems.pop(place, None)
        log.info("libkineto's polls are answered at %s", place)

    def _failed(self, place: str, why: str) -> None:
        if self._problems.get(place) != why:
            log.warning(
                "libkineto's polls are not answered at %s: %s; trying again every %g s", place, why, self._retry_s
            )
        self._problems[place] = why

    def _opened(self, folder: Path | None) -> PollSocket | str:
        """The socket, or why it cannot be opened. Blocking."""
        try:
            return AbstractSocket(bound_socket(self._name)) if folder is None else FolderSocket(folder)
        except NameTaken:
            name = self._name.replace(b"\0", b"@").decode() if folder is None else str(folder / FILE_NAME)
            who = holder(name) or "another process (`sudo ss -xlp` shows which)"
            return f"{who} is using it; stop that process, or set dynolog.ipc = false"
        except (OSError, StartError) as exc:
            return getattr(exc, "strerror", None) or str(exc)


async def _again(work: Callable[[], Awaitable[None]], period_s: float, *, at_once: bool = False) -> None:
    """Repeats the work, even if it fails."""
    if not at_once:
        await asyncio.sleep(period_s)
    while True:
        try:
            await work()
        except Exception:  # the next attempt may succeed
            log.exception("maintaining the sockets for libkineto failed")
        await asyncio.sleep(period_s)
