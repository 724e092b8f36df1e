"""The state machine when the program's own torch.profiler is in the way. Times are small numbers of nanoseconds."""

from typing import Any

import pytest
from kineto_agent.control.events import (
    AwaitProfiler,
    CancelRequested,
    Conclude,
    FreeSources,
    ProfilerActive,
    ProfilerIdle,
    Refusal,
    Reject,
    ReportState,
    SetTimer,
    SourcesGaveWay,
    SourcesStarted,
    SourcesStopped,
    StartRequested,
    StartSources,
    Stepped,
    StopSources,
    Tick,
    WatchStep,
)
from kineto_agent.control.session import NO_STEP_NS, PROFILER_WAIT_NS, Session
from support.agent import session_events
from support.agent.session_events import COLLECT, NOW, PROCESS, WAIT, WAITING, WARMUP, S, conclusion, run

BUSY = Refusal("USER_PROFILER_ACTIVE", "it records")


def timed(**changes: Any) -> StartRequested:
    return session_events.timed(**changes)._replace(profiler=BUSY)


def counted(**changes: Any) -> StartRequested:
    return session_events.counted(**changes)._replace(profiler=BUSY)


def verdict(end: Conclude) -> Any:
    return end.outcome, end.reason_code, end.window_start_ns, end.window_end_ns


# ---------------------------------------------------------------- it was first


def test_a_capture_is_refused_while_it_is_active_and_told_what_to_do() -> None:
    session = Session()
    reject, timer, free = session.handle(timed())
    assert isinstance(reject, Reject)
    assert (reject.capture_id, reject.reason_code) == ("c1", "USER_PROFILER_ACTIVE")
    assert reject.reason.startswith(
        "it records; try again once it has finished, let the capture wait (--wait-for-user-profiler)"
    )
    assert repr([timer, free]) == repr([SetTimer(None), FreeSources()])
    assert (session.state, session.capture_id) == (WAIT, "")


def test_a_capture_may_wait_for_its_end() -> None:
    session = Session()
    event = timed(options=WAITING)
    waits = [WatchStep(None), ReportState("c1", WAIT, NOW), AwaitProfiler(), SetTimer(NOW + PROFILER_WAIT_NS)]
    assert repr(session.handle(event)) == repr(waits)
    assert session.capture_id == "c1"
    assert session.handle(ProfilerIdle(NOW + 3 * S, -1)) == [
        SetTimer(None), WatchStep(None), ReportState("c1", WARMUP, NOW + 3 * S), StartSources(event.request),
    ]  # fmt: skip
    started = session.handle(SourcesStarted(NOW + 4 * S, -1))
    assert started == [ReportState("c1", COLLECT, NOW + 4 * S), SetTimer(NOW + 9 * S)]


def test_if_it_is_active_again_at_the_start_the_wait_goes_on_to_the_same_limit() -> None:
    session = Session()
    run(session, timed(options=WAITING), ProfilerIdle(NOW + 3 * S, -1))
    again = session.handle(ProfilerActive(NOW + 4 * S, "it warms up"))
    waits = [WatchStep(None), ReportState("c1", WAIT, NOW + 4 * S), AwaitProfiler(), SetTimer(NOW + PROFILER_WAIT_NS)]
    assert repr(again) == repr(waits)
    assert session.state is WAIT


def test_without_the_wish_to_wait_a_start_that_finds_it_active_is_refused() -> None:
    session = Session()
    first = session.handle(timed()._replace(profiler=None))
    assert first[-1] == StartSources(timed().request)
    reject, *rest = session.handle(ProfilerActive(NOW, "it warms up"))
    assert isinstance(reject, Reject)
    assert reject.reason_code == "USER_PROFILER_ACTIVE"
    assert repr(rest) == repr([SetTimer(None), FreeSources()])
    assert session.state is WAIT


def test_the_wait_has_a_limit() -> None:
    session = Session()
    early, late = NOW + PROFILER_WAIT_NS - 1, NOW + PROFILER_WAIT_NS
    assert run(session, timed(options=WAITING), Tick(early)) == [SetTimer(late)]
    reject = session.handle(Tick(late))[0]
    assert isinstance(reject, Reject)
    assert (reject.reason_code, session.capture_id) == ("USER_PROFILER_ACTIVE", "")
    assert "was still running after 3600 s" in reject.reason


def test_a_waiting_capture_can_be_cancelled() -> None:
    session = Session()
    end = conclusion(run(session, timed(options=WAITING), CancelRequested("c1", False, NOW + S)))
    assert (end.outcome, session.capture_id) == ("cancelled", "")


