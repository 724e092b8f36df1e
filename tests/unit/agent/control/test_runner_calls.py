"""The agent tells its daemon of a call into a vendor's library that stands."""

from pathlib import Path
from typing import Any

from kineto_agent.control.runner import Agent
from kineto_agent.protocol import wire
from kineto_agent.sources.python.stack_sampling import PythonStacksSource
from kineto_agent.steps.counting import StepCounter
from support.agent.agent_daemon import Daemon, start_request


def test_a_call_that_stands_is_told_until_it_has_returned_also_to_the_next_daemon(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    daemon, since_ns = Daemon(path), [5]

    class Standing(PythonStacksSource):
        def prepare(self, request: Any) -> Any:
            request.tell_call("cuptiFinalize", lambda: since_ns[0])
            return super().prepare(request)

    agent = Agent(StepCounter(), lambda: [path], lambda: [Standing()])
    agent.start()
    try:
        connection, _hello = daemon.welcome()
        connection.send(start_request())
        connection.expect_state("WARMUP")
        told = connection.expect(wire.State)
        assert (told.capture_id, told.call, told.call_since_ns) == ("c1", "cuptiFinalize", 5)
        connection.close()
        connection, _hello = daemon.welcome()
        again = connection.expect(wire.State)
        assert (again.capture_id, again.call, again.call_since_ns) == ("c1", "cuptiFinalize", 5)
        since_ns[0] = 0
        returned = connection.expect(wire.State)
        assert (returned.capture_id, returned.call, returned.call_since_ns) == ("c1", "cuptiFinalize", 0)
    finally:
        agent.stop("AGENT_STOPPED", "the test is over")
        daemon.close()
