"""The whole agent with plug-ins that its daemon sends."""

import sys
import threading
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest
from kineto_agent.control.runner import Agent
from kineto_agent.protocol import wire
from kineto_agent.protocol.records import DECLARED_FORMAT, PYTHON_STACKS_FORMAT
from kineto_agent.sources import registry
from kineto_agent.sources.plugins.installed import PLUGINS
from kineto_agent.sources.plugins.worker import PluginWorker
from kineto_agent.sources.python.stack_sampling import PythonStacksSource
from kineto_agent.steps.counting import StepCounter
from support.agent.agent_daemon import Connection, Daemon, start_request
from support.agent.plugins import bad, plugin, sealed, sealed_bytes


class Peer:
    """A daemon with plug-ins, and an agent with Python stacks beside them."""

    def __init__(self, path: str) -> None:
        stacks = PythonStacksSource()
        self.daemon = Daemon(path)
        self.agent = Agent(StepCounter(), lambda: [path], lambda: [*registry._plugins(), stacks])

    def connect(self, *sources: str) -> Connection:
        """Starts the agent and sends it a plug-in with each of these source files: toy, toyb, ..."""
        self.agent.start()
        connection, hello = self.daemon.welcome()
        assert (hello.plugins, hello.sources) == (wire.PLUGIN_INTERFACE, {"python_stacks": ["python_function"]})
        self.send(connection, *sources)
        return connection

    def send(self, connection: Connection, *sources: str) -> wire.Hello:
        names = ["toy" + letter for letter in ("", "b", "c")[: len(sources)]]
        made = [
            plugin(source.replace("toy_kernel", name + "_kernel"), name=name) for name, source in zip(names, sources)
        ]
        connection.send_with(wire.Plugins(repr(sources), names), sealed(made))
        connection.send(wire.Describe())
        return connection.expect(wire.Hello)


@pytest.fixture
def peer(tmp_path: Path, soon_back: None) -> Iterator[Peer]:
    peer = Peer(str(tmp_path / "agent.sock"))
    yield peer
    peer.agent.stop("AGENT_STOPPED", "the test ends", timeout_s=20)
    if peer.daemon.listener.fileno() >= 0:
        peer.daemon.close()
    PLUGINS.forget()


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    event = threading.Event()
    monkeypatch.setattr(sys, "toy_leave", event, raising=False)
    yield event
    event.set()


GOOD = bad("give_way", "pass")
HANGS = "import sys; sys.toy_leave.wait(600)"


def everything(capture_id: str = "c1", types: "List[str] | None" = None) -> wire.Start:
    return start_request(capture_id, activity_types=types or [])


def recorded(connection: Connection, request: wire.Start) -> wire.Result:
    connection.send(request)
    result = connection.expect(wire.Result)
    connection.send(wire.Release(request.capture_id))
    return result


def test_what_a_plug_in_records_goes_with_its_schema(peer: Peer) -> None:
    connection = peer.connect(GOOD)
    connection.send(everything())
    arenas = [connection.receive() for _ in range(4)]  # among two states
    found = {message.source: message for message in arenas if isinstance(message, wire.Arena)}
    assert {name: arena.format for name, arena in found.items()} == {
        "toy": DECLARED_FORMAT,
        "python_stacks": PYTHON_STACKS_FORMAT,
    }
    assert list(found["toy"].metadata["schema"]["types"]) == ["toy_kernel"]
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("done", "")
    assert result.sources["toy"]["records"] == 3
    (records,) = connection.arenas[0].take()
    assert len(records) == 96


def test_a_type_of_a_plug_in_can_be_named(peer: Peer) -> None:
    connection = peer.connect(GOOD, GOOD)
    result = recorded(connection, everything(types=["toyb_kernel"]))
    assert (result.outcome, list(result.sources)) == ("done", ["toyb"])


def test_the_capture_goes_on_without_one_that_hangs(
    peer: Peer, leave: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = PluginWorker.call

    def impatient(worker: PluginWorker, what: str, function: Callable[[], Any], deadline_s: float) -> Any:
        return call(worker, what, function, 0.2 if (worker.name, what) == ("toy", "stop()") else deadline_s)

    monkeypatch.setattr(PluginWorker, "call", impatient)
    connection = peer.connect(bad("stop", HANGS), GOOD)
    result = recorded(connection, everything())
    text = "toy: stop(): did not return within 0.2 s; this plug-in is not used again in this process"
    assert (result.outcome, result.reason_code, result.reason) == ("partial", "PLUGIN_TIMEOUT", text)
    assert sorted(result.sources) == ["python_stacks", "toyb"]
    (records,) = connection.arenas[0].take()
    assert len(records) == 96  # what it had recorded by then is kept
    later = recorded(connection, everything("c2"))
    assert (later.outcome, later.reason_code) == ("partial", "PLUGIN_TIMEOUT")
    assert sorted(later.sources) == ["python_stacks", "toyb"]
    assert later.not_recorded == {}
    assert recorded(connection, everything("c3", ["python_function"])).outcome == "done"


def test_a_capture_of_nothing_but_a_plug_in_that_fails_says_why(peer: Peer) -> None:
    connection = peer.connect(bad("prepare", "raise SystemExit"), GOOD)
    result = recorded(connection, everything(types=["toy_kernel"]))
    assert (result.outcome, result.reason_code) == ("failed", "PLUGIN_FAILED")
    assert result.reason == "toy: prepare(): raised SystemExit: "
    assert result.not_recorded == {"toy_kernel": "toy: prepare(): raised SystemExit: "}


def test_content_that_is_damaged_costs_the_plug_ins_only(peer: Peer) -> None:
    peer.agent.start()
    connection, _ = peer.daemon.welcome()
    connection.send_with(wire.Plugins("damaged", ["toy"]), sealed_bytes(b"nonsense"))
    assert recorded(connection, everything()).outcome == "done"


def test_a_daemon_that_has_no_plug_ins_takes_them_back(peer: Peer) -> None:
    connection = peer.connect(GOOD)
    connection.send(wire.Describe())
    assert sorted(connection.expect(wire.Hello).sources) == ["python_stacks", "toy"]
    connection.close()
    again, _ = peer.daemon.welcome()
    again.send(wire.Describe())
    assert list(again.expect(wire.Hello).sources) == ["python_stacks"]
