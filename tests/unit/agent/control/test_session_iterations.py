"""Captures by iteration: which ones are recorded, and what happens when they do not come. Small numbers of ns."""

from typing import Any, List

import pytest
from kineto_agent.control.events import (
    Command,
    Refusal,
    Reject,
    ReportState,
    SetTimer,
    SourcesStarted,
    SourcesStopped,
    StartSources,
    Stepped,
    StopSources,
    Tick,
    WatchStep,
)
from kineto_agent.control.session import NO_STEP_NS, Session
from support.agent.session_events import COLLECT, NOW, WAIT, WARMUP, S, conclusion, counted, has, run

OVERDUE = SetTimer(NOW + NO_STEP_NS)


def started(commands: List[Command]) -> Any:
    """The request with which the sources start."""
    return next(command.request for command in commands if isinstance(command, StartSources))


# ---------------------------------------------------------------- which iterations


def test_an_iteration_capture_records_whole_iterations() -> None:
    session = Session()
    event = counted()
    assert has(session.handle(event), StartSources)
    assert session.handle(SourcesStarted(NOW, 10)) == [WatchStep(11), OVERDUE]
    collect = session.handle(Stepped(11, NOW + 50))
    assert collect == [ReportState("c1", COLLECT, NOW + 50), WatchStep(14), SetTimer(NOW + 50 + NO_STEP_NS)]
    assert has(session.handle(Stepped(14, NOW + 80)), StopSources)
    end = conclusion(session.handle(SourcesStopped(NOW + 90)))
    assert (end.outcome, end.window_start_ns, end.window_end_ns) == ("done", NOW + 50, NOW + 80)


def test_the_sources_run_for_the_warm_up_iterations_before_the_first_recorded_one() -> None:
    session = Session()
    event = counted(start_iteration=100, warmup_iterations=5)
    assert session.handle(event) == [ReportState("c1", WAIT, NOW), WatchStep(95), OVERDUE]
    assert has(session.handle(Stepped(95, NOW + 1)), StartSources)
    assert session.handle(SourcesStarted(NOW, 96)) == [WatchStep(100), OVERDUE]


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, 11),
        ({"warmup_iterations": 4}, 14),
        ({"iteration_roundup": 100}, 100),
        ({"iteration_roundup": 11}, 11),
        ({"start_iteration": 0, "iteration_roundup": 1000}, 1000),
        ({"start_iteration": 3}, 11),
        ({"start_iteration": 12}, 12),
        ({"start_iteration": 101, "iteration_roundup": 50}, 150),
    ],
)
def test_the_first_recorded_iteration_is_kinetos(fields: Any, first: int) -> None:
    session = Session()
    commands = session.handle(counted(**fields))
    if session.state is WAIT:
        watched = next(command.iteration for command in commands if isinstance(command, WatchStep))
        assert watched == first - max(fields.get("warmup_iterations", 0), 1)
        session.handle(Stepped(first - 1, NOW))
    assert session.handle(SourcesStarted(NOW, 10)) == [WatchStep(first), OVERDUE]


def test_an_iteration_that_passed_while_the_sources_started_is_replaced_by_the_next() -> None:
    session = Session()
    run(session, counted(start_iteration=11))
    assert session.handle(SourcesStarted(NOW, 20)) == [WatchStep(21), OVERDUE]
    end = conclusion(run(session, Stepped(21, NOW), Stepped(24, NOW), SourcesStopped(NOW)))
    assert end.warnings == ("iteration 11 had already passed: recorded from iteration 21 on",)


# ---------------------------------------------------------------- a process that never stepped


@pytest.mark.parametrize("hooked_ns", [0, NOW - NO_STEP_NS])
def test_a_process_that_never_stepped_is_told_what_to_do(hooked_ns: int) -> None:
    (answer,) = Session().handle(counted(-1, hooked_ns))
    assert isinstance(answer, Reject)
    assert answer.reason_code == "NEVER_STEPPED"
    assert "kineto_agent.step()" in answer.reason and "--or-duration" in answer.reason


def test_a_process_that_never_stepped_is_recorded_for_a_duration_if_asked() -> None:
    session = Session()
    fields = {"warmup_iterations": 2, "start_iteration": 500, "iteration_roundup": 100}
    request = started(session.handle(counted(-1, or_duration_ns=5 * S, **fields)))
    assert (request.duration_ns, request.iterations, request.warmup_iterations) == (5 * S, None, 0)
    assert session.handle(SourcesStarted(NOW + 1, -1)) == [
        ReportState("c1", COLLECT, NOW + 1),
        SetTimer(NOW + 1 + 5 * S),
    ]
    end = conclusion(run(session, Tick(NOW + 6 * S), SourcesStopped(NOW + 6 * S)))
    text = "this process has not finished an iteration: recorded for 5 s instead, without the warm-up iterations"
    assert (end.outcome, end.window_end_ns, end.warnings) == ("done", NOW + 1 + 5 * S, (text,))


