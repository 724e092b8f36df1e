"""A CUPTI recording is over before the program's own Kineto begins, and takes nothing from it afterwards."""

import threading
from pathlib import Path
from typing import Any, Callable, List

import pytest
from kineto_agent.sources.cupti import gpu_activities
from kineto_agent.sources.cupti.gpu_activities import CuptiSession
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.kit import limits
from support.agent.collector import LONG_MS, calling, fake_cuda, maps_with, own_warnings, recording, request, source
from support.waiting import scaled, until

LIMIT_MS = 200
STAYS = "stayed attached: the program's own torch.profiler started and is using CUPTI now"


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector's thread gets to run while the program is held up, however busy the machine is."""
    assert limits.GIVE_WAY_LIMIT_MS == LIMIT_MS
    monkeypatch.setattr(gpu_activities, "GIVE_WAY_LIMIT_MS", int(scaled(20_000)))


def test_it_stops_and_lets_go_of_the_subscriber() -> None:
    cuda = fake_cuda()
    misused = cuda.misused
    with recording(["kernel", "cuda_runtime"], detach_limit_ms=LONG_MS) as (session, reader):
        cuda.launch(count=2)
        session.give_way()
        assert not cuda.subscribed
        cuda.kineto_begin()
        cuda.launch(count=3)
        with calling(cuda):
            outcome = session.stop()
        assert cuda.kineto_end() == 3
        records = reader.records()
    assert {kind: len(found) for kind, found in records.items()} == {5: 2, 10: 2}
    assert outcome.counts.records == 4
    assert [warning[: len(STAYS)] for warning in own_warnings(outcome.warnings)] == [STAYS]
    assert outcome.detach_ns == 0
    assert cuda.misused == misused


def test_without_the_subscriber_it_gives_way_too(tmp_path: Path) -> None:
    cuda = fake_cuda(subscribe_result=39)
    misused = cuda.misused
    with recording(named=False, maps=maps_with(tmp_path, "libtorch_cpu.so")) as (session, reader):
        cuda.launch(count=2)
        session.give_way()
        cuda.kineto_begin()
        cuda.launch(count=3)
        session.stop()
        session.close()
        assert cuda.kineto_end() == 3
        assert {kind: len(found) for kind, found in reader.records().items()} == {10: 2}
    assert cuda.misused == misused


def test_giving_way_again_or_after_the_end_does_nothing() -> None:
    cuda = fake_cuda()
    with recording(detach_limit_ms=LONG_MS) as (session, _):
        cuda.launch(count=2)
        session.give_way()
        session.give_way()
        counts = session.counts()
        assert counts == session.stop().counts
        assert counts.records > 0
        session.give_way()
    session.give_way()


def test_a_recording_that_had_stopped_keeps_what_it_said() -> None:
    cuda = fake_cuda()
    with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _):
        cuda.launch()
        with calling(cuda):
            outcome = session.stop()
        session.give_way()
        assert own_warnings(outcome.warnings) == []
        assert outcome.detach_ns > 0


def test_a_recording_that_has_not_started_does_not_start_any_more() -> None:
    fake_cuda()
    session = source().prepare(request(["kernel"]))
    session.give_way()
    with pytest.raises(SourceError) as caught:
        session.start()
    session.close()
    assert caught.value.reason_code == "USER_PROFILER_STARTED"


def beside(session: CuptiSession, name: str, call: Callable[[], Any]) -> List[Any]:
    """Another thread gives way while the collector's function `name` runs for `call`."""
    order: List[Any] = []
    inside = threading.Event()
    original = getattr(session._collector, name)

    def give_way() -> None:
        inside.wait()
        session.give_way()
        order.append("gave way")

    def slow(*arguments: Any) -> Any:
        inside.set()
        answer = original(*arguments)
        order.append(name)
        return answer

    thread = threading.Thread(target=give_way)
    thread.start()
    setattr(session._collector, name, slow)
    try:
        order.append(call())
        thread.join()
    finally:
        delattr(session._collector, name)
    return order


def test_it_waits_for_a_start_that_is_under_way() -> None:
    cuda = fake_cuda()
    session = source().prepare(request(["kernel", "cuda_runtime"]))
    order = beside(session, "start", session.start)
    assert order.index("start") < order.index("gave way")
    assert not cuda.subscribed
    assert own_warnings(session.stop().warnings)[0].startswith(STAYS)
    session.close()


def test_a_detach_that_waits_for_a_call_is_given_up_at_once() -> None:
    cuda = fake_cuda()
    finalized = cuda.finalized
    session = source(detach_limit_ms=100_000).prepare(request(["kernel"]))
    session.start()
    warnings: List[str] = []
    beside(session, "detach", lambda: warnings.extend(session.stop().warnings))
    session.close()
    assert not cuda.subscribed
    assert cuda.finalized == finalized
    assert [warning[: len(STAYS)] for warning in own_warnings(warnings)] == [STAYS]


def test_a_cupti_that_does_not_hand_over_holds_the_program_up_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_activities, "GIVE_WAY_LIMIT_MS", LIMIT_MS)
    cuda = fake_cuda(flush_delay_ms=60_000)
    with recording(["kernel"]) as (session, _):
        cuda.launch()
        session.give_way()
        assert not cuda.subscribed
        warnings = session.stop().warnings
        assert "CUPTI did not hand over its last records within 200 ms: the trace ends early" in warnings
        cuda.set("flush_delay_ms", 0)
    fake_cuda()

    def next_one() -> Any:
        try:
            return source().prepare(request(["kernel"]))
        except SourceError:
            return None

    until(next_one, "the collector's thread has ended").close()
