"""The agent's thread, a source that conflicts with the program's own torch.profiler, and that profiler."""

import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, FrozenSet, Iterator, List

import pytest
from kineto_agent.control.runner import Agent
from kineto_agent.protocol import wire
from kineto_agent.sources.interface import SourceCounts, SourceOutcome, SourceRequest
from kineto_agent.sources.python.stack_sampling import PythonStacksSource
from kineto_agent.sources.torch import kineto_state
from kineto_agent.steps.counting import StepCounter
from support.agent.agent_daemon import Connection, Daemon, start_request
from support.waiting import scaled, until

HOUR_NS = 3600 * 10**9


class Profile:
    """As much of torch.autograd.profiler.profile as the guard touches."""

    def _prepare_trace(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass


PREPARE, EXIT = Profile._prepare_trace, Profile.__exit__


class Gpu:
    """A source that conflicts, and its one session; `calls` says what was asked of them."""

    name = "gpu"
    on_request: FrozenSet[str] = frozenset()
    format = "cupti/1"
    yields = True

    def __init__(self) -> None:
        self.calls: List[str] = []
        self.metadata: Dict[str, Any] = {}
        self.hold = threading.Event()  # start() waits for it
        self.hold.set()
        self.starting = threading.Event()
        self.lock = threading.Lock()  # as each session that yields: the program waits for a start in progress

    def activity_types(self) -> List[str]:
        return ["kernel"]

    def would_yield(self, request: SourceRequest) -> bool:
        return True

    def prepare(self, request: SourceRequest) -> "Gpu":
        self.calls.append("prepare")
        self.arena_fd = os.memfd_create("gpu") if hasattr(os, "memfd_create") else os.open("/dev/null", os.O_RDONLY)
        os.truncate(self.arena_fd, 8192)
        return self

    def start(self) -> None:
        with self.lock:
            self.starting.set()
            assert self.hold.wait(scaled(20))
            self.calls.append("start")

    def counts(self) -> SourceCounts:
        return SourceCounts(0, 0, 0)

    def stop(self) -> SourceOutcome:
        self.calls.append("stop")
        return SourceOutcome(SourceCounts(5, 50, 0), {}, [], detach_ns=0, cpu_ns=0)

    def give_way(self) -> None:
        with self.lock:
            self.calls.append("give way")

    def close(self) -> None:
        os.close(self.arena_fd)
        self.calls.append("close")


class Process:
    """An agent, its sources and its daemon. `kineto` is what Kineto's isActive says."""

    def __init__(self, path: str) -> None:
        self.daemon = Daemon(path)
        self.gpu = Gpu()
        self.counter = StepCounter()
        self.kineto = False
        sources: List[Any] = [self.gpu, PythonStacksSource()]
        self.agent = Agent(self.counter, lambda: [path], lambda: sources)
        self.agent.start()
        self.connection: Connection = self.daemon.welcome()[0]

    def capture(self, **changes: Any) -> None:
        fields = {"activity_types": ["kernel"], "duration_ns": HOUR_NS, **changes}
        self.connection.send(start_request(**fields))

    def result(self) -> wire.Result:
        result = self.connection.expect(wire.Result)
        self.connection.send(wire.Release("c1"))
        return result


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    module: Any = ModuleType("torch.autograd.profiler")
    module.profile = Profile
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    process = Process(str(tmp_path / "agent.sock"))
    monkeypatch.setattr(kineto_state, "active", lambda: process.kineto)
    yield process
    process.agent.stop("AGENT_STOPPED", "the test ends", timeout_s=20)
    assert not process.agent.alive
    process.daemon.close()
    assert (Profile._prepare_trace, Profile.__exit__) == (PREPARE, EXIT)


def test_what_conflicts_is_refused_while_it_is_active(process: Process) -> None:
    process.kineto = True
    process.capture()
    rejected = process.connection.expect(wire.Rejected)
    assert rejected.reason_code == "USER_PROFILER_ACTIVE"
    assert rejected.reason.startswith(
        "the program's own torch.profiler is warming up, and gpu cannot record at the same time;"
    )
    assert (process.gpu.calls, process.connection.states) == ([], [])
    process.capture(activity_types=["python_function"], duration_ns=1)
    assert process.result().outcome == "done"


def test_a_capture_waits_until_it_has_ended(process: Process) -> None:
    process.kineto = True
    process.capture(duration_ns=1, options={"wait_for_user_profiler": True})
    process.connection.expect_state("WAIT_FOR_REQUEST")
    until(lambda: Profile.__exit__ is not EXIT, "the agent listens for its end")
    process.kineto = False
    Profile().__exit__()
    assert process.result().outcome == "done"
    assert process.connection.states == ["WAIT_FOR_REQUEST", "WARMUP", "COLLECT", "PROCESS"]


def test_an_end_that_nobody_tells_is_found(process: Process) -> None:
    process.kineto = True
    process.capture(duration_ns=1, options={"wait_for_user_profiler": True})
    process.connection.expect_state("WAIT_FOR_REQUEST")
    process.kineto = False
    assert process.result().outcome == "done"


def test_a_waiting_capture_can_be_cancelled(process: Process) -> None:
    process.kineto = True
    process.capture(options={"wait_for_user_profiler": True})
    process.connection.expect_state("WAIT_FOR_REQUEST")
    process.connection.send(wire.Cancel("c1", False))
    assert process.result().outcome == "cancelled"
    assert process.gpu.calls == []
    until(lambda: Profile.__exit__ is EXIT, "the agent listens no more")


def test_a_capture_gives_way_before_it_begins(process: Process) -> None:
    process.capture()
    process.connection.expect_state("WARMUP")
    process.connection.expect_state("COLLECT")
    profile = Profile()
    before_ns = time.time_ns()
    profile._prepare_trace()
    assert process.gpu.calls[:3] == ["prepare", "start", "give way"]
    result = process.result()
    assert (result.outcome, result.reason_code) == ("partial", "USER_PROFILER_STARTED")
    assert result.window_start_ns < before_ns <= result.window_end_ns <= time.time_ns()
    assert result.sources["gpu"]["records"] == 5
    until(lambda: process.gpu.calls[-1] == "close", "the arena is closed")
    assert process.gpu.calls == ["prepare", "start", "give way", "stop", "close"]
    profile.__exit__()


def test_in_the_warm_up_it_leaves_nothing(process: Process) -> None:
    process.capture(warmup_ns=HOUR_NS)
    process.connection.expect_state("WARMUP")
    until(lambda: "start" in process.gpu.calls, "the source has started")
    Profile()._prepare_trace()
    result = process.result()
    assert (result.outcome, result.reason_code) == ("failed", "USER_PROFILER_STARTED")


def test_a_profiler_that_begins_during_the_start_waits_for_it(process: Process) -> None:
    process.gpu.hold.clear()
    process.capture()
    process.gpu.starting.wait(scaled(20))
    own = threading.Thread(target=lambda: Profile()._prepare_trace())
    own.start()
    process.gpu.hold.set()
    own.join()
    assert process.gpu.calls[:3] == ["prepare", "start", "give way"]
    assert process.result().reason_code == "USER_PROFILER_STARTED"


def test_a_profiler_that_is_first_by_a_moment_stays_alone(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = process.gpu.prepare

    def slow(request: SourceRequest) -> Gpu:
        process.kineto = True  # since the agent has looked
        return prepare(request)

    monkeypatch.setattr(process.gpu, "prepare", slow)
    process.capture()
    process.connection.expect_state("WARMUP")
    assert process.connection.expect(wire.Rejected).reason_code == "USER_PROFILER_ACTIVE"
    assert process.gpu.calls == ["prepare", "close"]
    assert process.connection.arenas == []


def test_sources_that_conflict_with_nothing_go_on_beside_it(process: Process) -> None:
    process.capture(activity_types=["python_function"], duration_ns=100_000_000)
    process.connection.expect_state("WARMUP")
    process.connection.expect_state("COLLECT")
    assert Profile._prepare_trace is PREPARE
    Profile()._prepare_trace()
    assert process.result().outcome == "done"


def test_a_kineto_that_began_unannounced_makes_the_trace_partial(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = process.gpu.start

    def then_kineto() -> None:
        start()
        process.kineto = True

    monkeypatch.setattr(process.gpu, "start", then_kineto)
    process.capture(duration_ns=1)
    result = process.result()
    assert (result.outcome, result.reason_code) == ("partial", "USER_PROFILER_STARTED")
    assert "Kineto began its own trace" in result.reason


def test_a_torch_that_is_imported_during_the_capture_is_heard_of_too(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["torch.autograd.profiler"]
    monkeypatch.delitem(sys.modules, "torch.autograd.profiler")
    process.capture()
    process.connection.expect_state("WARMUP")
    process.connection.expect_state("COLLECT")
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    until(lambda: Profile._prepare_trace is not PREPARE, "the agent has seen it")
    Profile()._prepare_trace()
    assert process.result().reason_code == "USER_PROFILER_STARTED"


def test_a_source_that_gave_way_covers_the_time_until_then(process: Process) -> None:
    process.capture()
    process.connection.expect_state("WARMUP")
    process.connection.expect_state("COLLECT")
    before_ns = time.time_ns()
    Profile()._prepare_trace()
    after_ns = time.time_ns()
    covered_ns = process.result().sources["gpu"]["metadata"]["covered_ns"]
    assert covered_ns[0] <= before_ns <= covered_ns[1] <= after_ns
