"""Captures that wait for the program's own profiler: what the daemon does, with an agent that does as it is told."""

import os
from collections.abc import Iterator

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import ScriptedAgent
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.waiting import scaled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    deadlines = ("--agent-deadline", "4s", "--process-deadline", "500ms")  # the agent of these tests is in time
    with running_daemon(*deadlines, "--max-duration", "1s") as started:
        yield started


def create(daemon: Daemon, *, wait: bool) -> pb.Capture:
    spec = pb.CaptureSpec(
        selector=pb.Selector(pids=[os.getpid()]),
        duration_ns=1_000_000,
        options=pb.Options(wait_for_user_profiler=wait),
    )
    capture: pb.Capture = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
    return capture


def test_a_profiler_that_does_not_end_is_waited_for_until_the_limit(daemon: Daemon, agent: ScriptedAgent) -> None:
    created = create(daemon, wait=True)
    assert agent.await_start().options == {"wait_for_user_profiler": True}
    agent.state("WAIT_FOR_REQUEST")
    (target,) = watch_to_end(daemon.stub(), created.id).targets
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "USER_PROFILER_ACTIVE")
    assert f"process {os.getpid()}'s own torch.profiler was still running after 1 s; trace again" in target.reason


def test_without_the_option_an_agent_that_only_waits_is_stuck(daemon: Daemon, agent: ScriptedAgent) -> None:
    created = create(daemon, wait=False)
    agent.await_start()
    agent.state("WAIT_FOR_REQUEST")
    (target,) = watch_to_end(daemon.stub(), created.id).targets
    assert target.reason_code == "AGENT_STUCK"
