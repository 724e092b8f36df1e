"""Who records in a process whose libkineto polls."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.attach.attach_types import Approval, AttachCode
from kinetod.base.errors import KinetodError
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.request.polled_targets import PolledTargets, nobody_polls, polled_uid
from kinetod.kineto_files.direct_folders import DirectTraceFolders
from kinetod.kineto_ipc.poller_registry import OfferEvent, PollingProcess
from kinetod.processes import credentials
from kinetod.processes.identity import ProcessKey, start_time_ns

OWN = ProcessKey(os.getpid(), start_time_ns(os.getpid()))
OTHER = ProcessKey(OWN.pid, OWN.start_time_ns + 1)
NAME = "process 7 (python train.py)"
AGENT, KINETO, OPEN = pb.RECORDER_AGENT, pb.RECORDER_KINETO, pb.RECORDER_UNSPECIFIED


class NeverOffered:
    """An offer that nobody makes."""

    times_sent = 0

    def withdraw(self) -> None:
        """Does nothing."""


@dataclass
class StillPolling:
    """This process as one that polls."""

    key: ProcessKey = OWN
    uid: int = field(default_factory=os.geteuid)
    gid: int = field(default_factory=os.getegid)
    pids: tuple[int, ...] = (1,)
    job_id: int = 0
    last_poll_ns: int = 1
    tracing: bool = False

    def offer(self, _configuration: bytes, _on_event: Callable[[OfferEvent], None]) -> NeverOffered:
        """Takes no offer."""
        return NeverOffered()


class OneThatPolls:
    """PollingProcesses of one."""

    def __init__(self, process: StillPolling) -> None:
        self.process = process

    def get(self, key: ProcessKey) -> PollingProcess | None:
        """The one, if the key is its own."""
        return self.process if key == self.process.key else None

    def all(self) -> list[PollingProcess]:
        """The one."""
        return [self.process]


def rules(
    recorder: pb.Recorder = OPEN, setting: str = "agent", *, tracing: bool = False, **spec: object
) -> PolledTargets:
    shared = KinetoRecorder(OneThatPolls(StillPolling(tracing=tracing)), DirectTraceFolders())
    return PolledTargets(shared, pb.CaptureSpec(recorder=recorder, **spec), setting)  # type: ignore[arg-type]


def outcome(chosen: tuple[PollingProcess | None, KinetodError | None]) -> str:
    polling, problem = chosen
    return problem.reason.value if problem is not None else "agent" if polling is None else "kineto"


@pytest.mark.parametrize(
    ("recorder", "setting", "expected"),
    [
        (OPEN, "agent", "agent"),
        (OPEN, "kineto", "kineto"),
        (OPEN, "refuse", "TRACING_REFUSED"),
        (AGENT, "agent", "agent"),
        (AGENT, "kineto", "agent"),
        (AGENT, "refuse", "TRACING_REFUSED"),
        (KINETO, "agent", "kineto"),
        (KINETO, "kineto", "kineto"),
        (KINETO, "refuse", "TRACING_REFUSED"),
    ],
)
def test_the_request_chooses_then_the_setting_and_a_refusal_is_final(
    recorder: pb.Recorder, setting: str, expected: str
) -> None:
    assert outcome(rules(recorder, setting).chosen(OWN, NAME)) == expected


@pytest.mark.parametrize(
    ("recorder", "setting", "expected"),
    [(OPEN, "kineto", "agent"), (OPEN, "refuse", "agent"), (AGENT, "agent", "agent"), (KINETO, "agent", "NOT_POLLING")],
)
def test_the_rules_are_about_processes_that_poll(recorder: pb.Recorder, setting: str, expected: str) -> None:
    assert outcome(rules(recorder, setting).chosen(OTHER, NAME)) == expected
    assert outcome(PolledTargets(None, pb.CaptureSpec(recorder=recorder), setting).chosen(OWN, NAME)) == expected


@pytest.mark.parametrize(
    ("recorder", "code", "may"),
    [
        *((OPEN, code, code not in (AttachCode.GONE, AttachCode.REPLACED)) for code in AttachCode),
        *((AGENT, code, False) for code in AttachCode),
        (OPEN, None, True),
    ],
)
def test_libkineto_stands_in_where_no_agent_can_be_attached(
    recorder: pb.Recorder, code: AttachCode | None, may: bool
) -> None:
    assert (rules(recorder).instead(OWN, code) is not None) == may
    assert rules(recorder).instead(OTHER, code) is None


def test_a_process_that_records_is_busy_for_libkineto_and_by_a_capture_for_the_agent_too() -> None:
    free, armed = rules(), rules(tracing=True)
    assert (free.busy(OWN, NAME), free.recording(OWN, NAME)) == (None, None)
    assert armed.recording(OWN, NAME) is None
    problem = armed.busy(OWN, NAME)
    assert problem is not None
    assert problem.reason == "BUSY"


def test_a_capture_keeps_the_process_busy_until_it_frees_it() -> None:
    shared = KinetoRecorder(OneThatPolls(StillPolling()), DirectTraceFolders())
    polled = PolledTargets(shared, pb.CaptureSpec(), "agent")
    shared.take(OWN, "c1")
    problem = polled.recording(OWN, NAME)
    assert problem is not None
    assert dict(problem.metadata)["capture_id"] == "c1"
    shared.free(OWN, "another")
    assert polled.recording(OWN, NAME) is not None
    shared.free(OWN, "c1")
    assert polled.recording(OWN, NAME) is None


def test_what_a_poll_said_before_the_trace_was_whole_keeps_nobody_busy() -> None:
    process = StillPolling(tracing=True, last_poll_ns=1)
    shared = KinetoRecorder(OneThatPolls(process), DirectTraceFolders())
    polled = PolledTargets(shared, pb.CaptureSpec(), "agent")
    assert polled.busy(OWN, NAME) is not None
    shared.finished(OWN)
    assert polled.busy(OWN, NAME) is None
    process.last_poll_ns = time.time_ns() + 1
    assert polled.busy(OWN, NAME) is not None


def test_a_process_that_no_longer_polls_is_told() -> None:
    polled = rules()
    known = polled.process(OWN)
    assert known is not None
    assert polled.no_longer(known, NAME) is None
    assert polled.no_longer(StillPolling(), NAME) is not None


def test_a_request_that_libkineto_cannot_carry_out_is_a_problem() -> None:
    own = Approval(credentials.read(os.getpid()))
    assert asyncio.run(rules().problem(OWN, own)) is None
    problem = asyncio.run(rules(activity_types=["memory_snapshot"]).problem(OWN, own))
    assert problem is not None
    assert (problem.reason, "memory_snapshot" in problem.message) == ("LIBKINETO_UNAVAILABLE", True)
    gone = asyncio.run(rules().problem(OTHER, own))
    assert gone is not None
    assert "has ended" in gone.message


def test_the_user_who_polled_must_be_the_approved_one() -> None:
    own = credentials.read(os.getpid())
    assert polled_uid(StillPolling(), own) == ""
    assert polled_uid(StillPolling(uid=own.uid + 1), own) == f"its libkineto polled as uid {own.uid + 1}"


def test_without_a_door_nobody_polls() -> None:
    polled = nobody_polls()
    assert (polled.any_polls(), polled.process(OWN), polled.only_kineto) == (False, None, False)
