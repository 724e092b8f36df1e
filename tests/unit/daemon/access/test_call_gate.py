"""The gate of all calls: who is admitted to what, and what the audit log has of it."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.access.audit_log import AuditLog
from kinetod.access.call_gate import Authorizer, CallTracker, audit_fields
from kinetod.access.callers import Callers, CallerStatus
from kinetod.base.errors import KinetodError, NotFound, NotIdentified, NotPermitted, Reason
from kinetod.base.fair_slots import fair_share_key
from kinetod.captures.manager import no_such_capture
from kinetod.permissions.caller_limits import RequestRate, Shares
from kinetod.permissions.role_policy import CALLS, Action, Caller, Resource, Role, Via
from support.service.callers import caller


def test_every_condition_of_a_selector_can_be_written_to_the_audit_log() -> None:
    selector = pb.Selector(
        pids=[7],
        command_regex="x" * 600,
        user="ada",
        ranks=range(200),
        job_ids=["77"],
        gpus=[0],
        children=True,
        helpers=True,
        job_step="batch",
        pod_uids=["p"],
        container_ids=["c"],
    )
    assert len(selector.ListFields()) == len(selector.DESCRIPTOR.fields)
    for request in (
        pb.ListProcessesRequest(selector=selector),
        pb.CreateCaptureRequest(spec=pb.CaptureSpec(selector=selector)),
    ):
        asked = json.loads(json.dumps(audit_fields(request)))["selector"]
        assert asked["helpers"] is True
        assert (len(asked["command_regex"]), len(asked["ranks"]), asked["gpus"]) == (500, 100, [0])


CAPTURES = {"adas": Resource(uid=1000), "bobs": Resource(uid=1001), "nobodys": Resource(uid=None)}
OF_CAPTURES = [call for call, action in CALLS.items() if action in (Action.SEE_CAPTURE, Action.CHANGE_CAPTURE)]


class Known:
    """Callers: it is known who asks. Raises what it is given instead."""

    def __init__(self, who: Caller | KinetodError) -> None:
        self._who = who
        self.pods: frozenset[str] = frozenset()

    async def caller(self, _connection: str, _auth: object, _action: object, pods: frozenset[str]) -> Caller:
        self.pods = pods
        if isinstance(self._who, KinetodError):
            raise self._who
        return self._who

    def standing(self, _connection: str, _auth: object) -> CallerStatus:
        return CallerStatus(key="uid 1000", who="ada", via=Via.UNIX, uid=1000)


@dataclass
class Made:
    """A gate, the file of its audit log, and for how long connections were paused."""

    gate: Authorizer
    log: Path
    audit: AuditLog
    held: list[str]

    def lines(self) -> list[dict[str, Any]]:
        self.audit.close()
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Made]:
    def make(who: Caller | KinetodError, per_second: int = 1000) -> Made:
        held: list[str] = []
        log = tmp_path / "audit"
        audit = AuditLog(log, clock=lambda: 0)
        rate = RequestRate(lambda: per_second, clock=lambda: 0.0)
        shares = Shares(Reason.TOO_MANY_CALLS, "calls", "s", own=lambda: 9, in_all=lambda: 99)
        callers = cast("Callers", Known(who))
        call_tracker = CallTracker(callers, shares, rate, audit, hold=lambda name, _seconds: held.append(name))

        async def resource_of(capture_id: str) -> Resource | None:
            return CAPTURES.get(capture_id)

        gate = Authorizer(callers, rate, audit, call_tracker, resource_of=resource_of, no_such=no_such_capture)
        return Made(gate, log, audit, held)

    return make


def request(call: str, capture_id: str) -> Any:
    made = getattr(pb, f"{call}Request")()
    setattr(made, "id" if "id" in made.DESCRIPTOR.fields_by_name else "capture_id", capture_id)
    return made


def admitted(made: Made, call: str, asked: Any) -> str:
    """Its caller's user, or why not."""
    try:
        return asyncio.run(made.gate.admit(call, "c1", {}, asked)).user
    except KinetodError as exc:
        return str(exc.reason)


