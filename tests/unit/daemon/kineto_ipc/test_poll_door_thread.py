import asyncio
import os
import threading
from collections.abc import Callable

from kinetod.kineto_ipc import poll_door
from kinetod.kineto_ipc.poll_door import ANSWERS, PROCESS_BURST, USER_BURST, Newcomers, PollLimits, PollThread
from kinetod.kineto_ipc.poll_sockets import Datagram, Sender
from kinetod.kineto_ipc.poller_registry import Poll, PollAnswer, PollerRegistry
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


def test_a_user_with_very_many_newcomers_keeps_no_other_ones_waiting_or_out() -> None:
    poll = Poll(wants=0, job_id=0, pids=(1,))
    newcomers = Newcomers(most=4)
    eve, ada, bob = ([Sender(pid, uid, uid, b"\0a\0") for pid in range(6)] for uid in (61005, 61001, 61002))
    assert [newcomers.add(poll, each, float(at)) for at, each in enumerate(eve)] == [True] * 4 + [False] * 2
    assert newcomers.add(poll, ada[0], 7.0) and newcomers.add(poll, ada[1], 8.0)
    assert not newcomers.add(poll, ada[2], 9.0)
    assert newcomers.add(poll, bob[0], 10.0) and len(newcomers) == 4
    assert newcomers.next_since_s == 0.0
    assert [newcomers.take()[1] for _ in range(4)] == [eve[0], ada[0], bob[0], ada[1]]
    assert not newcomers


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


def test_a_libkineto_that_polls_every_5_s_is_never_limited() -> None:
    limits = PollLimits()
    assert all(limits.allows(1000, 7, now_s) for now_s in range(0, 3600, 5))


def test_a_process_that_floods_uses_up_only_what_is_its_own() -> None:
    limits = PollLimits()
    assert sum(limits.allows(1000, 7, 0.0) for _ in range(100_000)) == PROCESS_BURST
    assert limits.allows(1000, 8, 0.0)
    assert limits.allows(1001, 9, 0.0)


def test_a_user_with_many_processes_is_limited_and_others_are_not() -> None:
    limits = PollLimits()
    assert sum(limits.allows(1000, pid, 0.0) for pid in range(1, 10_000)) == USER_BURST
    assert limits.allows(1001, 20_000, 0.0)


def test_a_thousand_processes_may_start_at_once() -> None:
    limits = PollLimits()
    assert all(limits.allows(1000, pid, 0.0) for pid in range(1, 1001))


def test_a_limited_process_is_heard_again_after_a_while() -> None:
    limits = PollLimits()
    while limits.allows(1000, 7, 0.0):
        pass
    assert limits.allows(1000, 7, 0.3)


def test_what_is_remembered_is_bounded() -> None:
    limits = PollLimits()
    assert all(limits.allows(number, 1, 0.0) for number in range(1, 3 * poll_door.MAX_USERS))
    assert len(limits._users) == poll_door.MAX_USERS


def test_who_has_been_quiet_is_forgotten() -> None:
    limits = PollLimits()
    limits.allows(1000, 7, 0.0)
    limits.forget_quiet(60.0)
    assert limits._users == {}
