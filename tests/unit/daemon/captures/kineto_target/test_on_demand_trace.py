"""The states of a trace by libkineto: every event in every state, deadlines, and how it ends."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.captures.kineto_target.on_demand_trace import (
    MOST_REPEATS,
    TRANSITIONS,
    WAIT_S,
    FolderLooked,
    KinetoPhase,
    MakeOffer,
    OfferDropped,
    OfferOver,
    OfferReady,
    OfferSent,
    OfferTaken,
    OnDemandTrace,
    ProcessGone,
    WithdrawOffer,
    longest_ns,
)
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.collection import (
    Begun,
    DeadlinePassed,
    DecodingBegun,
    Now,
    Publish,
    StopWanted,
    VerdictGiven,
)
from kinetod.config.settings import Config
from kinetod.kineto_files.interface import Sight

PID = 7
NOW = Now(loop_s=100.0, unix_ns=10**18)
CONFIG = Config(listen=(), agent_socket=Path("agent.sock"), state_dir=Path("state"))
START = wire.Start("c1", [], 10**9, None, None, 0, 0, 0, 0, 1 << 20, None, {})
BY_ITERATION = START._replace(duration_ns=None, iterations=5)
CANCELLED = Ending(EndState.CANCELLED, "CANCELLED", "cancelled")
KEPT = Ending(EndState.PARTIAL, "CANCELLED", "cancelled; what was recorded until then is kept")
STOPPED = Ending(EndState.PARTIAL, "DAEMON_STOPPED", "the daemon was stopped")
NOTHING, OPENED = FolderLooked(Sight()), FolderLooked(Sight(writing_bytes=0))
GROWING, WHOLE = FolderLooked(Sight(writing_bytes=4096)), FolderLooked(Sight(whole=True))
EVENTS = (
    Begun(),
    OfferReady(),
    OfferReady(Ending(EndState.FAILED, "STORE_IO", "no")),
    OfferSent(),
    OfferTaken(),
    OfferOver(),
    OfferDropped(),
    ProcessGone(died=True),
    ProcessGone(died=False),
    *(NOTHING, OPENED, GROWING, WHOLE),
    *(StopWanted(ending) for ending in (CANCELLED, KEPT, STOPPED)),
    DeadlinePassed(),
    DecodingBegun(),
    VerdictGiven(),
)
KINDS = {type(event) for event in EVENTS}


def trace(*events: object, request: wire.Start = START) -> OnDemandTrace:
    """One that has seen these events."""
    made = OnDemandTrace(PID, request, CONFIG)
    for event in events:
        made.handle(event, NOW)
    return made


def offered(*events: object, request: wire.Start = START) -> OnDemandTrace:
    """One whose request is offered, and what came then."""
    return trace(Begun(), OfferReady(), *events, request=request)


def ended(machine: OnDemandTrace) -> tuple[EndState, str]:
    ending = machine.ending()
    assert ending is not None
    return ending.outcome, ending.code


def state(phase: pb.TargetState) -> Publish:
    return Publish(phase, NOW.unix_ns)


def test_until_the_file_is_decoded_every_event_has_a_meaning_in_every_phase() -> None:
    before = [phase for phase in KinetoPhase if phase < KinetoPhase.STORE]
    assert {key for key in TRANSITIONS if key[0] < KinetoPhase.STORE} == set(product(before, KINDS))
    assert {key for key in TRANSITIONS if key[0] >= KinetoPhase.STORE} == {(KinetoPhase.STORE, VerdictGiven)}


@given(st.lists(st.sampled_from(EVENTS), max_size=30), st.sampled_from([START, BY_ITERATION]))
def test_whatever_happens_phases_move_forwards_and_an_end_stays(events: list[Any], request: wire.Start) -> None:
    machine = trace(request=request)
    for event in events:
        phase, ending = machine.phase, machine.ending()
        commands = machine.handle(event, NOW)
        assert machine.phase >= phase
        assert any(isinstance(command, Publish) for command in commands) == (machine.phase > phase)
        if ending is not None:  # a whole file counts more than any other end
            assert machine.ending() == (DONE if event is WHOLE and phase < KinetoPhase.STORE else ending)


def test_the_request_is_offered_for_two_polls() -> None:
    machine = trace(Begun())
    assert machine.handle(OfferReady(), NOW) == [MakeOffer()]
    assert machine.deadline_s == NOW.loop_s + WAIT_S
    assert not machine.watches_file


def test_what_cannot_be_offered_is_not() -> None:
    machine = trace(Begun())
    assert machine.handle(OfferReady(Ending(EndState.FAILED, "STORE_IO", "no")), NOW) == []
    assert ended(machine) == (EndState.FAILED, "STORE_IO")


def test_no_poll_within_12_seconds_is_not_polled() -> None:
    machine = offered()
    assert machine.handle(DeadlinePassed(), NOW) == [WithdrawOffer()]
    assert ended(machine) == (EndState.FAILED, "NOT_POLLED")
    assert not machine.leaves_file


def test_the_time_counts_anew_from_the_poll_that_brings_the_request() -> None:
    machine = offered()
    machine.handle(OfferSent(), NOW._replace(loop_s=111.0))
    assert machine.deadline_s == 111.0 + WAIT_S
    machine.handle(OfferSent(2), NOW._replace(loop_s=116.0))
    assert machine.deadline_s == 111.0 + WAIT_S


def test_a_request_that_was_sent_and_shows_nowhere_is_not_taken() -> None:
    machine = offered(OfferSent(), DeadlinePassed())
    assert ended(machine) == (EndState.FAILED, "NOT_TAKEN")
    assert machine.leaves_file


def test_not_taken_by_iteration_names_the_steps() -> None:
    ending = offered(OfferSent(), DeadlinePassed(), request=BY_ITERATION).ending()
    assert ending is not None
    assert "only in a program that steps an optimizer or calls prof.step()" in ending.reason


def test_a_poll_that_says_busy_is_the_warm_up() -> None:
    machine = offered(OfferSent())
    assert machine.handle(OfferTaken(), NOW) == [state(pb.TARGET_STATE_WARMUP)]
    assert machine.deadline_s == NOW.loop_s + longest_ns(START, CONFIG) / 1e9


def test_the_offer_is_withdrawn_as_soon_as_the_file_is_opened() -> None:
    machine = offered(OfferSent())
    assert machine.handle(OPENED, NOW) == [WithdrawOffer(), state(pb.TARGET_STATE_COLLECT)]
    assert machine.handle(OPENED, NOW) == []


def test_with_a_warm_up_the_open_file_is_not_yet_the_window() -> None:
    machine = offered(OfferSent(), request=START._replace(warmup_ns=2 * 10**9))
    assert machine.handle(OPENED, NOW) == [WithdrawOffer(), state(pb.TARGET_STATE_WARMUP)]
    assert machine.handle(OPENED, NOW._replace(loop_s=102.0)) == [state(pb.TARGET_STATE_COLLECT)]


def test_a_file_that_grows_is_being_processed_and_moves_the_deadline() -> None:
    machine = offered(OfferSent(), OPENED)
    assert machine.handle(GROWING, NOW) == [state(pb.TARGET_STATE_PROCESS)]
    assert machine.deadline_s == NOW.loop_s + CONFIG.process_deadline_ns / 1e9


def test_a_file_that_was_whole_before_the_next_poll_is_the_trace() -> None:
    machine = offered(OfferSent())
    assert machine.handle(WHOLE, NOW) == [WithdrawOffer(), state(pb.TARGET_STATE_PROCESS)]
    assert machine.ending() == DONE
    assert not machine.leaves_file


def test_a_request_that_was_sent_twice_may_bring_a_second_file() -> None:
    machine = offered(OfferSent(), OfferSent(2), OfferSent(2), WHOLE)
    assert machine.ending() == DONE
    assert machine.leaves_file


def test_a_profiler_that_is_free_again_without_a_file_was_cancelled_by_the_program() -> None:
    machine = offered(OfferSent(), OfferTaken(), OfferOver(), NOTHING)
    assert machine.ending() is None  # the folder had been looked at before the poll was heard of
    machine.handle(NOTHING, NOW)
    assert ended(machine) == (EndState.FAILED, "CANCELLED_BY_PROGRAM")


def test_a_file_that_was_begun_and_given_up_may_be_of_a_full_disk() -> None:
    machine = offered(OfferSent(), OPENED, OfferTaken(), OfferOver(), NOTHING, NOTHING)
    ending = machine.ending()
    assert ending is not None
    assert (ending.outcome, ending.code) == (EndState.FAILED, "CANCELLED_BY_PROGRAM")
    assert "the disk of its folder may be full" in ending.reason


def test_a_profiler_that_is_free_again_with_a_file_is_done() -> None:
    assert offered(OfferSent(), OfferTaken(), OfferOver(), OPENED, WHOLE).ending() == DONE


def test_a_file_that_does_not_come_in_time_is_no_file() -> None:
    machine = offered(OfferSent(), OfferTaken(), DeadlinePassed())
    assert ended(machine) == (EndState.FAILED, "NO_FILE")
    assert machine.leaves_file


def test_iterations_that_do_not_happen_are_told_as_such() -> None:
    assert ended(offered(OfferSent(), OfferTaken(), DeadlinePassed(), request=BY_ITERATION)) == (
        EndState.FAILED,
        "ITERATIONS_NOT_REACHED",
    )
    assert longest_ns(BY_ITERATION, CONFIG) == CONFIG.max_duration_ns


def test_a_request_that_libkineto_drops_is_offered_again_some_times() -> None:
    machine = offered(OfferSent())
    for repeat in range(MOST_REPEATS):
        machine.handle(OPENED, NOW)
        assert machine.handle(OfferDropped(), NOW) == [MakeOffer()]
        machine.handle(OfferSent(2 + repeat), NOW)
    machine.handle(OPENED, NOW)
    assert not machine.may_be_repeated
    assert machine.handle(OfferDropped(), NOW) == []
    machine.handle(DeadlinePassed(), NOW)
    assert ended(machine) == (EndState.FAILED, "NO_FILE")


@pytest.mark.parametrize("seen", [NOTHING, GROWING, WHOLE], ids=["no file", "a file that grows", "a whole file"])
def test_only_an_open_and_empty_file_shows_that_it_was_dropped(seen: FolderLooked) -> None:
    machine = offered(OfferSent(), seen)
    assert machine.handle(OfferDropped(), NOW) == []


def test_a_process_that_ends_leaves_no_trace() -> None:
    ending = offered(OfferSent(), OfferTaken(), ProcessGone(died=True)).ending()
    assert ending == Ending(
        EndState.FAILED,
        "TARGET_EXITED",
        "process 7 ended during the capture; libkineto writes its file at the end, so there is none",
    )


def test_a_process_that_no_longer_polls_may_still_write_the_file_that_it_was_asked_for() -> None:
    assert offered(OfferSent(), ProcessGone(died=False)).ending() is None
    assert ended(offered(ProcessGone(died=False))) == (EndState.FAILED, "NOT_POLLED")


def test_a_start_time_to_come_is_waited_for() -> None:
    machine = offered(OfferSent(), request=START._replace(start_time_ns=NOW.unix_ns + 60 * 10**9))
    machine.handle(OfferTaken(), NOW)
    assert machine.deadline_s > NOW.loop_s + 60


@pytest.mark.parametrize("ending", [CANCELLED, KEPT, STOPPED], ids=lambda each: each.code)
def test_before_libkineto_has_the_request_every_stop_ends_it(ending: Ending) -> None:
    machine = offered()
    assert machine.handle(StopWanted(ending), NOW) == [WithdrawOffer()]
    assert machine.ending() == ending
    assert not machine.leaves_file


def test_a_cancellation_that_keeps_nothing_ends_it_and_leaves_the_file_to_come() -> None:
    machine = offered(OfferSent(), StopWanted(CANCELLED))
    ending = machine.ending()
    assert ending is not None
    assert (ending.outcome, ending.code) == (EndState.CANCELLED, "CANCELLED")
    assert "libkineto cannot be stopped" in ending.reason
    assert machine.leaves_file


@pytest.mark.parametrize("ending", [KEPT, STOPPED], ids=lambda each: each.code)
def test_what_keeps_the_recording_changes_nothing_once_libkineto_has_the_request(ending: Ending) -> None:
    machine = offered(OfferSent(), StopWanted(ending))
    assert machine.ending() is None
    machine.handle(WHOLE, NOW)
    assert machine.ending() == DONE
