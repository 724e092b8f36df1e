"""Who may trace which process, decided before it is touched and again afterwards."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.attach.attach_types import Approval, AttachCode
from kinetod.base.errors import InvalidRequest, KinetodError
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.request.target_resolution import (
    PolledTargets,
    TargetRequest,
    check_known,
    nobody_polls,
    polled_uid,
    resolve,
)
from kinetod.kineto_files.direct_folders import DirectTraceFolders
from kinetod.kineto_ipc.poller_registry import OfferEvent, PollingProcess
from kinetod.permissions.role_policy import Caller, Role
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin
from kinetod.processes import credentials
from kinetod.processes.identity import ProcessKey, start_time_ns
from kinetod.processes.process_info import ProcessFacts
from kinetod.selection.candidate import Candidate
from kinetod.selection.process_registry import Registry, checked_selector
from support.service.approvals import PLAIN
from support.service.callers import ROOT, caller

PID = 1 << 30  # beyond those that the kernel gives
ADA, VIEWER = caller(1000, {Role.OWN}), caller(1000, {Role.OWN, Role.VIEWER})
NAMED, BY_COMMAND = pb.Selector(pids=[PID]), pb.Selector(command_regex="python")
FACTS = ProcessFacts(
    key=ProcessKey(PID, 1), uid=1000, user="ada", command=("python",), gpus=(), rank=None, world_size=None,
    job_id="", is_python=True, credentials=PLAIN,
)  # fmt: skip
BOBS = replace(FACTS, uid=1001, user="bob", credentials=replace(PLAIN, uids=(1001,) * 4))
HIDDEN = f"process {PID} does not exist or does not belong to user1000 (uid 1000)"
ON = LoadedPlugin(name="toy", activity_types=("toy_kernel",))
REFUSED = LoadedPlugin(name="tin", refused="it is broken")
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


@dataclass
class Processes:
    """A registry of one process with an agent. then: what it is once the agent has been asked for; None: gone."""

    facts: ProcessFacts | None
    then: ProcessFacts | None
    agent: Any
    own_uid: int

    def _candidate(self, facts: ProcessFacts | None) -> Candidate | None:
        if facts is None:
            return None
        process = pb.Process(pid=PID, uid=facts.uid, user=facts.user, agent_state=pb.AGENT_STATE_READY)
        return Candidate(facts.key, process, self.agent, facts)

    async def candidate(self, _pid: int) -> Candidate | None:
        return self._candidate(self.facts)

    async def candidates(self, _pids: object) -> list[Candidate]:
        found = self._candidate(self.then)
        return [] if found is None else [found]

    async def selected(
        self, _match: object, usable: Callable[[Candidate], bool], **_options: object
    ) -> list[Candidate]:
        return [each for each in await self.candidates(()) if usable(each)]

    async def narrowed(self, _match: object, candidates: list[Candidate]) -> list[Candidate]:
        return candidates


def refusal(
    who: Caller,
    facts: ProcessFacts | None = FACTS,
    then: ProcessFacts | None = FACTS,
    *,
    own_uid: int = 0,
    agents_uid: int | None = None,
    capture_id: str = "",
    selector: pb.Selector = NAMED,
    each_by_itself: bool = False,
) -> tuple[str, str, int | None]:
    """Why the process is not traced, and its owner according to the audit log."""
    uid = agents_uid if facts is None or agents_uid is not None else facts.uid
    identity = SimpleNamespace(uid=uid)
    agent = SimpleNamespace(capture_id=capture_id, held=contextlib.nullcontext, identity=identity)
    registry = cast("Registry", Processes(facts, then, agent, own_uid))
    match = checked_selector(selector)
    wanted = TargetRequest(match=match, caller=who, attacher=None, keep_agent_ns=0, each_by_itself=each_by_itself)
    try:
        with contextlib.ExitStack() as holds:
            (target,) = asyncio.run(resolve(registry, wanted, holds))
        if target.problem is not None:
            raise target.problem
    except KinetodError as exc:
        return str(exc.reason), exc.message, exc.audited.get("target_uid")
    return "", "", None


@pytest.mark.parametrize(
    ("who", "facts", "own_uid", "reason", "text", "logged"),
    [
        (ADA, FACTS, 0, "", "", None),
        (ROOT, BOBS, 0, "", "", None),
        (ADA, BOBS, 0, "NOT_YOUR_PROCESS", HIDDEN, 1001),
        (ADA, None, 0, "NOT_YOUR_PROCESS", HIDDEN, None),
        (ROOT, None, 0, "NO_SUCH_PROCESS", f"there is no process {PID}", None),
        (VIEWER, BOBS, 0, "NOT_YOUR_PROCESS", "belongs to bob, and user1000 (uid 1000)", 1001),
        (ADA, replace(FACTS, plain=False), 0, "NOT_YOUR_PROCESS", "the kernel would not let that user trace it", 1000),
        (VIEWER, replace(BOBS, plain=False), 0, "NOT_YOUR_PROCESS", "belongs to bob", 1001),
        (ROOT, BOBS, 1000, "NOT_YOUR_PROCESS", "this daemon serves uid 1000 only", 1001),
        (ROOT, FACTS, 1000, "", "", None),
    ],
)
def test_a_process_is_traced_for_whom_it_is_and_others_do_not_learn_of_it(
    who: Caller, facts: ProcessFacts | None, own_uid: int, reason: str, text: str, logged: int | None
) -> None:
    found = refusal(who, facts, facts, own_uid=own_uid)
    assert (found[0], found[2]) == (reason, logged)
    assert text in found[1]


@pytest.mark.parametrize(
    ("selector", "each_by_itself", "who", "facts", "reason"),
    [
        (BY_COMMAND, False, ADA, FACTS, ""),
        (BY_COMMAND, False, ADA, BOBS, "NO_MATCH"),
        (BY_COMMAND, False, VIEWER, BOBS, "NO_MATCH"),
        (NAMED, True, ADA, FACTS, ""),
        (NAMED, True, ADA, BOBS, "NO_MATCH"),
        (NAMED, True, VIEWER, BOBS, "NOT_YOUR_PROCESS"),
        (pb.Selector(pids=[PID], children=True), False, ADA, FACTS, ""),
        (pb.Selector(pids=[PID], children=True), False, ADA, BOBS, "NOT_YOUR_PROCESS"),
    ],
)
def test_however_processes_are_selected_those_of_others_are_not(
    selector: pb.Selector, each_by_itself: bool, who: Caller, facts: ProcessFacts, reason: str
) -> None:
    assert refusal(who, facts, facts, selector=selector, each_by_itself=each_by_itself)[0] == reason


@pytest.mark.parametrize(
    ("then", "agents_uid", "reason", "text", "logged"),
    [
        (BOBS, 1000, "NOT_YOUR_PROCESS", HIDDEN, 1001),
        (replace(FACTS, credentials=replace(PLAIN, capabilities=1)), 1000, "ATTACH_REPLACED", "another program", 1000),
        (FACTS, 1001, "ATTACH_REPLACED", "another program", 1000),
        (None, 1000, "ATTACH_GONE", "has ended", 1000),
        (replace(FACTS, credentials=None), 1000, "ATTACH_GONE", "has ended", 1000),
    ],
)
def test_what_has_changed_since_it_was_allowed_is_refused_and_nothing_of_it_told(
    then: ProcessFacts | None, agents_uid: int, reason: str, text: str, logged: int
) -> None:
    found = refusal(ADA, FACTS, then, agents_uid=agents_uid)
    assert (found[0], found[2]) == (reason, logged)
    assert text in found[1] and "capabilit" not in found[1] and "1001" not in found[1]


def test_a_process_that_is_being_traced_is_busy() -> None:
    assert refusal(ADA, capture_id="c1")[0] == "BUSY"


class Offering:
    """As much of an agent as is asked."""

    def __init__(self, *types: str) -> None:
        self._types = list(types)

    def activity_types(self) -> list[str]:
        return self._types


STACKS: Any = Offering("python_function")


def problem(wanted: str, *known: LoadedPlugin) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_known([wanted], [STACKS], KnownPlugins(known=known))
    return caught.value.message


def test_types_of_plug_ins_are_known_wherever_their_accelerator_is() -> None:
    known = KnownPlugins(known=(ON,))
    assert known.activity_types == {"toy_kernel"}
    check_known(["toy_kernel", "kernel"], [STACKS, None], known)
    with pytest.raises(InvalidRequest):
        check_known(["toy_kernel", "kernel"], [STACKS, None])


def test_an_unknown_type_may_be_that_of_a_plug_in_that_is_not_used() -> None:
    assert problem("tin_zzz", ON, REFUSED) == (
        "spec.activity_types[0]: unknown activity type 'tin_zzz'; the selected processes offer "
        "python_function; the plug-in tin is not used: it is broken"
    )


def test_a_type_that_cannot_be_its_own_does_not_name_a_plug_in_that_is_not_used() -> None:
    assert problem("kernl", REFUSED).endswith("offer python_function")


def test_a_misspelling_is_guessed() -> None:
    assert "(did you mean python_function?)" in problem("python_functions")


def test_without_any_agent_nothing_is_checked() -> None:
    check_known(["tin_kernel"], [None])
    with pytest.raises(InvalidRequest):
        check_known(["tin_kernel"], [None, STACKS])
