"""A whole host of agents at once."""

from contextlib import ExitStack

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import RemoteAgent
from support.service.daemon import running_daemon, watch_to_end
from support.waiting import scaled

pytestmark = pytest.mark.slow

SECOND_NS = 10**9
AGENTS = 64


def test_a_capture_of_64_agents_at_once_loses_none() -> None:
    with running_daemon() as daemon, ExitStack() as stack:
        agents = [stack.enter_context(RemoteAgent(daemon.agent_socket)) for _ in range(AGENTS)]
        for agent in agents:
            agent.tell("hello")
            agent.tell("capture 20")  # waits for its Start by itself
        for agent in agents:
            assert agent.told() == "ok"
        stub = daemon.stub()
        assert stub.GetHost(pb.GetHostRequest(), timeout=scaled(10)).agents == AGENTS
        spec = pb.CaptureSpec(selector=pb.Selector(), duration_ns=SECOND_NS)
        created = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
        assert {target.pid for target in created.targets} == {agent.pid for agent in agents}
        capture = watch_to_end(stub, created.id, timeout_s=60)
        assert [pb.Verdict.Name(target.verdict) for target in capture.targets] == ["VERDICT_DONE"] * AGENTS
        assert [target.counts[0].records for target in capture.targets] == [20] * AGENTS
        assert all(len(target.files) == 1 for target in capture.targets)
