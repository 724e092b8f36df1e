"""The states of one target's capture: every event in every state, deadlines, and how the collection ends."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.collection import (
    OVERDUE,
    TABLE,
    ArenaRefused,
    ArenaTaken,
    Asking,
    Begun,
    Collection,
    DeadlinePassed,
    DecodingBegun,
    LinkEnded,
    MemoryTaken,
    NotSent,
    Now,
    Phase,
    Publish,
    ReadClock,
    StopWanted,
    VerdictGiven,
)
from kinetod.config.settings import Config

ID, PID = "c1", 7
NOW = Now(loop_s=100.0, unix_ns=10**18)
CONFIG = Config(listen=(), agent_socket=Path("agent.sock"), state_dir=Path("state"))
START = wire.Start(ID, [], 10**9, None, None, 0, 0, 0, 0, 1 << 20, None, {})
BY_ITERATION = START._replace(duration_ns=None, iterations=5)
WAITING = START._replace(options={"wait_for_user_profiler": True})
RESULT = wire.Result(ID, "done", "", "", 1, 2, {}, {}, {}, {}, [])
CANCELLED = Ending(EndState.CANCELLED, "CANCELLED", "cancelled")
KEPT = Ending(EndState.PARTIAL, "CANCELLED", "cancelled; what was recorded until then is kept")
FULL = Ending(EndState.PARTIAL, "DISK_FULL", "the disk is full")
EVENTS = (
    Begun(),
    MemoryTaken(START, None),
    MemoryTaken(START, Ending(EndState.FAILED, "NO_MEMORY", "too little")),
    Asking(START),
    NotSent(died=False),
    *(wire.State(ID, name, 5) for name in ("WAIT_FOR_REQUEST", "WARMUP", "COLLECT", "PROCESS", "no state")),
    wire.Arena(ID, "cupti", "", {}),
    ArenaTaken(),
    ArenaRefused("no arena"),
    RESULT,
    RESULT._replace(outcome="nonsense"),
    wire.Rejected(ID, "BUSY", "busy", ""),
    LinkEnded(True, "it ended"),
    LinkEnded(False, "the link broke"),
    *(StopWanted(ending) for ending in (CANCELLED, KEPT, FULL)),
    DeadlinePassed(),
    DecodingBegun(),
    VerdictGiven(),
)
KINDS = {type(event) for event in EVENTS}
STATES = {"ACCEPTED": "WAIT_FOR_REQUEST"}


def collection(*events: object, request: wire.Start = START) -> Collection:
    """One that has seen these events."""
    made = Collection(PID, request, CONFIG)
    for event in events:
        made.handle(event, NOW)
    return made


def in_phase(phase: Phase, request: wire.Start = START) -> Collection:
    """One that was asked and is in this phase."""
    made = collection(Begun(), Asking(request), request=request)
    if Phase.PENDING < phase < Phase.STORE:
        made.handle(wire.State(ID, STATES.get(phase.name, phase.name), 5), NOW)
    for event in (DecodingBegun(), VerdictGiven())[: max(0, phase - Phase.PROCESS)]:
        made.handle(event, NOW)
    assert made.phase is phase
    return made


def test_until_the_collection_has_ended_every_event_has_a_meaning_in_every_phase() -> None:
    collecting = [phase for phase in Phase if phase < Phase.STORE]
    assert {key for key in TABLE if key[0] < Phase.STORE} == set(product(collecting, KINDS))
    assert set(OVERDUE) == set(collecting)


def test_afterwards_only_the_verdict_has_one() -> None:
    assert {key for key in TABLE if key[0] >= Phase.STORE} == {
        (Phase.STORE, VerdictGiven),
        (Phase.ENDED, VerdictGiven),
    }


@pytest.mark.parametrize("phase", [Phase.STORE, Phase.ENDED])
@pytest.mark.parametrize("event", [each for each in EVENTS if not isinstance(each, VerdictGiven)], ids=repr)
def test_an_event_without_a_meaning_changes_nothing(phase: Phase, event: object) -> None:
    machine = in_phase(phase)
    before = dict(vars(machine))
    assert machine.handle(event, NOW) == []
    assert vars(machine) == before


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_whatever_happens_states_move_forwards_and_the_first_reason_counts(events: list[Any]) -> None:
    machine = collection()
    for event in events:
        phase, stop, deadline_s = machine.phase, machine.stop, machine.deadline_s
        commands = machine.handle(event, NOW)
        assert machine.phase >= phase
        published = any(isinstance(command, Publish) for command in commands)
        assert published == (machine.phase > max(phase, Phase.ACCEPTED) or isinstance(event, VerdictGiven))
        if stop is not None and machine.stop != stop:
            assert machine.stop is CANCELLED or isinstance(event, ArenaRefused)
        if stop is not None and not isinstance(event, StopWanted):
            assert machine.deadline_s == deadline_s
        if isinstance(event, DeadlinePassed) and phase < Phase.STORE:
            assert machine.stop is not None
        assert {type(command) for command in commands} <= {wire.Start, wire.Cancel, Publish, ReadClock}
        machine.ending()


def test_the_window_begins_when_the_agent_says_so() -> None:
    machine = in_phase(Phase.WARMUP)
    assert machine.window_ns(9) == (0, 0)
    assert machine.handle(wire.State(ID, "COLLECT", 5), NOW) == [Publish(pb.TARGET_STATE_COLLECT, NOW.unix_ns)]
    assert machine.window_ns(9) == (5, 9)
    machine.handle(RESULT, NOW)
    assert machine.window_ns(9) == (1, 2)


def test_the_clock_is_read_again_when_the_sources_start() -> None:
    commands = in_phase(Phase.PENDING).handle(wire.State(ID, "WARMUP", 5), NOW)
    assert commands == [ReadClock(), Publish(pb.TARGET_STATE_WARMUP, NOW.unix_ns)]


def test_a_state_that_is_behind_changes_nothing() -> None:
    machine = in_phase(Phase.COLLECT)
    assert machine.handle(wire.State(ID, "WARMUP", 6), NOW) == []
    assert (machine.phase, machine.collect_ns) == (Phase.COLLECT, 5)


def test_nothing_is_sent_to_an_agent_that_was_stopped_before_it_was_asked() -> None:
    machine = collection(StopWanted(KEPT), Begun())
    assert machine.handle(Asking(START), NOW) == []
    assert machine.ending() == KEPT


def test_without_memory_the_agent_is_not_asked() -> None:
    refused = Ending(EndState.FAILED, "NO_MEMORY", "too little")
    machine = collection(Begun(), MemoryTaken(START, refused))
    assert machine.handle(Asking(START), NOW) == []
    assert machine.ending() == refused


def test_a_request_that_cannot_be_sent_ends_the_collection() -> None:
    machine = in_phase(Phase.PENDING)
    assert machine.ending() is None
    machine.handle(NotSent(died=False), NOW)
    assert machine.ending() == Ending(
        EndState.PARTIAL, "AGENT_LOST", "the link to the agent of process 7 was lost: it was no longer connected"
    )


def test_a_process_that_ended_before_it_was_asked_has_exited() -> None:
    machine = in_phase(Phase.PENDING)
    machine.handle(NotSent(died=True), NOW)
    ending = machine.ending()
    assert ending is not None and ending.code == "TARGET_EXITED"


@pytest.mark.parametrize(
    ("ending", "keep_partial"), [(CANCELLED, False), (KEPT, True), (FULL, True)], ids=lambda each: str(each)[:20]
)
def test_a_stop_cancels_and_allows_a_short_time(ending: Ending, keep_partial: bool) -> None:
    machine = in_phase(Phase.COLLECT)
    assert machine.handle(StopWanted(ending, 2.0), NOW) == [wire.Cancel(ID, keep_partial)]
    assert machine.deadline_s == NOW.loop_s + 2.0


def test_an_agent_that_was_not_asked_is_not_told_to_stop() -> None:
    assert collection().handle(StopWanted(CANCELLED), NOW) == []


def test_a_cancellation_that_keeps_nothing_overrides_the_first_reason() -> None:
    machine = in_phase(Phase.COLLECT)
    machine.handle(StopWanted(FULL), NOW)
    machine.handle(StopWanted(KEPT), NOW)
    assert machine.stop == FULL
    machine.handle(StopWanted(CANCELLED), NOW)
    assert machine.stop == CANCELLED


@pytest.mark.parametrize(
    ("phase", "request_", "code"),
    [
        (Phase.PENDING, START, "AGENT_SILENT"),
        (Phase.ACCEPTED, START, "AGENT_STUCK"),
        (Phase.ACCEPTED, BY_ITERATION, "ITERATIONS_NOT_REACHED"),
        (Phase.ACCEPTED, WAITING, "USER_PROFILER_ACTIVE"),
        (Phase.WARMUP, START, "AGENT_STUCK"),
        (Phase.WARMUP, BY_ITERATION, "ITERATIONS_NOT_REACHED"),
        (Phase.WARMUP, WAITING, "USER_PROFILER_ACTIVE"),
        (Phase.COLLECT, START, "AGENT_STUCK"),
        (Phase.COLLECT, BY_ITERATION, "ITERATIONS_NOT_REACHED"),
        (Phase.COLLECT, WAITING, "AGENT_STUCK"),
        (Phase.PROCESS, START, "AGENT_STUCK"),
        (Phase.PROCESS, BY_ITERATION, "AGENT_STUCK"),
    ],
)
def test_a_missed_deadline_is_told_by_the_phase(phase: Phase, request_: wire.Start, code: str) -> None:
    machine = in_phase(phase, request_)
    commands = machine.handle(DeadlinePassed(), NOW)
    given_up = phase in (Phase.PENDING, Phase.PROCESS)  # otherwise the agent may still confirm
    assert commands == [wire.Cancel(ID, not given_up)]
    assert machine.stop is not None
    assert machine.stop.code == code
    assert machine.ending() == (machine.stop if given_up else None)


@pytest.mark.parametrize("request_", [START, BY_ITERATION, WAITING])
@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.PROCESS])
def test_a_call_that_stands_is_named_as_what_keeps_the_agent(phase: Phase, request_: wire.Start) -> None:
    machine = in_phase(phase, request_)
    machine.handle(DeadlinePassed("the agent's thread has been inside cuptiSubscribe for 9 s"), NOW)
    assert machine.stop is not None
    assert machine.stop.code == "AGENT_STUCK"
    assert machine.stop.reason.endswith("; the agent's thread has been inside cuptiSubscribe for 9 s")


def test_an_agent_that_does_not_confirm_a_stop_is_waited_for_once() -> None:
    machine = in_phase(Phase.COLLECT)
    machine.handle(StopWanted(FULL), NOW)
    assert machine.handle(DeadlinePassed(), NOW) == []
    assert machine.ending() == FULL


def test_arenas_are_opened_before_the_collection_ends() -> None:
    machine = in_phase(Phase.COLLECT)
    machine.handle(wire.Arena(ID, "cupti", "", {}), NOW)
    machine.handle(RESULT, NOW)
    assert machine.ending() is None
    machine.handle(ArenaTaken(), NOW)
    assert machine.ending() == DONE


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, DONE), (KEPT, DONE), (FULL, FULL), (CANCELLED, CANCELLED)], ids=str
)
def test_a_result_that_crossed_our_cancel_is_whole_for_a_user_only(stop: Ending | None, expected: Ending) -> None:
    machine = in_phase(Phase.PROCESS)
    if stop is not None:
        machine.handle(StopWanted(stop), NOW)
    machine.handle(RESULT, NOW)
    assert machine.ending() == expected


def test_a_process_that_ended_counts_more_than_a_limit() -> None:
    machine = in_phase(Phase.COLLECT)
    machine.handle(StopWanted(FULL), NOW)
    machine.handle(LinkEnded(True, "closed"), NOW)
    assert machine.ending() == Ending(EndState.PARTIAL, "TARGET_EXITED", "process 7 ended during the capture")
