"""Captures one after another over one agent."""

import threading
from pathlib import Path

from kineto_agent.control.runner import Agent
from kineto_agent.protocol import wire
from kineto_agent.sources.python.stack_sampling import PythonStacksSource
from kineto_agent.steps.counting import StepCounter
from support.agent.agent_daemon import Daemon, start_request
from support.waiting import until


def test_iterations_are_compared_with_none_of_an_earlier_capture(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    daemon, counter, over = Daemon(path), StepCounter(), threading.Event()
    agent = Agent(counter, lambda: [path], lambda: [PythonStacksSource()])

    def train() -> None:
        while not over.wait(0.001):
            counter.step()

    trainer = threading.Thread(target=train)
    trainer.start()
    agent.start()
    try:
        connection = daemon.welcome()[0]
        until(lambda: counter.count > 20, "the training has begun")
        connection.send(start_request())
        ended_ns = connection.expect(wire.Result).window_end_ns
        connection.send(wire.Release("c1"))
        connection.send(start_request("c2"))
        window_start_ns = connection.expect(wire.Result).window_start_ns
        assert sum(agent._steps_before_ns) <= window_start_ns - ended_ns
    finally:
        over.set()
        trainer.join()
        agent.stop("AGENT_STOPPED", "the test ends", timeout_s=20)
        daemon.close()
