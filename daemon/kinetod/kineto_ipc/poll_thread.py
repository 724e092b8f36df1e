"""The thread that answers polls, and does nothing else.

Theory of operation
    A libkineto waits 90 ms for an answer. So neither a disk nor the event loop is waited for here. The kernel's queue
    is short (10 datagrams in a new network namespace: net.unix.max_dgram_qlen) and shared by all who send, and a
    libkineto that finds it full waits for 10 ms at least. To receive costs a third of what an answer does. So each turn
    first takes what the sockets have, as far as there is room for it, and then answers a few. A datagram that gets no
    answer costs little: limits come first, and take it before it waits here.

    An answer that comes after that is not lost: it lies in the client's socket and is read as the answer to the next
    poll, 5 s on, and so are all further ones, since libkineto reads one at each poll. The process would be one answer
    behind for good, and would read each configuration 5 s late. So a poll that was sent more than LATE_NS ago gets no
    answer. What it says counts all the same.

    Nothing can be waiting for a process that polls for the first time. So it is answered at once, and becomes known
    later, for which /proc is read. That takes six times as long as an answer, and a job may start hundreds of
    processes. So it is done one process at a time, in turns that have nothing else to do; where such turns do not come,
    in one of the others once MEET_WITHIN_S has passed.

    Whether a process still lives is asked once in each turn, for all of them, after its datagrams were received and
    before they are answered: who lives then has sent what was received under its pid.

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

MAX_WAITING = 256  # datagrams that were received and wait for their answers; beyond it, one a turn from each socket
ANSWERS = 8  # in a turn, before the sockets are looked at again
SWEEP_S = 1.0
LATE_NS = 60 * 10**6  # of the 90 ms; libkineto looks for the last time after 80 ms
MAX_NEWCOMERS = 4096  # that wait to become known
MEET_WITHIN_S = 0.1
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
        self._waiting: deque[tuple[PollSocket, Datagram]] = deque()
        self._newcomers: deque[tuple[Poll, Sender, float]] = deque()  # and when they polled
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
                    metrics.polling_processes(self._registry.count())
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
                metrics.poll_dropped(exc.why)
        idle = not ready and not self._waiting
        if self._newcomers and (idle or time.monotonic() - self._newcomers[0][-1] >= MEET_WITHIN_S):
            self._meet()

    def _meet(self) -> None:
        """Makes the one known that has waited longest since its first poll."""
        poll, sender, _ = self._newcomers.popleft()
        try:
            self._registry.polled(poll, sender, now_s=time.monotonic(), now_ns=time.time_ns(), answered=False)
        except Dropped as exc:
            metrics.poll_dropped(exc.why)

    def _receive(self, sock: PollSocket, most: int) -> None:
        """Takes what a socket has; who is beyond a limit does not get to wait for an answer."""
        for _ in range(most):
            try:
                datagram = sock.receive()
            except OSError as exc:
                log.warning("a datagram of a libkineto cannot be received: %s", exc.strerror)
                return
            if datagram is None:
                return
            if (why := self._refusal(datagram)) is not None:
                metrics.poll_dropped(why)
            else:
                self._waiting.append((sock, datagram))

    def _refusal(self, datagram: Datagram) -> Drop | None:
        """Why a datagram is not looked at; None if it is."""
        sender = datagram.sender
        if sender.pid <= 0:
            return Drop.UNIDENTIFIED
        if not self._limits.allows(sender.uid, sender.pid, time.monotonic()):
            return Drop.TOO_OFTEN
        return None if datagram.whole else Drop.MALFORMED

    def _answer(self, sock: PollSocket, datagram: Datagram) -> None:
        """Raises Dropped."""
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
            if len(self._newcomers) >= MAX_NEWCOMERS:
                raise Dropped(Drop.TOO_MANY)
            self._newcomers.append((message, sender, now_s))
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
            self._registry.not_sent(answer)
            raise Dropped(Drop.UNREAD)
        self._registry.sent(answer)
        metrics.poll_answered()
