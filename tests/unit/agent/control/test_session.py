"""The state machine, as tables of events and commands. Times are small numbers of nanoseconds."""

from typing import Any, List, Optional

import pytest
from kineto_agent.control import session as module
from kineto_agent.control.events import (
    AgentEnding,
    CancelRequested,
    Command,
    Conclude,
    Event,
    FreeSources,
    LinkLost,
    ProfilerActive,
    ProfilerIdle,
    Refusal,
    Reject,
    Released,
    ReportState,
    SessionState,
    SetTimer,
    SourcesFailed,
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
from kineto_agent.control.session import Session
from support.agent.agent_daemon import start_request
from support.agent.session_events import (
    COLLECT,
    NOW,
    PROCESS,
    WAIT,
    WAITING,
    WARMUP,
    S,
    conclusion,
    counted,
    has,
    run,
    timed,
)


def exactly(commands: List[Command], *expected: Command) -> bool:
    """Equal in values and types: named tuples of different types may be equal."""
    return repr(commands) == repr(list(expected))


def rejection(event: StartRequested) -> Optional[Reject]:
    commands = Session().handle(event)
    return commands[0] if len(commands) == 1 and isinstance(commands[0], Reject) else None


def collecting() -> Session:
    session = Session()
    run(session, timed(), SourcesStarted(NOW, -1))
    assert session.state is COLLECT
    return session


# ---------------------------------------------------------------- timed windows


def test_a_timed_capture_goes_through_all_states() -> None:
    session = Session()
    request = timed().request
    assert session.handle(timed()) == [
        SetTimer(None),
        WatchStep(None),
        ReportState("c1", WARMUP, NOW),
        StartSources(request),
    ]
    started = session.handle(SourcesStarted(NOW + 7, -1))
    assert started == [ReportState("c1", COLLECT, NOW + 7), SetTimer(NOW + 7 + 5 * S)]
    ended = session.handle(Tick(NOW + 9 + 5 * S))
    assert exactly(ended, SetTimer(None), WatchStep(None), ReportState("c1", PROCESS, NOW + 9 + 5 * S), StopSources())
    stopped = session.handle(SourcesStopped(NOW + 6 * S))
    assert stopped == [
        Conclude("c1", "done", "", "", NOW, NOW + 7, NOW + 7, NOW + 7 + 5 * S, NOW + 6 * S, ()),
        SetTimer(NOW + 66 * S),
    ]
    assert exactly(session.handle(Released("c1")), SetTimer(None), FreeSources())
    assert (session.state, session.capture_id) == (WAIT, "")


def test_the_window_is_what_was_asked_for_however_late_the_timer_fires() -> None:
    session = Session()
    commands = run(session, timed(warmup_ns=2 * S), SourcesStarted(NOW, -1), Tick(NOW + 3 * S))
    assert commands == [ReportState("c1", COLLECT, NOW + 3 * S), SetTimer(NOW + 7 * S)]
    end = conclusion(run(session, Tick(NOW + 9 * S), SourcesStopped(NOW + 9 * S)))
    assert (end.window_start_ns, end.window_end_ns) == (NOW + 2 * S, NOW + 7 * S)


def test_the_warm_up_begins_when_the_sources_record() -> None:
    assert run(Session(), timed(warmup_ns=2 * S), SourcesStarted(NOW + S, -1)) == [SetTimer(NOW + 3 * S)]


def test_a_later_start_time_is_waited_for_with_the_warm_up_before_it() -> None:
    session = Session()
    event = timed(start_time_ns=NOW + 10 * S, warmup_ns=3 * S)
    assert session.handle(event) == [ReportState("c1", WAIT, NOW), SetTimer(NOW + 7 * S)]
    assert session.capture_id == "c1"
    assert session.handle(Tick(NOW + 6 * S)) == [SetTimer(NOW + 7 * S)]
    assert has(session.handle(Tick(NOW + 7 * S)), StartSources)
    assert session.handle(SourcesStarted(NOW + 8 * S, -1)) == [SetTimer(NOW + 10 * S)]


def test_sources_that_are_late_for_the_start_time_shift_the_window_and_say_so() -> None:
    session = Session()
    run(session, timed(start_time_ns=NOW + S), Tick(NOW + S), SourcesStarted(NOW + 2 * S, -1))
    end = conclusion(run(session, Tick(NOW + 9 * S), SourcesStopped(NOW + 9 * S)))
    assert (end.window_start_ns, end.window_end_ns) == (NOW + 2 * S, NOW + 7 * S)
    assert end.warnings == ("recording began 1.000 s after the requested start time",)


@pytest.mark.parametrize(
    ("start", "warmup", "accepted"),
    [(-10, 0, True), (-11, 0, False), (5, 6, True), (5, 7, False), (-1, 1, False), (100, 100, True)],
)
def test_a_start_time_is_rejected_when_it_or_its_warm_up_is_past(start: int, warmup: int, accepted: bool) -> None:
    answer = rejection(timed(start_time_ns=NOW + start * S, warmup_ns=warmup * S))
    assert (answer is None) is accepted
    if answer is not None:
        assert answer.reason_code == "START_TIME_PAST"


# ---------------------------------------------------------------- refusals


def test_a_second_capture_is_busy_with_the_first() -> None:
    session = collecting()
    answer = session.handle(timed(capture_id="c2"))
    text = "capture c1 is running in this process: wait until it ends, or cancel it"
    assert answer == [Reject("c2", "BUSY", text, "c1")]
    assert session.capture_id == "c1"


def test_the_same_request_again_changes_nothing() -> None:
    assert collecting().handle(timed()) == []


def test_a_capture_that_waits_for_its_time_makes_the_process_busy() -> None:
    session = Session()
    run(session, timed(start_time_ns=NOW + 10 * S))
    (answer,) = session.handle(timed(capture_id="c2"))
    assert isinstance(answer, Reject)
    assert answer.busy_capture_id == "c1"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"duration_ns": 0}, "duration_ns is 0: it must be greater than 0"),
        ({"duration_ns": -1}, "duration_ns is -1: it must be greater than 0"),
        ({"duration_ns": None}, "a capture needs either a duration or a number of iterations"),
        ({"iterations": 3}, "a capture needs either a duration or a number of iterations"),
        ({"duration_ns": None, "iterations": 0}, "iterations is 0: it must be greater than 0"),
        ({"warmup_ns": -1}, "warmup_ns is -1: it must not be negative"),
        ({"start_time_ns": -5}, "start_time_ns is -5: it must not be negative"),
    ],
)
def test_a_request_without_meaning_is_rejected_by_field(fields: Any, text: str) -> None:
    answer = rejection(StartRequested(start_request(**fields), NOW, 5))
    assert answer == Reject("c1", "INVALID_REQUEST", text)


