"""One user fills the store; what others have in it stays. At a real daemon of root."""

import os
from collections.abc import Iterator

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import RemoteAgent
from support.service.calls_as import OK, CallsAs, plain_python
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")]

ADA, BOB = 61001, 61002
STORE_BYTES = 168 << 10  # a capture of these takes 8 KiB, a share is five of them and a little


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(environ={"KINETOD_STORE_MAX_BYTES": str(STORE_BYTES)}) as started:
        started.root.chmod(0o755)
        yield started


class User:
    """A user with a process."""

    def __init__(self, daemon: Daemon, calls: CallsAs, agent: RemoteAgent) -> None:
        self.daemon, self.calls, self.agent = daemon, calls, agent
        agent.do("hello")

    def capture(self) -> str:
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[self.agent.pid]), duration_ns=10**9, no_attach=True)
        self.agent.tell("capture")
        made = self.calls.call(self.daemon.address, "CreateCapture", pb.CreateCaptureRequest(spec=spec)).only
        assert self.agent.told() == "ok"
        watch_to_end(self.daemon.stub(), made.id)
        return str(made.id)

    def captures(self) -> list[pb.Capture]:
        request = pb.ListCapturesRequest(page_size=1000)
        return list(self.calls.call(self.daemon.address, "ListCaptures", request).only.captures)

    def pins(self, capture_id: str) -> str:
        """OK, or the reason why not."""
        request = pb.PinCaptureRequest(id=capture_id, pinned=True)
        answer = self.calls.call(self.daemon.address, "PinCapture", request)
        return answer.code if answer.code == OK else answer.reason


@pytest.fixture
def users(daemon: Daemon) -> Iterator[tuple[User, User]]:
    with (
        CallsAs(ADA) as ada,
        CallsAs(BOB) as bob,
        RemoteAgent(daemon.agent_socket, python=plain_python(ADA)) as adas,
        RemoteAgent(daemon.agent_socket, python=plain_python(BOB)) as bobs,
    ):
        yield User(daemon, ada, adas), User(daemon, bob, bobs)


def test_who_fills_the_store_pays_for_it_alone(daemon: Daemon, users: tuple[User, User]) -> None:
    ada, bob = users
    kept = bob.capture()  # the oldest of all
    first = ada.capture()
    made = 1
    while any(each.id == first for each in ada.captures()):
        ada.capture()
        made += 1
        assert made < 60
    assert [each.id for each in bob.captures()] == [kept]

    def stored() -> int:
        listed = daemon.stub().ListCaptures(pb.ListCapturesRequest(page_size=1000), timeout=10).captures
        return sum(each.local_bytes for each in listed)

    until(lambda: stored() <= STORE_BYTES, "the store is within its limit")


def test_nobody_pins_more_than_a_share_and_is_then_refused_captures(users: tuple[User, User]) -> None:
    ada, bob = users
    pins: list[str] = []
    while not pins or pins[-1] == OK:
        pins.append(ada.pins(ada.capture()))
        assert len(pins) < 40
    assert pins[-1] == "QUOTA_EXCEEDED"
    pinned = [each for each in ada.captures() if each.pinned]
    assert len(pinned) >= 1 and sum(each.local_bytes for each in pinned) <= STORE_BYTES // 4
    assert bob.pins(bob.capture()) == OK