def test_a_capture_with_a_start_time_is_refused_rather_than_late() -> None:
    session = Session()
    event = timed(options=WAITING, start_time_ns=NOW + 9 * S)
    assert session.handle(event) == [ReportState("c1", WAIT, NOW), SetTimer(NOW + 9 * S)]  # it may end until then
    reject = run(session, Tick(NOW + 9 * S), ProfilerActive(NOW + 9 * S, "it records"))[0]
    assert isinstance(reject, Reject)
    assert reject.reason == "it records; a capture with a start time cannot wait: try again once the profiler is idle"


@pytest.mark.parametrize(("changes", "first"), [({}, 21), ({"start_iteration": 11}, 21)])
def test_iterations_are_chosen_anew_when_it_has_ended(changes: Any, first: int) -> None:
    session = Session()
    run(session, counted(options=WAITING, **changes))
    assert isinstance(session.handle(ProfilerIdle(NOW + S, 20))[-1], StartSources)
    assert session.handle(SourcesStarted(NOW + 3 * S, 20))[0] == WatchStep(first)
    run(session, Stepped(first, NOW + 4 * S), Stepped(first + 3, NOW + 5 * S))
    end = conclusion(session.handle(SourcesStopped(NOW + 6 * S)))
    assert (end.outcome, bool(end.warnings)) == ("done", bool(changes))


def test_an_iteration_that_is_still_to_come_is_kept() -> None:
    session = Session()
    assert session.handle(counted(options=WAITING, start_iteration=40))[1] == WatchStep(39)
    run(session, Stepped(39, NOW), ProfilerActive(NOW, "it records"))
    kept = session.handle(ProfilerIdle(NOW + S, 20))
    overdue = SetTimer(NOW + S + NO_STEP_NS)
    assert repr(kept) == repr([SetTimer(None), ReportState("c1", WAIT, NOW + S), WatchStep(39), overdue])


# ---------------------------------------------------------------- it came later


def collecting() -> Session:
    session = Session()
    run(session, timed()._replace(profiler=None), SourcesStarted(NOW, -1))
    assert session.state is COLLECT
    return session


def test_the_window_ends_where_it_began() -> None:
    session = collecting()
    commands = session.handle(SourcesGaveWay(NOW + 2 * S))
    process = [SetTimer(None), WatchStep(None), ReportState("c1", PROCESS, NOW + 2 * S), StopSources()]
    assert repr(commands) == repr(process)
    end = conclusion(session.handle(SourcesStopped(NOW + 3 * S, NOW + 2 * S)))
    assert verdict(end) == ("partial", "USER_PROFILER_STARTED", NOW, NOW + 2 * S)


def test_a_capture_that_was_complete_by_then_is_done() -> None:
    session = collecting()
    run(session, SourcesGaveWay(NOW + 6 * S))
    end = conclusion(session.handle(SourcesStopped(NOW + 7 * S, NOW + 6 * S)))
    assert verdict(end) == ("done", "", NOW, NOW + 5 * S)


def test_a_timer_that_is_handled_first_does_not_make_it_whole() -> None:
    session = collecting()
    run(session, Tick(NOW + 6 * S))
    end = conclusion(session.handle(SourcesStopped(NOW + 7 * S, NOW + 4 * S)))
    assert verdict(end) == ("partial", "USER_PROFILER_STARTED", NOW, NOW + 4 * S)


def test_before_the_window_it_leaves_nothing() -> None:
    session = Session()
    run(session, timed(warmup_ns=9 * S)._replace(profiler=None), SourcesStarted(NOW, -1), SourcesGaveWay(NOW + S))
    end = conclusion(session.handle(SourcesStopped(NOW + 2 * S, NOW + S)))
    assert verdict(end) == ("failed", "USER_PROFILER_STARTED", 0, 0)
    assert session.state is WAIT


def test_iterations_are_cut_too() -> None:
    session = Session()
    run(session, counted()._replace(profiler=None), SourcesStarted(NOW, 10), Stepped(11, NOW + S))
    run(session, SourcesGaveWay(NOW + 2 * S))
    end = conclusion(session.handle(SourcesStopped(NOW + 3 * S, NOW + 2 * S)))
    assert verdict(end) == ("partial", "USER_PROFILER_STARTED", NOW + S, NOW + 2 * S)
    assert end.reason.endswith("the window ends there")
