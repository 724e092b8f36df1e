"""For the tests with a real daemon."""

from collections.abc import Iterator

import pytest
from kineto_protos.services import ProfilerStub
from support.agent.scripted_agent import ScriptedAgent
from support.service.daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for all tests of a module, with the usual settings."""
    with running_daemon() as started:
        yield started


@pytest.fixture
def stub(daemon: Daemon) -> ProfilerStub:
    """A client of the module's daemon."""
    return daemon.stub()


@pytest.fixture
def agent(daemon: Daemon) -> Iterator[ScriptedAgent]:
    """One that is connected to the module's daemon."""
    with ScriptedAgent(daemon.agent_socket) as connected:
        connected.hello()
        yield connected
