import pytest
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import VerdictReason
from kinetod.captures.result.verdict import (
    DONE,
    KEPT,
    Ending,
    EndState,
    Final,
    capture_status,
    ending_of_rejection,
    ending_of_result,
    final,
)

EXITED = Ending(EndState.PARTIAL, "TARGET_EXITED", "it ended")


def result(outcome: str, code: str = "", reason: str = "") -> wire.Result:
    return wire.Result("c", outcome, code, reason, 1, 2, {}, {}, {}, {}, [])


def test_everything_recorded_and_stored_is_done() -> None:
    assert final(DONE, recorded=True, dropped=0) == Final(pb.VERDICT_DONE, "", "")
    assert final(DONE, recorded=False, dropped=0) == Final(pb.VERDICT_DONE, "", "")


def test_dropped_records_are_counted_in_the_verdict() -> None:
    verdict = final(DONE, recorded=True, dropped=7)
    assert (verdict.verdict, verdict.code) == (pb.VERDICT_PARTIAL, "RECORDS_DROPPED")
    assert verdict.reason.startswith("records lost because the buffers were full: 7;")


def test_unreadable_records_are_counted_in_the_verdict() -> None:
    verdict = final(DONE, recorded=True, dropped=0, unreadable=3)
    assert (verdict.verdict, verdict.code) == (pb.VERDICT_PARTIAL, "RECORDS_UNREADABLE")


def test_a_cut_file_makes_the_verdict_partial_and_is_named() -> None:
    cut = ["the memory-snapshot file is incomplete: 3 of 9 bytes are present"]
    assert final(DONE, recorded=True, dropped=0, cut=cut) == Final(pb.VERDICT_PARTIAL, "FILE_INCOMPLETE", cut[0])
    also = final(EXITED, recorded=True, dropped=0, cut=cut)
    assert also == Final(pb.VERDICT_PARTIAL, "TARGET_EXITED", f"it ended; {cut[0]}")


def test_a_partial_collection_without_records_has_failed() -> None:
    assert final(EXITED, recorded=False, dropped=0) == Final(
        pb.VERDICT_FAILED, "TARGET_EXITED", "it ended; nothing had been recorded by then"
    )


def test_a_failure_does_not_deny_the_records_that_the_counts_show() -> None:
    assert final(EXITED, recorded=False, dropped=0, made=1905).reason == (
        "it ended; none of the records made by then (1,905) is from the window, so none is kept"
    )


def test_what_was_cancelled_before_its_first_record_keeps_nothing() -> None:
    cancelled = Ending(EndState.PARTIAL, VerdictReason.CANCELLED, f"cancelled{KEPT}")
    assert final(cancelled, recorded=False, dropped=0) == Final(
        pb.VERDICT_FAILED, "CANCELLED", "cancelled; nothing had been recorded by then"
    )


def test_a_partial_collection_says_what_it_dropped_too() -> None:
    assert final(EXITED, recorded=True, dropped=0) == Final(pb.VERDICT_PARTIAL, "TARGET_EXITED", "it ended")
    verdict = final(EXITED, recorded=True, dropped=2)
    assert verdict.reason.startswith("it ended; records lost because the buffers were full: 2;")


def test_a_failed_decode_is_a_failure_that_remembers_what_came_before() -> None:
    assert final(EXITED, recorded=True, dropped=0, decode_error=("DECODE_FAILED", "it crashed")) == Final(
        pb.VERDICT_FAILED, "DECODE_FAILED", "it crashed (before that: it ended)"
    )


def test_a_cancelled_collection_is_cancelled_whatever_was_recorded() -> None:
    ending = Ending(EndState.CANCELLED, "CANCELLED", "cancelled")
    assert final(ending, recorded=True, dropped=1).verdict == pb.VERDICT_CANCELLED


@pytest.mark.parametrize(
    ("message", "ending"),
    [
        (result("done"), DONE),
        (result("partial", "TARGET_EXITING", "bye"), Ending(EndState.PARTIAL, "TARGET_EXITED", "bye")),
        (result("failed", "CUPTI_BUSY", "nsys"), Ending(EndState.FAILED, "CUPTI_BUSY", "nsys")),
        (
            result("failed", "not a code\n", ""),
            Ending(EndState.FAILED, "AGENT_ERROR", "the agent gave no reason beyond AGENT_ERROR"),
        ),
        (
            result("splendid"),
            Ending(EndState.FAILED, "AGENT_ERROR", "the agent sent an unknown outcome 'splendid'"),
        ),
    ],
)
def test_what_an_agent_says_of_the_end(message: wire.Result, ending: Ending) -> None:
    assert ending_of_result(message) == ending


def test_a_rejection_names_the_capture_in_the_way() -> None:
    rejected = wire.Rejected("c", "BUSY", "busy", "other")
    assert ending_of_rejection(rejected) == Ending(EndState.FAILED, "BUSY", "busy (capture other)")


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([pb.VERDICT_DONE, pb.VERDICT_DONE], pb.CAPTURE_STATUS_DONE),
        ([pb.VERDICT_DONE, pb.VERDICT_UNSPECIFIED], pb.CAPTURE_STATUS_RUNNING),
        ([pb.VERDICT_DONE, pb.VERDICT_FAILED], pb.CAPTURE_STATUS_PARTIAL),
        ([pb.VERDICT_PARTIAL], pb.CAPTURE_STATUS_PARTIAL),
        ([pb.VERDICT_CANCELLED, pb.VERDICT_CANCELLED], pb.CAPTURE_STATUS_CANCELLED),
        ([pb.VERDICT_CANCELLED, pb.VERDICT_FAILED], pb.CAPTURE_STATUS_FAILED),
        ([pb.VERDICT_FAILED], pb.CAPTURE_STATUS_FAILED),
    ],
)
def test_a_captures_status_comes_from_its_targets(verdicts: list[pb.Verdict], status: pb.CaptureStatus) -> None:
    assert capture_status(verdicts) == status