OF_ONE = [call for call in OF_CAPTURES if call not in ("ListCaptures",)]


@pytest.mark.parametrize("call", OF_ONE)
@pytest.mark.parametrize(
    ("roles", "seen", "changed"),
    [
        ({Role.OWN}, {"adas"}, {"adas"}),
        ({Role.OWN, Role.VIEWER}, {"adas", "bobs", "nobodys"}, {"adas"}),
        ({Role.VIEWER}, {"adas", "bobs", "nobodys"}, set()),
        ({Role.ADMIN}, {"adas", "bobs", "nobodys"}, {"adas", "bobs", "nobodys"}),
    ],
)
@pytest.mark.parametrize("name", [*CAPTURES, "none"])
def test_a_capture_is_open_to_whom_it_is_and_others_do_not_learn_of_it(
    made: Callable[..., Made], call: str, roles: set[Role], seen: set[str], changed: set[str], name: str
) -> None:
    changes = CALLS[call] is Action.CHANGE_CAPTURE
    expected = "user1000" if name in (changed if changes else seen) else "NO_SUCH_CAPTURE"
    if changes and (roles == {Role.VIEWER} or (name in seen and name not in changed)):
        expected = "ROLE_NEEDED"  # that it is there is no news to who sees it
    assert admitted(made(caller(roles=roles)), call, request(call, name)) == expected


@pytest.mark.parametrize("call", CALLS)
def test_who_has_no_role_calls_nothing(made: Callable[..., Made], call: str) -> None:
    gate = made(caller(roles=()))
    assert admitted(gate, call, pb.GetHostRequest()) == "ROLE_NEEDED"
    (line,) = gate.lines()
    assert (line["call"], line["decision"], line["reason"], line["uid"]) == (call, "denied", "ROLE_NEEDED", 1000)


def test_a_call_that_no_rule_covers_is_nobodys(made: Callable[..., Made]) -> None:
    assert admitted(made(caller(roles=Role)), "Shutdown", pb.GetHostRequest()) == "ROLE_NEEDED"


def test_who_is_known_and_refused_is_refused_whatever_the_roles(made: Callable[..., Made]) -> None:
    refused = NotPermitted(Reason.NOT_DELEGATED, "not for root")
    gate = made(caller(roles=Role, refusal=refused))
    assert admitted(gate, "GetHost", pb.GetHostRequest()) == "NOT_DELEGATED"
    assert [(line["decision"], line["reason"]) for line in gate.lines()] == [("denied", "NOT_DELEGATED")]


@pytest.mark.parametrize("call", ["CreateCapture", "ListProcesses", "GetHost"])
def test_rights_over_pods_are_asked_for_those_that_a_request_names(made: Callable[..., Made], call: str) -> None:
    gate, selector = made(caller(roles=Role)), pb.Selector(pod_uids=["p1", "p2"])
    asked = {
        "CreateCapture": pb.CreateCaptureRequest(spec=pb.CaptureSpec(selector=selector)),
        "ListProcesses": pb.ListProcessesRequest(selector=selector),
        "GetHost": pb.GetHostRequest(),
    }[call]
    assert admitted(gate, call, asked) == "user1000"
    assert cast("Known", gate.gate._callers).pods == (frozenset() if call == "GetHost" else {"p1", "p2"})


def test_the_log_names_the_process_that_was_asked_about() -> None:
    assert audit_fields(pb.DiagnoseProcessRequest(pid=7))["asked_pid"] == 7
    assert "asked_pid" not in audit_fields(pb.GetHostRequest())