def test_what_the_runner_knows_against_a_request_is_passed_on() -> None:
    event = timed()._replace(refusal=Refusal("NOTHING_TO_RECORD", "no GPU"))
    assert rejection(event) == Reject("c1", "NOTHING_TO_RECORD", "no GPU")


# ---------------------------------------------------------------- early ends


def test_cancelling_a_recording_stops_it_and_keeps_nothing() -> None:
    session = collecting()
    assert has(session.handle(CancelRequested("c1", False, NOW + S)), StopSources)
    commands = session.handle(SourcesStopped(NOW + S))
    end = conclusion(commands)
    assert (end.outcome, end.reason_code) == ("cancelled", "CANCELLED")
    assert exactly(commands[1:], SetTimer(None), FreeSources())
    assert session.state is WAIT


def test_cancelling_may_keep_what_is_in_the_window() -> None:
    session = collecting()
    end = conclusion(run(session, CancelRequested("c1", True, NOW + S), SourcesStopped(NOW + 2 * S)))
    assert (end.outcome, end.reason_code) == ("partial", "CANCELLED")
    assert (end.window_start_ns, end.window_end_ns) == (NOW, NOW + S)
    assert session.state is PROCESS  # until the daemon has copied it


def test_cancelling_in_the_warm_up_has_nothing_to_keep() -> None:
    session = Session()
    run(session, timed(warmup_ns=S), SourcesStarted(NOW, -1))
    end = conclusion(run(session, CancelRequested("c1", True, NOW + 5), SourcesStopped(NOW + 6)))
    assert (end.outcome, end.window_start_ns, end.window_end_ns) == ("cancelled", 0, 0)


def test_cancelling_a_waiting_capture_ends_it_at_once() -> None:
    session = Session()
    commands = run(session, timed(start_time_ns=NOW + 10 * S), CancelRequested("c1", False, NOW + S))
    assert conclusion(commands).outcome == "cancelled"
    assert not has(commands, StopSources)
    assert session.state is WAIT


def test_cancelling_another_capture_changes_nothing() -> None:
    session = collecting()
    assert session.handle(CancelRequested("c9", False, NOW)) == []
    assert session.state is COLLECT


