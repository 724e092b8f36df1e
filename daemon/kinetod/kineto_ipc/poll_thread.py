"""The thread that answers polls, and does nothing else.

Theory of operation
    A libkineto waits 90 ms for an answer. So neither a disk nor the event loop is waited for here: sockets that have
    something are read in turns, a burst of datagrams each, because the kernel's queue is short (10 datagrams in a new
    network namespace: net.unix.max_dgram_qlen) and shared by all who send. A datagram that gets no answer costs little:
    limits come first.

    An answer that comes after that is not lost: it lies in the client's socket and is read as the answer to the next
    poll, 5 s on, and so are all further ones, since libkineto reads one at each poll. The process would be one answer
    behind for good, and would read each configuration 5 s late. So a poll that was sent more than LATE_NS ago gets no
    answer. What it says counts all the same.

    Nothing can be waiting for a process that polls for the first time. So it is answered at once, and becomes known
    later, for which /proc is read: a few at a time between datagrams, since a job may start a hundred processes.

    Sockets are handed over and taken back through a queue, which a pipe announces.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from kinetod.base import metrics
from kinetod.kineto_ipc.datagrams import BadDatagram, Drop, Poll, decode, poll_answer, registration_answer
from kinetod.kineto_ipc.poll_limits import PollLimits
from kinetod.kineto_ipc.poll_sockets import Datagram, PollSocket
from kinetod.kineto_ipc.poller_registry import Dropped, PollerRegistry, Sender

log = logging.getLogger(__name__)

BURST = 256  # datagrams that are read from a socket in its turn
SWEEP_S = 1.0
NEWCOMERS = 8  # that become known in a turn, at some 0.1 ms each
LATE_NS = 60 * 10**6  # of the 90 ms; libkineto looks for the last time after 80 ms
MAX_NEWCOMERS = 4096  # that wait to become known
_JOIN_S = 5.0


class PollThread:
    """Answers on the sockets that it is given. Everything but `start` may be called on the event loop at any time."""

    def __init__(self, registry: PollerRegistry) -> None:
        self._registry = registry
        self._limits = PollLimits()
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ear, self._mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._sockets: dict[int, PollSocket] = {}
        self._ready = select.epoll()
        self._newcomers: deque[tuple[Poll, Sender]] = deque()
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
        """Answers on this socket from now on, which is the thread's."""
        self._order(lambda: self._add(sock))

    def remove(self, sock: PollSocket) -> None:
        """Closes a socket that was added."""
        self._order(lambda: self._remove(sock))

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        with contextlib.suppress(OSError):  # a full pipe announces it as well
            os.write(self._mouth, b"\0")

    def _add(self, sock: PollSocket) -> None:
        self._sockets[sock.fileno()] = sock
        self._ready.register(sock.fileno(), select.EPOLLIN)

    def _remove(self, sock: PollSocket) -> None:
        if self._sockets.pop(sock.fileno(), None) is not None:
            self._ready.unregister(sock.fileno())
        sock.close()

    def _end(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        swept_s = time.monotonic()
        while not self._stopping:
            try:
                ready = [descriptor for descriptor, _ in self._ready.poll(0 if self._newcomers else SWEEP_S)]
                self._turn(ready)
                self._meet()
                if (now_s := time.monotonic()) - swept_s >= SWEEP_S:
                    swept_s = now_s
                    self._registry.forget_silent(now_s)
                    self._limits.forget_quiet(now_s)
                    metrics.polling_processes(self._registry.count())
            except Exception:  # one bad turn must not end the answers to all others
                log.exception("answering polls failed")
                time.sleep(SWEEP_S)
        for sock in list(self._sockets.values()):
            self._remove(sock)

    def _turn(self, ready: list[int]) -> None:
        if self._registry.fileno() in ready:  # first: a pid in a datagram may be a new process's
            self._registry.forget_ended()
        if self._ear in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ear, 4096)
            while not self._orders.empty():
                self._orders.get()()
        for descriptor in ready:
            if (sock := self._sockets.get(descriptor)) is not None:
                self._read(sock)

    def _meet(self) -> None:
        """Makes a few of those known that have polled for the first time."""
        for _ in range(min(NEWCOMERS, len(self._newcomers))):
            poll, sender = self._newcomers.popleft()
            try:
                self._registry.polled(poll, sender, now_s=time.monotonic(), now_ns=time.time_ns())
            except Dropped as exc:
                metrics.poll_dropped(exc.why)

    def _read(self, sock: PollSocket) -> None:
        for _ in range(BURST):
            try:
                datagram = sock.receive()
            except OSError as exc:
                log.warning("a datagram of a libkineto cannot be received: %s", exc.strerror)
                return
            if datagram is None:
                return
            try:
                self._answer(sock, datagram)
            except Dropped as exc:
                metrics.poll_dropped(exc.why)

    def _answer(self, sock: PollSocket, datagram: Datagram) -> None:
        """Raises Dropped."""
        sender, now_s = datagram.sender, time.monotonic()
        if sender.pid <= 0:
            raise Dropped(Drop.UNIDENTIFIED)
        if not self._limits.allows(sender.uid, sender.pid, now_s):
            raise Dropped(Drop.TOO_OFTEN)
        if not datagram.whole:
            raise Dropped(Drop.MALFORMED)
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
            if len(self._newcomers) >= MAX_NEWCOMERS:
                raise Dropped(Drop.TOO_MANY)
            self._newcomers.append((message, sender))
            if datagram.age_ns() > LATE_NS:
                raise Dropped(Drop.LATE)
            if not sock.send(poll_answer(), sender):
                raise Dropped(Drop.UNREAD)
            metrics.poll_answered()
            return
        late = datagram.age_ns() > LATE_NS
        answer = self._registry.polled(message, sender, now_s=now_s, now_ns=time.time_ns(), answered=not late)
        if late:
            raise Dropped(Drop.LATE)
        if not sock.send(poll_answer(answer.configuration), sender):
            raise Dropped(Drop.UNREAD)
        self._registry.sent(answer)
        metrics.poll_answered()
