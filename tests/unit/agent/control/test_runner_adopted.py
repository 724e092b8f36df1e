"""The whole agent over a link that a live attach has brought."""

import os
import socket
import threading
from typing import List

from kineto_agent.control.link import Link
from kineto_agent.control.runner import Agent
from kineto_agent.protocol import wire
from kineto_agent.sources.python.stack_sampling import PythonStacksSource
from kineto_agent.steps.counting import StepCounter
from kineto_agent.system.threads import thread_names
from support.agent.agent_daemon import Connection
from support.waiting import scaled, until


def our_threads() -> List[str]:
    return [name for name in thread_names(100).values() if name.startswith("kineto-")]


def test_an_agent_over_an_adopted_link_ends_with_it() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection, ended = Connection(theirs), threading.Event()
    agent = Agent(StepCounter(), sources=lambda: [PythonStacksSource()], link=Link.adopted(ours), on_end=ended.set)
    agent.start()
    assert connection.expect(wire.Hello).pid == os.getpid()
    connection.collect()
    assert not ended.is_set()
    connection.close()
    assert ended.wait(scaled(20))
    until(lambda: our_threads() == [], "its threads have ended")
    assert ours.fileno() == -1


def test_an_agent_over_an_adopted_link_can_be_stopped() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(theirs)
    agent = Agent(StepCounter(), sources=lambda: [PythonStacksSource()], link=Link.adopted(ours))
    agent.start()
    connection.expect(wire.Hello)
    connection.collect()
    agent.stop("AGENT_STOPPED", "the test ends", timeout_s=20)
    assert connection.expect(wire.Result).reason_code == "AGENT_STOPPED"
    connection.expect_end()
    connection.close()
