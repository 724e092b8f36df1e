"""CUPTI is out of the process after a capture, or the user is told why not."""

from __future__ import annotations  # the agent's tests run under 3.9

import time
from pathlib import Path
from typing import Callable

import pytest
from support.agent.collector import (
    LONG_MS,
    another_collector,
    calling,
    fake_cuda,
    maps_with,
    own_warnings,
    recording,
    request,
    source,
)
from support.waiting import until


def test_cupti_is_finalized_inside_the_end_of_a_cuda_call() -> None:
    cuda = fake_cuda()
    finalized = cuda.finalized
    with recording(detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        outcome = session.stop()
    assert own_warnings(outcome.warnings) == []
    assert 0 < outcome.detach_ns < LONG_MS * 1_000_000
    assert cuda.finalized == finalized + 1
    assert cuda.misused == 0
    assert not cuda.attached


def test_what_cupti_drops_as_it_leaves_is_not_counted_in_the_next_recording() -> None:
    cuda = fake_cuda(drop_at_finalize=1)
    for _ in range(2):
        with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
            outcome = session.stop()
        assert outcome.counts.dropped == 0
    assert cuda.finalized > 0


def test_without_a_cuda_call_it_stays_attached_and_says_so() -> None:
    cuda = fake_cuda()
    finalized = cuda.finalized
    with recording(detach_limit_ms=20) as (session, _):
        outcome = session.stop()
    assert outcome.detach_ns == 0
    assert own_warnings(outcome.warnings) == [
        "stayed attached: the process made no CUDA call for 0.02 s; CUDA calls stay slightly slower until the next "
        "capture detaches CUPTI"
    ]
    cuda.launch()
    assert cuda.finalized == finalized


def test_after_staying_attached_the_next_capture_records_and_detaches() -> None:
    cuda = fake_cuda()
    with recording(detach_limit_ms=1) as (session, _):
        session.stop()
    with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _):
        cuda.launch(count=3)
        with calling(cuda):
            outcome = session.stop()
    assert outcome.counts.records == 3
    assert own_warnings(outcome.warnings) == []


def test_a_subscriber_of_another_tool_is_respected(tmp_path: Path) -> None:
    cuda = fake_cuda(subscribe_result=39)
    finalized = cuda.finalized
    beside = maps_with(tmp_path, "libtorch_cpu.so")
    with recording(detach_limit_ms=LONG_MS, maps=beside) as (session, _), calling(cuda):
        outcome = session.stop()
    assert (
        "another tool (or torch.profiler, once it has been used) holds CUPTI's only subscriber"
        in own_warnings(outcome.warnings)[0]
    )
    assert cuda.finalized == finalized