def test_the_first_iteration_of_a_process_that_is_watched_since_a_moment_is_waited_for() -> None:
    session = Session()
    waiting = session.handle(counted(-1, hooked_ns=NOW - S))
    assert waiting == [ReportState("c1", WAIT, NOW), WatchStep(0), SetTimer(NOW - S + NO_STEP_NS)]
    assert has(session.handle(Stepped(1, NOW + S)), StartSources)
    assert session.handle(SourcesStarted(NOW + S, 1))[0] == WatchStep(2)


def test_a_first_iteration_that_does_not_come_is_no_longer_waited_for() -> None:
    session = Session()
    end = conclusion(run(session, counted(-1, hooked_ns=NOW - S), Tick(NOW + NO_STEP_NS)))
    assert (end.outcome, end.reason_code) == ("failed", "NEVER_STEPPED")
    assert session.capture_id == ""


def test_a_first_iteration_that_does_not_come_gives_a_duration_if_asked() -> None:
    session = Session()
    waiting = session.handle(counted(-1, hooked_ns=NOW - S, or_duration_ns=5 * S))
    assert waiting[-1] == SetTimer(NOW + 4 * S)
    assert started(session.handle(Tick(NOW + 4 * S))).duration_ns == 5 * S


# ---------------------------------------------------------------- a process that has stopped stepping


def test_a_loop_that_has_ended_is_waited_for_no_longer_than_a_minute() -> None:
    session = Session()
    run(session, counted(start_iteration=100), Tick(NOW + NO_STEP_NS - 1, NOW - 9 * S))
    assert session.state is WAIT
    end = conclusion(session.handle(Tick(NOW + NO_STEP_NS, NOW - 9 * S)))
    assert (end.outcome, end.reason_code) == ("failed", "ITERATIONS_NOT_REACHED")
    assert end.reason.startswith("no iteration began for 60 s (requested: 3, starting at iteration 100)")


def test_a_slow_loop_gets_the_time_of_twenty_iterations_more() -> None:
    assert run(Session(), counted(step_ns=10 * S, start_iteration=100))[-1] == SetTimer(NOW + NO_STEP_NS + 200 * S)


def test_every_iteration_renews_the_patience() -> None:
    session = Session()
    commands = run(session, counted(start_iteration=100), Tick(NOW + NO_STEP_NS, NOW + 7 * S))
    assert commands == [SetTimer(NOW + 7 * S + NO_STEP_NS)]


def test_a_loop_that_ends_in_the_warm_up_is_recorded_for_a_duration_if_asked() -> None:
    session = Session()
    run(session, counted(or_duration_ns=5 * S), SourcesStarted(NOW, 10))
    fallen_back = session.handle(Tick(NOW + 5 * S, NOW - S))
    assert fallen_back == [WatchStep(None), ReportState("c1", COLLECT, NOW + 5 * S), SetTimer(NOW + 10 * S)]
    end = conclusion(run(session, Tick(NOW + 10 * S, NOW - S), SourcesStopped(NOW + 10 * S)))
    assert (end.outcome, end.window_start_ns, end.window_end_ns) == ("done", NOW + 5 * S, NOW + 10 * S)
    assert end.warnings == ("no iteration began for 5 s: recorded for 5 s instead",)


def test_a_loop_that_ends_before_the_warm_up_is_recorded_for_a_duration_if_asked() -> None:
    session = Session()
    run(session, counted(start_iteration=100, or_duration_ns=5 * S))
    assert started(session.handle(Tick(NOW + 5 * S, NOW - S))).duration_ns == 5 * S
    assert session.state is WARMUP


def test_iterations_longer_than_the_duration_are_no_reason_to_give_up() -> None:
    assert run(Session(), counted(step_ns=4 * S, start_iteration=50, or_duration_ns=S))[-1] == SetTimer(NOW + 12 * S)


@pytest.mark.parametrize("or_duration_ns", [None, 5 * S])
def test_a_loop_that_ends_in_the_window_leaves_what_was_recorded(or_duration_ns: Any) -> None:
    session = Session()
    run(session, counted(or_duration_ns=or_duration_ns), SourcesStarted(NOW, 10), Stepped(11, NOW + S))
    end_ns = NOW + S + (or_duration_ns or NO_STEP_NS)
    end = conclusion(run(session, Tick(end_ns, NOW + S), SourcesStopped(end_ns)))
    assert (end.outcome, end.reason_code) == ("partial", "ITERATIONS_NOT_REACHED")
    assert (end.window_start_ns, end.window_end_ns) == (NOW + S, end_ns)


def test_a_duration_that_is_none_is_refused() -> None:
    (answer,) = Session().handle(counted(or_duration_ns=0))
    assert isinstance(answer, Reject)
    assert answer.reason_code == "INVALID_REQUEST"


def test_the_wait_for_the_programs_profiler_is_not_the_wait_for_an_iteration() -> None:
    session = Session()
    event = counted(options={"wait_for_user_profiler": True})._replace(profiler=Refusal("USER_PROFILER_ACTIVE", "busy"))
    run(session, event)
    assert session.handle(Tick(NOW + 2 * NO_STEP_NS, NOW))[0] != OVERDUE
    assert session.state is WAIT and session.capture_id == "c1"