def test_who_is_known_is_not_counted_as_a_stranger(made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = made(caller(roles=()))
    monkeypatch.setattr(CallTracker, "unknown", lambda *_arguments: pytest.fail("the caller was known"))
    assert admitted(gate, "GetHost", pb.GetHostRequest()) == "ROLE_NEEDED"


def test_a_capture_of_nobody_has_no_owner_in_the_log(made: Callable[..., Made]) -> None:
    gate, who = made(caller()), caller()
    with gate.gate.noted("GetCapture", who, pb.GetCaptureRequest(id="new")) as noted:
        noted.answer = pb.Capture(id="new", targets=[pb.Target(pid=7, process=pb.Process(uid=1000))])
    with gate.gate.noted("GetHost", who, pb.GetHostRequest()) as noted:
        noted.answer = pb.Host()
    with gate.gate.noted("WatchHost", who, pb.WatchHostRequest()):
        pass
    gate.gate.note_end(pb.Capture(id="new"))
    one, host, watch, end = gate.lines()
    assert (one.get("owner_uid"), end.get("owner_uid")) == (None, None)
    assert one["targets"] == [{"pid": 7, "uid": 1000}]
    assert host["decision"] == watch["decision"] == "allowed"


def test_a_caller_whom_nobody_knows_is_refused_and_in_the_log(made: Callable[..., Made]) -> None:
    gate = made(NotIdentified(Reason.NOT_IDENTIFIED, "no certificate"), per_second=1)
    answers = {admitted(gate, "GetHost", pb.GetHostRequest()) for _ in range(50)}
    assert answers == {"NOT_IDENTIFIED", "TOO_MANY_REQUESTS"}
    assert gate.held
    assert "uid" not in gate.lines()[0]


@pytest.mark.parametrize(("call", "allowed"), [("GetHost", 4), ("ListProcesses", 2), ("DiagnoseHost", 1)])
def test_who_asks_too_often_is_refused_and_paused(made: Callable[..., Made], call: str, allowed: int) -> None:
    gate = made(caller(roles=Role), per_second=1)
    answers = [admitted(gate, call, pb.GetHostRequest()) for _ in range(50)]
    assert answers == ["user1000"] * allowed + ["TOO_MANY_REQUESTS"] * (50 - allowed)
    assert set(gate.held) == {"c1"}
    refused = [line for line in gate.lines() if line["decision"] == "refused"]
    assert len(refused) < 5  # they are counted, not written each


def test_what_a_call_costs_is_its_callers(made: Callable[..., Made]) -> None:
    async def run() -> str:
        await made(caller(1001)).gate.admit("GetHost", "c1", {}, pb.GetHostRequest())
        return fair_share_key.get()

    assert asyncio.run(run()) == "uid 1001"


def test_each_end_of_a_call_is_a_line(made: Callable[..., Made]) -> None:
    gate, who = made(caller()), caller()
    target = pb.Target(pid=7, process=pb.Process(uid=1000, job_id="77"))
    asked = pb.CreateCaptureRequest(spec=pb.CaptureSpec(selector=pb.Selector(pids=[7])))
    with gate.gate.noted("CreateCapture", who, asked) as noted:
        noted.answer = pb.Capture(id="new", owner_uid=1000, targets=[target])
    with contextlib.suppress(KinetodError), gate.gate.noted("CreateCapture", who, asked):
        error = NotFound(Reason.NO_MATCH, "none")
        error.audited = {"target_uid": 1001}
        raise error
    with contextlib.suppress(asyncio.CancelledError), gate.gate.noted("CreateCapture", who, asked):
        raise asyncio.CancelledError
    ended = pb.Target(reason_code="AGENT_LOST")
    gate.gate.note_end(pb.Capture(id="new", owner_uid=1000, status=pb.CAPTURE_STATUS_PARTIAL, targets=[target, ended]))
    allowed, refused, left, end = gate.lines()
    assert allowed["decision"] == "allowed"
    assert (allowed["capture"], allowed["owner_uid"], allowed["selector"]) == ("new", 1000, {"pids": [7]})
    assert allowed["targets"] == [{"pid": 7, "uid": 1000, "job": "77"}]
    assert (refused["decision"], refused["reason"], refused["target_uid"]) == ("refused", "NO_MATCH", 1001)
    assert (left["decision"], left["selector"]) == ("CancelledError", {"pids": [7]})
    assert (end["call"], end["capture"], end["owner_uid"]) == ("(end of capture)", "new", 1000)
    assert end["verdicts"] == {"DONE": 1, "AGENT_LOST": 1}