@pytest.mark.parametrize(("version", "detached"), [(23, False), (24, True)])
def test_before_cuda_12_6_it_stays_attached(version: int, detached: bool) -> None:
    cuda = fake_cuda(version=version)
    with recording(detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        outcome = session.stop()
    assert (outcome.detach_ns > 0) is detached
    assert [w for w in outcome.warnings if "is not safe with CUDA graphs" in w] != [] or detached


def test_a_failing_finalize_is_reported_with_cuptis_text() -> None:
    cuda = fake_cuda(finalize_result=999)
    with recording(detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        outcome = session.stop()
    assert own_warnings(outcome.warnings) == ["stayed attached: CUPTI refused to detach: CUPTI_ERROR_UNKNOWN (999)"]
    cuda.set("finalize_result", 0)


def test_many_detaches_race_with_their_time_limit() -> None:
    cuda = fake_cuda()
    with calling(cuda):
        for _ in range(30):
            with recording(["gpu_memset"], detach_limit_ms=1) as (session, _):
                warnings = own_warnings(session.stop().warnings)
            assert all(w.startswith("stayed attached: the process made no CUDA call") for w in warnings)
    assert cuda.misused == 0


def test_after_a_graph_was_launched_cupti_stays_for_the_life_of_the_process() -> None:
    cuda = fake_cuda()
    finalized = cuda.finalized
    with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        cuda.graph_launch(["a", "b"])
        first = session.stop()
    with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        second = session.stop()
    for outcome in (first, second):
        assert [w for w in outcome.warnings if w.startswith("stays attached because of CUDA graphs (launched")]
        assert outcome.detach_ns == 0
    assert cuda.finalized == finalized
    assert not cuda.subscribed


def test_a_later_agent_knows_that_cupti_must_stay() -> None:
    cuda = fake_cuda()
    with recording(["kernel"]) as (session, _):
        cuda.graph_launch(["a"])
        session.stop()
    another_collector()
    with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        assert session.stop().detach_ns == 0
    assert cuda.misused == 0


@pytest.mark.parametrize("kind", ["kernel", "gpu_memcpy", "gpu_memset"])
def test_whatever_is_recorded_of_the_gpu_a_graph_keeps_cupti_attached(kind: str) -> None:
    cuda = fake_cuda()
    with recording([kind], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        cuda.graph_launch(["a"])
        assert session.stop().detach_ns == 0
    assert cuda.misused == 0


def test_a_graph_launched_before_or_after_a_recording_or_beside_calls_alone_does_not_keep_cupti() -> None:
    cuda = fake_cuda()
    misused = cuda.misused
    cuda.graph_launch(["a"])
    with recording(["cuda_runtime"], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        cuda.graph_launch(["a"])
        assert session.stop().detach_ns > 0
    cuda.graph_launch(["a"])
    with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        assert session.stop().detach_ns > 0
    assert cuda.misused == misused


def test_what_was_recorded_without_the_subscriber_may_hold_graphs(tmp_path: Path) -> None:
    cuda = fake_cuda(subscribe_result=39)
    with recording(["kernel"], maps=maps_with(tmp_path, "libtorch_cpu.so")) as (session, _):
        session.stop()
    cuda.set("subscribe_result", 0)
    with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        outcome = session.stop()
    assert outcome.detach_ns == 0
    assert "may have been launched while GPU activities were recorded" in own_warnings(outcome.warnings)[-1]


def test_another_tool_that_has_recorded_keeps_cupti_attached(tmp_path: Path) -> None:
    cuda = fake_cuda()
    callback = cuda.register_as_another_tool()
    maps = tmp_path / "maps"
    maps.write_text(f"{callback:x}-{callback + 1:x} r-xp 0 fe:00 1 /v/xla_cuda_plugin.so\n")
    with recording(["kernel"], detach_limit_ms=LONG_MS, maps=str(maps)) as (session, _), calling(cuda):
        outcome = session.stop()
    assert outcome.detach_ns == 0
    assert "another tool's use of CUPTI" in own_warnings(outcome.warnings)[-1]


@pytest.mark.slow  # the collector waits 3 s for cuptiFinalize
def test_a_cuptifinalize_that_has_not_returned_is_told_until_it_has() -> None:
    cuda = fake_cuda(finalize_delay_ms=LONG_MS)
    told: list[tuple[str, Callable[[], int]]] = []
    wanted = request(["kernel"])._replace(tell_call=lambda call, since_ns: told.append((call, since_ns)))
    before_ns = time.time_ns()
    session = source(2_000).prepare(wanted)
    session.start()
    with calling(cuda):
        outcome = session.stop()
        session.close()
        call, since_ns = told[-1]
        assert before_ns < since_ns() < time.time_ns()
        cuda.set("finalize_delay_ms", 0)
        until(lambda: since_ns() == 0, "cuptiFinalize has returned")
    assert call == "cuptiFinalize"
    assert outcome.incomplete.startswith("cuptiFinalize has not returned")


def test_cuptis_first_call_is_told_before_it_is_made_and_once_it_has_returned() -> None:
    fake_cuda()
    told: list[tuple[str, bool]] = []
    wanted = request(["kernel"])._replace(tell_call=lambda call, since_ns: told.append((call, since_ns() > 0)))
    session = source().prepare(wanted)
    session.start()
    session.close()
    assert told == [("cuptiSubscribe", True), ("cuptiSubscribe", False)]
