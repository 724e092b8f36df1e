"""Two users of a daemon, each with a process. Needs root."""

import contextlib
from collections.abc import Iterator

from kineto_protos.v1 import profiler_pb2 as pb

from support.agent.scripted_agent import RemoteAgent
from support.service.calls_as import OK, Answer, CallsAs, plain_python
from support.service.daemon import Daemon, watch_to_end

ADA, BOB = 61001, 61002
SECOND_NS = 10**9


class User:
    """A user with a process."""

    def __init__(self, daemon: Daemon, calls: CallsAs, agent: RemoteAgent) -> None:
        self.daemon, self.calls, self.agent = daemon, calls, agent
        agent.do("hello")

    def create(self, **more: object) -> Answer:
        """Asks for a capture of the own process."""
        pids = pb.Selector(pids=[self.agent.pid])
        spec = pb.CaptureSpec(**{"selector": pids, "duration_ns": SECOND_NS, "no_attach": True, **more})  # type: ignore[arg-type]
        return self.calls.call(self.daemon.address, "CreateCapture", pb.CreateCaptureRequest(spec=spec))

    def capture(self, **more: object) -> str:
        """The id of a capture that is DONE."""
        self.agent.tell("capture")
        made = self.create(**more).only
        assert self.agent.told() == "ok"
        watch_to_end(self.daemon.stub(), made.id)
        return str(made.id)

    def captures(self) -> list[pb.Capture]:
        """All of this user's."""
        request = pb.ListCapturesRequest(page_size=1000)
        return list(self.calls.call(self.daemon.address, "ListCaptures", request).only.captures)

    def pins(self, capture_id: str) -> str:
        """OK, or the reason why not."""
        request = pb.PinCaptureRequest(id=capture_id, pinned=True)
        answer = self.calls.call(self.daemon.address, "PinCapture", request)
        return answer.code if answer.code == OK else answer.reason


@contextlib.contextmanager
def two_users(daemon: Daemon) -> Iterator[tuple[User, User]]:
    """Ada and Bob."""
    daemon.root.chmod(0o755)
    with (
        CallsAs(ADA) as ada,
        CallsAs(BOB) as bob,
        RemoteAgent(daemon.agent_socket, python=plain_python(ADA)) as adas,
        RemoteAgent(daemon.agent_socket, python=plain_python(BOB)) as bobs,
    ):
        yield User(daemon, ada, adas), User(daemon, bob, bobs)
