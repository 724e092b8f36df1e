"""What a recording adds to its sources."""

import os
import threading
from typing import List, Tuple

import pytest
from kineto_agent.control.recording import IterationCounts, Recording
from kineto_agent.protocol import wire
from kineto_agent.protocol.records import GRAPH_NODES_FORMAT, PYTHON_STACKS_FORMAT, STEP_MARK
from kineto_agent.sources.interface import SourceRequest, SourceSession
from kineto_agent.sources.registry import RecordingPlan, SourceChoice
from kineto_agent.sources.torch.graph_captures import CAPTURES
from kineto_agent.sources.torch.profiler_guard import ProfilerGuard
from kineto_agent.steps.counting import StepCounter
from support.agent.agent_daemon import ArenaReader
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


def test_a_program_that_runs_ahead_of_the_agent_in_its_first_iterations_has_all_of_them_marked() -> None:
    """Its first iteration wakes the agent's thread, which may run only when the second or a later one has begun."""
    counter, readers = StepCounter(), []

    def announce(arena: wire.Arena, descriptor: int) -> None:
        if arena.source == "steps":
            readers.append(ArenaReader(os.dup(descriptor)))

    plan = RecordingPlan([SourceChoice(Failing(""), frozenset(("kernel",)))], [])
    recording = Recording(plan, timed().request, iterations=IterationCounts(counter, lambda: None))
    recording.start(announce)
    for _ in range(3):
        counter.step()
    recording.mark_iterations()
    recording.stop()
    (reader,) = readers
    assert [number for _, number, _, _ in STEP_MARK.iter_unpack(b"".join(reader.take()))] == [1, 2, 3]
    reader.close()
    recording.close()


def test_a_profiler_of_the_program_does_not_wait_for_a_source_that_starts() -> None:
    free: List[bool] = []
    guard = ProfilerGuard()

    def take() -> None:
        free.append(guard.lock.acquire(blocking=False))
        if free[-1]:
            guard.lock.release()

    def take_elsewhere() -> None:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    class Starting(Failing):
        def prepare(self, request: SourceRequest) -> SourceSession:
            session = super().prepare(request)
            session.start = take_elsewhere  # type: ignore[method-assign]
            return session

    plan = RecordingPlan([SourceChoice(Starting(""), frozenset(("kernel",)))], [])
    recording = Recording(plan, timed().request, guard)
    recording.start(lambda _arena, _descriptor: None)
    recording.close()
    assert free == [True]


def test_an_exit_waits_only_until_nothing_records_any_more() -> None:
    hurried: List[str] = []
    plan = RecordingPlan([SourceChoice(Failing(""), frozenset(("kernel",)))], [])
    recording = Recording(plan, timed().request)
    recording.start(lambda _arena, _descriptor: None)
    recording._running[0].session.hurry = lambda: hurried.append("hurried")  # type: ignore[attr-defined]
    recording.hurry()
    assert (recording.await_end(0), hurried) == (False, ["hurried"])
    recording.stop()
    assert recording.await_end(0)
    recording.close()