def test_a_lost_link_ends_the_recording_without_a_word() -> None:
    session = collecting()
    assert has(session.handle(LinkLost(NOW + S)), StopSources)
    assert exactly(session.handle(SourcesStopped(NOW + S)), SetTimer(None), FreeSources())
    assert session.state is WAIT


def test_a_link_lost_before_the_release_frees_the_arenas() -> None:
    session = collecting()
    run(session, Tick(NOW + 6 * S), SourcesStopped(NOW + 6 * S))
    assert exactly(session.handle(LinkLost(NOW + 7 * S)), SetTimer(None), FreeSources())


def test_a_daemon_that_never_releases_keeps_the_memory_for_a_minute() -> None:
    session = collecting()
    run(session, Tick(NOW + 6 * S), SourcesStopped(NOW + 6 * S))
    assert exactly(session.handle(Tick(NOW + 66 * S)), SetTimer(None), FreeSources())


def test_a_process_that_exits_while_collecting_leaves_a_partial_trace() -> None:
    session = collecting()
    ending = AgentEnding(NOW + S, "TARGET_EXITING", "the process exited")
    end = conclusion(run(session, ending, SourcesStopped(NOW + 2 * S)))
    assert (end.outcome, end.reason_code, end.reason) == ("partial", "TARGET_EXITING", "the process exited")
    assert (end.window_start_ns, end.window_end_ns) == (NOW, NOW + S)


def test_a_process_that_exits_before_the_window_has_failed() -> None:
    session = Session()
    commands = run(session, timed(start_time_ns=NOW + 9 * S), AgentEnding(NOW, "TARGET_EXITING", "exit"))
    assert conclusion(commands).outcome == "failed"


def test_sources_that_cannot_start_end_the_capture_as_failed() -> None:
    session = Session()
    commands = run(session, timed(), SourcesFailed(NOW, "CUPTI_BUSY", "Nsight"), SourcesStopped(NOW))
    end = conclusion(commands)
    assert (end.outcome, end.reason_code, end.reason) == ("failed", "CUPTI_BUSY", "Nsight")
    assert session.state is WAIT


# ---------------------------------------------------------------- the table as a whole

MEANINGLESS = {
    WAIT: {SourcesStarted, SourcesStopped, Released, ProfilerActive, SourcesGaveWay},
    WARMUP: {SourcesStopped, Released, ProfilerIdle},
    COLLECT: {SourcesStarted, SourcesStopped, Released, ProfilerActive, ProfilerIdle},
    PROCESS: {
        SourcesStarted,
        SourcesFailed,
        Stepped,
        CancelRequested,
        AgentEnding,
        ProfilerActive,
        ProfilerIdle,
        SourcesGaveWay,
    },
}
EVENTS: List[Event] = [
    Tick(NOW), Stepped(1, NOW), SourcesStarted(NOW, 1), SourcesFailed(NOW, "X", "x"), SourcesStopped(NOW),
    CancelRequested("c1", False, NOW), Released("c1"), LinkLost(NOW), AgentEnding(NOW, "X", "x"),
    ProfilerActive(NOW, "it records"), ProfilerIdle(NOW, 1), SourcesGaveWay(NOW),
]  # fmt: skip


@pytest.mark.parametrize("state", list(SessionState))
def test_every_event_has_a_transition_or_is_known_to_mean_nothing(state: SessionState) -> None:
    handled = {kind for table_state, kind in module.TABLE if table_state is state}
    assert handled | MEANINGLESS[state] == {type(event) for event in EVENTS}
    assert not handled & MEANINGLESS[state]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_without_a_capture_no_event_does_anything(event: Event) -> None:
    session = Session()
    assert session.handle(event) == []
    assert session.state is WAIT


STARTS = [timed(), timed(warmup_ns=S), timed(start_time_ns=NOW + 9 * S), counted(), timed(options=WAITING)]


@pytest.mark.parametrize("start", STARTS)
def test_any_order_of_events_gives_at_most_one_conclusion_and_comes_to_rest(start: StartRequested) -> None:
    for first in EVENTS:
        for second in EVENTS:
            session = Session()
            commands = session.handle(start)
            for event in (first, second, AgentEnding(NOW, "X", "x"), SourcesStopped(NOW), Released("c1")):
                commands += session.handle(event)
            assert sum(isinstance(command, Conclude) for command in commands) <= 1
            assert (session.state, session.capture_id) == (WAIT, "")
            assert isinstance(commands[-1], FreeSources)
