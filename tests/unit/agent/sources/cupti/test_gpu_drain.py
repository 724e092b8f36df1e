"""What is said where CUPTI would wait for the GPU, before it is used and when it would be taken out."""

from __future__ import annotations  # the agent's tests run under 3.9

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from kineto_agent.sources.cupti import collector_binding, gpu_drain
from kineto_agent.sources.cupti.collector_binding import Collector, DetachResult, DrainResult
from kineto_agent.sources.interface import SourceError
from support.agent.collector import fake_cuda, own_warnings, recording, request, source


class Torch:
    """A torch that has initialised CUDA, and says which streams it was asked for."""

    def __init__(self, devices: int, *, initialised: bool = True) -> None:
        self.asked: list[int] = []
        self.cuda = self
        self.device_count = lambda: devices
        self.is_initialized = lambda: initialised

    def Stream(self, *, stream_id: int, device_index: int, device_type: int) -> Any:
        self.asked.append(stream_id)
        return SimpleNamespace(cuda_stream=0 if stream_id == 3 else device_type << 40 | device_index << 32 | stream_id)


@pytest.mark.parametrize(
    ("outcome", "code", "why"),
    [
        (
            collector_binding.DOES_NOT_DRAIN,
            "GPU_DOES_NOT_DRAIN",
            "CUPTI was not used: the GPU has been busy for 2.5 s without a break, and",
        ),
        (
            collector_binding.CAPTURING,
            "GPU_DOES_NOT_DRAIN",
            "CUPTI was not used: the program keeps capturing CUDA graphs, so it",
        ),
        (
            collector_binding.UNANSWERED,
            "CUDA_DOES_NOT_ANSWER",
            "CUPTI was not used: the CUDA driver is not responding to the agent (for example",
        ),
        (collector_binding.CALLED, "GPU_DOES_NOT_DRAIN", "CUPTI's first call has not returned"),
    ],
)
def test_a_capture_leaves_cupti_alone_and_says_why(
    monkeypatch: pytest.MonkeyPatch, outcome: int, code: str, why: str
) -> None:
    fake_cuda()
    monkeypatch.setattr(Collector, "drain", lambda *_: DrainResult(outcome, 0, 0, 2_500_000_000))
    with pytest.raises(SourceError) as caught:
        source().prepare(request())
    assert (caught.value.reason_code, caught.value.reason[: len(why)]) == (code, why)


@pytest.mark.parametrize("outcome", [collector_binding.SHORT, collector_binding.SOON, collector_binding.UNKNOWN])
def test_otherwise_it_tells_how_long_the_queue_was(monkeypatch: pytest.MonkeyPatch, outcome: int) -> None:
    fake_cuda()
    monkeypatch.setattr(Collector, "drain", lambda *_: DrainResult(outcome, 0, 5, 7))
    with recording(["kernel"]) as (session, _):
        assert (session.metadata["cupti_moment_ns"], session.metadata["gpu_queued_ns"]) == (5, 7)


@pytest.mark.parametrize(("wanted", "code"), [(False, "GPU_DOES_NOT_DRAIN"), (True, "USER_PROFILER_STARTED")])
def test_a_start_without_a_moment_says_who_ended_it(monkeypatch: pytest.MonkeyPatch, wanted: bool, code: str) -> None:
    fake_cuda()
    session = source().prepare(request())

    def refuse(_: Collector) -> int:
        session._wanted = wanted
        raise collector_binding.busy(collector_binding.DOES_NOT_DRAIN)

    monkeypatch.setattr(Collector, "subscribe", refuse)
    with pytest.raises(SourceError) as caught:
        session.start()
    session.close()
    assert caught.value.reason_code == code


def test_a_detach_that_would_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda()
    busy = DetachResult(collector_binding.BUSY, collector_binding.DOES_NOT_DRAIN, 1_500_000_000)
    monkeypatch.setattr(Collector, "detach", lambda *_: busy)
    with recording(["kernel"]) as (session, _):
        outcome = session.stop()
    (warning,) = own_warnings(outcome.warnings)
    assert warning.startswith(
        "stayed attached: the GPU has been busy for 1.5 s without a break, and detaching CUPTI would"
    )
    assert (outcome.incomplete, outcome.detach_ns) == ("", 0)


def test_a_capture_after_which_the_program_stands_in_cupti_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda()
    monkeypatch.setattr(Collector, "detach", lambda *_: DetachResult(collector_binding.STUCK, 0, 0))
    with recording(["kernel"]) as (session, _):
        outcome = session.stop()
    assert outcome.incomplete.startswith("cuptiFinalize has not returned: a thread of the program is blocked in it")


def test_that_holds_too_where_another_profiler_waits_for_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda()
    monkeypatch.setattr(Collector, "detach", lambda *_: DetachResult(collector_binding.STUCK, 0, 0))
    with recording(["kernel"]) as (session, _):
        session._wanted = True
        warning = session._detach_warning(session._collector.detach(0))
        assert warning.startswith("stayed attached: cuptiFinalize has not returned")
        assert session._incomplete


def test_how_much_work_may_be_waited_for_is_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda()
    limits: list[int] = []
    drain = Collector.drain

    def noted(collector: Collector, limit_ms: int, streams: Any) -> DrainResult:
        limits.append(limit_ms)
        return drain(collector, limit_ms, streams)

    monkeypatch.setattr(Collector, "drain", noted)
    source().prepare(request()._replace(gpu_drain_ms=45)).close()
    source().prepare(request()).close()
    assert limits == [45, 300]


def test_the_streams_of_torchs_pools_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(2)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert len(set(gpu_drain._streams_of_torch())) == 2 * 63  # without the one that has no handle
    assert sorted(set(torch.asked)) == sorted([*range(3, 3 + 32 * 32, 32), *range(5, 5 + 32 * 32, 32)])


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), Torch(2, initialised=False), Torch(0)])
def test_where_torch_does_not_say_no_stream_is_known(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert gpu_drain._streams_of_torch() == []
