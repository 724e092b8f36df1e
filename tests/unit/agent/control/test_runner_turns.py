"""When the thread that sees to the agent's turns with the GIL begins and ends."""

import ctypes
import sys
from pathlib import Path
from typing import Any, Callable, List

import pytest
from kineto_agent.control import runner
from kineto_agent.control.runner import Agent
from kineto_agent.sources import collector_library
from kineto_agent.steps.counting import StepCounter
from kineto_agent.system.gil_turns import Turns
from kineto_agent.system.threads import Thread, start_thread
from support.waiting import until

pytestmark = pytest.mark.skipif("t" in sys.abiflags, reason="there is no GIL to get")


def names() -> List[str]:
    """Of all threads of this process that live."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found.append((task / "comm").read_text().strip())
        except OSError:  # it has ended
            continue
    return found


@pytest.fixture
def agent() -> Agent:
    turns = Turns(library=collector_library.path())
    return Agent(StepCounter(), candidates=tuple, on_end=turns.end, turns=turns)


def ended() -> bool:
    """Whether no such thread is left."""
    return "kineto-turns" not in names()


def told(turns: Turns) -> int:
    """Which thread the agent's is; 0: it has not said so."""
    return ctypes.c_uint.from_address(turns._address + 20).value


def test_it_is_there_before_the_agents_thread_needs_the_gil(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def start(name: str, target: Callable[[], None]) -> Thread:
        until(lambda: "kineto-turns" in names(), "it has its name")
        found.append(told(agent.turns))
        return start_thread(name, target)

    monkeypatch.setattr(runner, "start_thread", start)
    agent.start()
    assert found == [0]
    thread: Any = agent._thread
    until(lambda: told(agent.turns) == thread.native_id != 0, "the agent says which thread it is")
    agent.stop("AGENT_STOPPED", "")
    until(ended, "it has ended")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_it_ends_where_the_agents_thread_cannot_start(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, error: type
) -> None:
    def start(name: str, target: Callable[[], None]) -> Thread:
        raise error

    monkeypatch.setattr(runner, "start_thread", start)
    with pytest.raises(error):
        agent.start()
    until(ended, "it has ended")


def test_an_agent_that_is_stopped_while_it_starts_leaves_none(agent: Agent) -> None:
    agent.start()
    agent.turns.end()
    agent.stop("TARGET_EXITING", "")
    until(ended, "it has ended")
