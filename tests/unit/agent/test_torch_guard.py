"""torch.profiler gets CUPTI's subscriber when it asks, and its class is as before afterwards."""

import sys
import threading
from types import ModuleType
from typing import Any, List

import pytest
from kineto_agent.sources.torch_guard import ProfilerGuard
from support.collector import calling, fake_cuda, recording, request, source


def prepare(profile: Any, what: str) -> str:
    profile.seen.append("prepare " + what)
    return "prepared"


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of torch.autograd.profiler as the guard touches."""

    class Profile:
        def __init__(self, seen: List[str]) -> None:
            self.seen = seen

        _prepare_trace = prepare

    module: Any = ModuleType("torch.autograd.profiler")
    module.profile = Profile
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    return module


def test_it_is_called_before_the_profiler_prepares(profiler: Any) -> None:
    seen: List[str] = []
    guard = ProfilerGuard(lambda: seen.append("yield"))
    guard.install()
    answer = profiler.profile(seen)._prepare_trace("gpu")
    guard.remove()
    assert (answer, seen) == ("prepared", ["yield", "prepare gpu"])


def test_the_class_is_as_before_once_it_is_removed(profiler: Any) -> None:
    guard = ProfilerGuard(lambda: None)
    guard.install()
    assert profiler.profile.__dict__["_prepare_trace"] is not prepare
    guard.remove()
    assert profiler.profile.__dict__["_prepare_trace"] is prepare


def test_a_wrapper_of_somebody_else_stays_and_works(profiler: Any) -> None:
    seen: List[str] = []
    guard = ProfilerGuard(lambda: seen.append("yield"))
    guard.install()
    ours = profiler.profile._prepare_trace
    profiler.profile._prepare_trace = lambda self, what: ours(self, what)
    guard.remove()
    assert profiler.profile(seen)._prepare_trace("gpu") == "prepared"
    assert seen == ["prepare gpu"]


def test_without_torch_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.autograd.profiler", raising=False)
    guard = ProfilerGuard(lambda: None)
    guard.install()
    guard.remove()


def test_a_profiler_that_starts_meanwhile_waits_for_the_start_of_the_recording(profiler: Any) -> None:
    cuda = fake_cuda()
    session = source(detach_limit_ms=5000).prepare(request(["kernel", "cuda_runtime"]))
    own = threading.Thread(target=lambda: profiler.profile([])._prepare_trace("gpu"))
    start_collector = session._collector.start

    def start_in_the_middle(kinds: Any) -> Any:
        own.start()
        return start_collector(kinds)

    session._collector.start = start_in_the_middle  # type: ignore[method-assign]
    try:
        session.start()
        own.join()
        assert not cuda.subscribed
        warnings = session.stop().warnings
    finally:
        del session._collector.start
        session.close()
    assert [warning[:39] for warning in warnings] == ["torch.profiler started in this process "]


def test_a_recording_lets_go_of_the_subscriber_for_the_profiler(profiler: Any) -> None:
    cuda = fake_cuda()
    with recording(["kernel", "cuda_runtime"], detach_limit_ms=5000) as (session, reader):
        cuda.launch(count=2)
        profiler.profile([])._prepare_trace("gpu")
        assert not cuda.subscribed
        cuda.launch(count=3)
        with calling(cuda):
            outcome = session.stop()
        records = reader.records()
    assert {kind: len(found) for kind, found in records.items()} == {5: 2, 10: 5}
    assert [warning[:58] for warning in outcome.warnings] == [
        "torch.profiler started in this process during the capture "
    ]
    assert outcome.detach_ns == 0
    assert profiler.profile.__dict__["_prepare_trace"] is prepare
