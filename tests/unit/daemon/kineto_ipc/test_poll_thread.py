import asyncio
import os
import threading
from collections.abc import Callable

from kinetod.kineto_ipc.datagrams import Poll
from kinetod.kineto_ipc.poll_sockets import Datagram
from kinetod.kineto_ipc.poll_thread import ANSWERS, PollThread
from kinetod.kineto_ipc.poller_registry import PollAnswer, PollerRegistry, Sender
from support.peers import libkineto
from support.waiting import scaled


class ScriptedSocket:
    """A socket to which datagrams come when the test says so."""

    def __init__(self, on_send: Callable[[], None]) -> None:
        self._ready, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._on_send = on_send
        self.closed = threading.Event()

    def arrive(self, count: int = 1) -> None:
        os.write(self._wake, bytes(count))

    def fileno(self) -> int:
        return self._ready

    def receive(self) -> Datagram | None:
        try:
            os.read(self._ready, 1)
        except BlockingIOError:
            return None
        return Datagram(libkineto.poll(), Sender(os.getpid(), os.getuid(), os.getgid(), b"\0a\0"), True)

    def can_answer(self, _sender: Sender) -> bool:
        return True

    def send(self, _answer: bytes, _sender: Sender) -> bool:
        self._on_send()
        return True

    def close(self) -> None:
        os.close(self._ready)
        os.close(self._wake)
        self.closed.set()


class NotedRegistry(PollerRegistry):
    """Knows nobody, and says whom it is asked to look up."""

    def __init__(self, on_look: Callable[[], None]) -> None:
        super().__init__(asyncio.new_event_loop())
        self._on_look = on_look
        self.answered: list[bool] = []

    def polled(self, poll: Poll, sender: Sender, *, now_s: float, now_ns: int, answered: bool = True) -> PollAnswer:
        answer = super().polled(poll, sender, now_s=now_s, now_ns=now_ns, answered=answered)
        self.answered.append(answered)
        self._forget(answer.poller)
        self._on_look()
        return answer

    def close(self) -> None:
        super().close()
        self._loop.close()


def test_those_who_poll_are_answered_before_the_next_newcomer_is_looked_up() -> None:
    happened: list[str] = []
    done = threading.Event()

    def look() -> None:
        happened.append("look")
        if happened.count("look") == 1:
            sock.arrive()
        if happened.count("look") == 3:
            done.set()

    registry = NotedRegistry(look)
    thread = PollThread(registry)
    sock = ScriptedSocket(lambda: happened.append("answer"))
    sock.arrive(2)
    thread.start()
    thread.add(sock)
    assert done.wait(scaled(20))
    thread.stop()
    registry.close()
    assert happened == ["answer", "answer", "look", "answer", "look", "look"]
    assert registry.answered == [False] * 3  # they have been answered, with nothing: nothing was sent


def test_what_waits_for_an_answer_at_a_socket_is_forgotten_with_it() -> None:
    answered: list[str] = []
    registry = NotedRegistry(lambda: None)
    thread = PollThread(registry)

    def answer() -> None:
        if not answered:
            thread.remove(sock)
        answered.append("answer")

    sock = ScriptedSocket(answer)
    sock.arrive(ANSWERS + 4)
    thread.start()
    thread.add(sock)
    assert sock.closed.wait(scaled(20))
    thread.stop()
    registry.close()
    assert len(answered) == ANSWERS
