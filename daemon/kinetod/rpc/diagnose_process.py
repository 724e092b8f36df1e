"""DiagnoseProcess: what the daemon knows about a process, combined with what can be seen from outside."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.attach.finding import Finding, Status
from kinetod.attach.inspect import process_inspection
from kinetod.attach_helper.diagnosis import Diagnosis, KnownAgent
from kinetod.attach_helper.diagnosis_runner import DiagnosisProcess
from kinetod.base.errors import invalid
from kinetod.base.safe_text import clean
from kinetod.captures.request.target_resolution import no_such_process, not_yours
from kinetod.kineto_ipc.door_findings import DoorState
from kinetod.kineto_ipc.door_findings import of_process as polling_findings
from kinetod.permissions.role_policy import Action, Caller, Thing, may
from kinetod.plugins.plugin_findings import of_process
from kinetod.plugins.plugin_loader import KnownPlugins
from kinetod.selection.candidate import Candidate
from kinetod.selection.process_registry import Registry

_MAX_TEXT_CHARS = 2000
_AGENT_STATES = {
    pb.AGENT_STATE_READY: "READY",
    pb.AGENT_STATE_BUSY: "BUSY",
    pb.AGENT_STATE_INCOMPATIBLE: "INCOMPATIBLE",
}


class Looker(Protocol):
    """Inspects a process: a process of our own, or the attach helper service."""

    async def diagnose(self, pid: int, agent: KnownAgent) -> Diagnosis:
        """Diagnoses a process. Raises ProcessLookupError if it does not exist."""


class Diagnoser:
    """Diagnoses processes for callers. attaching: whether this daemon attaches agents at all; plugins: this daemon's;
    polls: where it answers libkineto's polls, None: nowhere.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        attaching: bool = True,
        process: Looker | None = None,
        own_uid: int | None = None,
        polls: Callable[[], DoorState | None] = lambda: None,
        plugins: KnownPlugins | None = None,
    ) -> None:
        self._registry = registry
        self._attaching = attaching
        self._process: Looker = process or DiagnosisProcess()
        self._polls = polls
        self._own_uid = registry.own_uid if own_uid is None else own_uid
        self._plugins = plugins or KnownPlugins()

    async def diagnose(self, pid: int, caller: Caller) -> pb.Diagnosis:
        """Diagnoses a process for a caller. Raises InvalidRequest, NotFound, NotPermitted."""
        if pid <= 0:
            raise invalid("pid", f"must be greater than 0, got {pid}")
        process, _ = await self._describe(pid, caller)
        if refused := not_yours(process, self._own_uid):
            raise refused
        agent = KnownAgent(
            state=_AGENT_STATES.get(process.agent_state, ""),
            version=process.agent_version,
            attached=process.attached,
            capture_id=process.busy_capture_id,
            attaching=self._attaching,
        )
        try:
            found = await self._process.diagnose(pid, agent)
        except ProcessLookupError as exc:
            raise no_such_process(caller, pid, Action.SEE_PROCESS) from exc
        await self._registry.refresh([pid])
        now, candidate = await self._describe(pid, caller)  # it may have become another user's while it was looked at
        if now.uid != process.uid:
            raise no_such_process(caller, pid, Action.SEE_PROCESS)
        polls = polling_findings(now, found.kineto, self._polls(), time.time_ns())
        return _to_proto(process, found, [*polls, *self._of_plugins(candidate)])

    def _of_plugins(self, candidate: Candidate | None) -> Iterable[Finding]:
        if candidate is None:
            return ()
        if not candidate.facts.is_python and candidate.agent is None:
            return (Finding("plugins", Status.OK, "they serve Python processes only"),)
        seen = None if candidate.facts.hidden else candidate.facts.plugins
        offers = candidate.agent.hello.sources if candidate.agent is not None else None
        return of_process(self._plugins, seen=seen, offers=offers)

    async def _describe(self, pid: int, caller: Caller) -> tuple[pb.Process, Candidate | None]:
        """The process, and what the registry knows of it."""
        candidate = await self._registry.candidate(pid)
        if candidate is not None:
            if not candidate.visible_to(caller):
                raise no_such_process(caller, pid, Action.SEE_PROCESS)
            return candidate.process, candidate
        try:  # the registry knows no zombies
            found = await asyncio.to_thread(process_inspection.read_process, pid)
        except ProcessLookupError as exc:
            raise no_such_process(caller, pid, Action.SEE_PROCESS) from exc
        uid = max(found.uids[1], 0)
        if not may(caller, Action.SEE_PROCESS, Thing(uid=uid)):
            raise no_such_process(caller, pid, Action.SEE_PROCESS)
        name = clean(found.name, 64)
        process = pb.Process(
            pid=pid, uid=uid, user=str(uid), command=[name], agent_state=pb.AGENT_STATE_NONE, iterations=-1
        )
        return process, None


def _to_proto(process: pb.Process, diagnosis: Diagnosis, more: Iterable[Finding]) -> pb.Diagnosis:
    checks = [to_check(finding) for finding in (*diagnosis.findings, *more)]
    return pb.Diagnosis(process=process, method=clean(diagnosis.method, 64), checks=checks)


def to_check(finding: Finding) -> pb.Check:
    """The public form of a finding."""
    return pb.Check(
        name=finding.name,
        status=f"CHECK_STATUS_{finding.status}",
        detail=clean(finding.detail, _MAX_TEXT_CHARS),
        advice=clean(finding.advice, _MAX_TEXT_CHARS),
    )
