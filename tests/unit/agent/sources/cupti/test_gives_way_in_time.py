"""The program's own profiler waits for a call of CUPTI that is in progress, but not without a limit."""

import threading
from typing import Any, List

import pytest
from kineto_agent.sources.cupti import gpu_activities
from kineto_agent.sources.cupti.gpu_activities import CuptiSession
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceRequest
from kineto_agent.sources.kit.limits import STOP_LIMIT_MS
from support.waiting import scaled


class Counts:
    """What CollectorResult has."""

    counts = SourceCounts(0, 0, 0)
    timed_out = calls_unnamed = names_lost = irregular_records = withheld = flush_result = flushes = cpu_ns = 0


class Collector:
    """Notes its calls. The first call of CUPTI returns once `gpu_is_empty` is set."""

    def __init__(self) -> None:
        self.calls: List[str] = []
        self.inside, self.gpu_is_empty = threading.Event(), threading.Event()

    def subscribe(self) -> int:
        self.inside.set()
        self.gpu_is_empty.wait(scaled(20))
        self.calls.append("subscribe")
        return 0

    def stop(self, limit_ms: int) -> Counts:
        self.calls.append("stop within %d ms" % limit_ms)
        return Counts()

    def others(self) -> Any:
        return type("Others", (), {"time_ns": 0})

    def result_text(self, _result: int) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: self.calls.append(name)


def session(collector: Any) -> CuptiSession:
    request = SourceRequest(frozenset(("kernel",)), 1 << 20, {}, named=True)
    return CuptiSession(collector, -1, {"cupti_version": 28, "cupti_library": ""}, request, 1000)


def test_a_start_that_is_stuck_in_cupti_is_not_waited_for_and_releases_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_activities, "GIVE_WAY_LIMIT_MS", 1)
    collector, errors = Collector(), []
    starting = session(collector)

    def start() -> None:
        try:
            starting.start()
        except SourceError as error:
            errors.append(error.reason_code)

    thread = threading.Thread(target=start)
    thread.start()
    collector.inside.wait(scaled(20))
    starting.give_way()  # returns although the GPU is not empty
    assert set(collector.calls) <= {"hurry"}
    collector.gpu_is_empty.set()
    thread.join()
    assert [call for call in collector.calls if call != "hurry"] == [
        "subscribe",
        "stop within 1 ms",
        "yield_subscriber",
    ]
    assert errors == ["USER_PROFILER_STARTED"]


def test_a_session_that_gave_way_before_its_start_does_not_start() -> None:
    collector = Collector()
    given = session(collector)
    given.give_way()
    with pytest.raises(SourceError, match=r"the program's own torch\.profiler started"):
        given.start()
    assert collector.calls == []


def test_a_process_that_exits_is_not_detached_from() -> None:
    collector = Collector()
    collector.gpu_is_empty.set()
    ending = session(collector)
    ending.hurry()
    ending.stop()
    assert collector.calls == ["hurry", "stop within %d ms" % STOP_LIMIT_MS]
