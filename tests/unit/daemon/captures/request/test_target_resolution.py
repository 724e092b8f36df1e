"""Who may trace which process, decided before it is touched and again afterwards."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import InvalidRequest, KinetodError
from kinetod.captures.request.target_resolution import TargetRequest, check_known, resolve
from kinetod.permissions.role_policy import Caller, Role
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin
from kinetod.processes.identity import ProcessKey
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
        "spec.activity_types[0]: no source knows the activity type 'tin_zzz'; the selected processes offer "
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
