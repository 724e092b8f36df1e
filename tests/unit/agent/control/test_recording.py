"""What a recording adds to its sources at the end."""

import os
from typing import List, Tuple

import pytest
from kineto_agent.control.recording import Recording
from kineto_agent.protocol import wire
from kineto_agent.protocol.records import GRAPH_NODES_FORMAT, PYTHON_STACKS_FORMAT
from kineto_agent.sources.interface import SourceRequest, SourceSession
from kineto_agent.sources.registry import RecordingPlan, SourceChoice
from kineto_agent.sources.torch.graph_captures import CAPTURES
from support.agent.failing_source import Failing
from support.agent.session_events import timed

GRAPH = b"a captured graph"


class OfStacks(Failing):
    """A source without GPU activities."""

    def prepare(self, request: SourceRequest) -> SourceSession:
        session = super().prepare(request)
        session.format = PYTHON_STACKS_FORMAT
        return session


def announced(source: Failing) -> List[Tuple[wire.Arena, bytes]]:
    """The arenas of a whole recording, with the beginning of what is in them at the end."""
    found: List[Tuple[wire.Arena, int]] = []
    plan = RecordingPlan([SourceChoice(source, frozenset(("kernel",)))], [])
    recording = Recording(plan, timed().request)
    recording.start(lambda arena, descriptor: found.append((arena, descriptor)))
    recording.stop()
    data = [(arena, os.pread(fd, 1 << 20, 0)) for arena, fd in found]
    assert recording.problems == []
    recording.close()
    return data


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CAPTURES, "_kept", {GRAPH: None})
    monkeypatch.setattr(CAPTURES, "_left_out", {"why": 2})


@pytest.mark.usefixtures("captured")
def test_captured_graphs_go_with_every_recording_of_gpu_activities() -> None:
    for _ in range(2):
        (_, (graphs, data)) = announced(Failing(""))
        assert (graphs.source, graphs.format) == ("graphs", GRAPH_NODES_FORMAT)
        assert graphs.metadata == {"dtypes": [], "left_out": {"why": 2}}
        assert GRAPH in data


@pytest.mark.usefixtures("captured")
def test_captured_graphs_do_not_go_with_a_recording_without_gpu_activities() -> None:
    assert [arena.source for arena, _ in announced(OfStacks(""))] == ["failing"]


def test_a_process_without_captured_graphs_has_no_arena_for_them() -> None:
    assert [arena.source for arena, _ in announced(Failing(""))] == ["failing"]
