"""Resolves a selector to the processes of a capture, or to an error.

Theory of operation
    `resolve` finds the processes, refuses those that inspection rules out, and only then attaches agents to those
    without one, all at once. That takes milliseconds to seconds, so no lock is held; `still_there` checks again,
    without waiting, when the capture is created. In between the agents are held, so that an attached one does not
    leave.

    A process may execute another program at any moment and then belong to another user. So once each target's agent is
    connected, the credentials of the process are read and checked again, as is the user of the connection according to
    the kernel. From then on only that link counts: an execve closes it, and a later link is a different one.

    `PolledTargets` decides who records in a process whose libkineto polls this daemon: kinetod's agent, its own
    libkineto, or nobody. The request takes precedence over the setting dynolog.tracing, except that no request
    overrides "refuse". If neither insists on the agent, a process that the agent cannot enter is left to its libkineto.
"""

import asyncio
import contextlib
import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kineto_agent.protocol.wire import PROTOCOL_VERSION
from kineto_agent.sources.registry import ACTIVITY_TYPES
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.agents.attacher import Attacher
from kinetod.attach.attach_types import Approval, AttachCode, Attached, AttachError, replaced
from kinetod.attach.inspect.process_inspection import MAIN_THREAD_ADVICE, MAIN_THREAD_ENDED, read_status
from kinetod.attach.inspect.target_memory import gone
from kinetod.base.errors import Exhausted, KinetodError, NotFound, NotPermitted, Precondition, Reason, invalid
from kinetod.captures.kineto_target.config_text import unsupported
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.kineto_ipc.poller_registry import PollingProcess
from kinetod.permissions.role_policy import Action, Caller, listed, may, needed, sees_all
from kinetod.plugins.plugin_loader import KnownPlugins
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import PROC, ProcessKey
from kinetod.selection.candidate import Candidate
from kinetod.selection.process_registry import Match, Registry, add_agent

MAX_TARGETS = 512  # they travel in one message
HOW_TO_GET_AN_AGENT = (
    "start it with `kinetoctl run -- <command>` or `python -m kineto_agent <script>`, set KINETO_AGENT=1 in its "
    "environment, or add `import kineto_agent; kineto_agent.start()` to its code"
)
_NO_PLUGINS = KnownPlugins()
REFUSE, KINETO = "refuse", "kineto"  # values of dynolog.tracing
_NOT_THE_PROCESS = (AttachCode.GONE, AttachCode.REPLACED)  # reasons why libkineto cannot be asked either


class PolledTargets:
    """The rules for one request. setting: dynolog.tracing."""

    def __init__(self, recorder: KinetoRecorder | None, spec: pb.CaptureSpec, setting: str) -> None:
        self._recorder = recorder
        self._spec = spec
        self._setting = setting

    @property
    def only_kineto(self) -> bool:
        """Whether the request wants libkineto and nothing else."""
        return self._spec.recorder == pb.RECORDER_KINETO

    def process(self, key: ProcessKey) -> PollingProcess | None:
        """The process, if it polls."""
        return None if self._recorder is None else self._recorder.process(key)

    def chosen(self, key: ProcessKey, name: str) -> tuple[PollingProcess | None, KinetodError | None]:
        """The process if its libkineto should record, and the error if nobody may, or if libkineto was requested and
        cannot.

        name: of the process, for people.
        """
        polling = self.process(key)
        if polling is None:
            return None, self._not_polling(key, name) if self.only_kineto else None
        if self._setting == REFUSE:
            return None, NotPermitted(
                Reason.TRACING_REFUSED,
                f"{name} polls this daemon as it would poll Dynolog, and the daemon is configured not to trace such "
                'processes (dynolog.tracing = "refuse"); ask an administrator to change that',
                pid=key.pid,
            )
        if self.only_kineto or (self._spec.recorder == pb.RECORDER_UNSPECIFIED and self._setting == KINETO):
            return polling, None
        return None, None

    def instead(self, key: ProcessKey, code: AttachCode | None = None) -> PollingProcess | None:
        """The process if its libkineto may record because no agent could be attached for this reason, or none is."""
        if self._spec.recorder == pb.RECORDER_AGENT or code in _NOT_THE_PROCESS:
            return None
        return self.process(key)

    def any_polls(self) -> bool:
        """Whether any process polls."""
        return self._recorder is not None and bool(self._recorder.pids())

    def recording(self, key: ProcessKey, name: str) -> Precondition | None:
        """The error for a process whose libkineto records for a capture."""
        capture_id = "" if self._recorder is None else self._recorder.capture_in(key)
        if not capture_id:
            return None
        text = f"capture {capture_id} is running in {name}; wait until it has ended, or cancel it"
        return Precondition(Reason.BUSY, text, pid=key.pid, capture_id=capture_id)

    def busy(self, key: ProcessKey, name: str) -> Precondition | None:
        """The error for a process whose libkineto records, for a capture or another tool."""
        if (ours := self.recording(key, name)) is not None:
            return ours
        polling = self.process(key)
        if polling is not None and self._recorder is not None and self._recorder.is_tracing(polling):
            text = (
                f"the profiler of {name} is already armed or recording, for the program itself or for a capture that "
                "was cancelled; trace again once that recording has ended"
            )
            return Precondition(Reason.BUSY, text, pid=key.pid)
        return None

    def no_longer(self, polling: PollingProcess, name: str) -> Precondition | None:
        """The error for a process that no longer polls."""
        if self.process(polling.key) is polling:
            return None
        text = f"{name} has just ended, executed another program or stopped polling for requests; try again"
        return Precondition(Reason.NOT_POLLING, text, pid=polling.key.pid)

    async def problem(self, key: ProcessKey, approval: Approval) -> KinetodError | None:
        """Why libkineto cannot carry this request out in this process, if so."""
        if text := unsupported(self._spec):
            return Precondition(Reason.LIBKINETO_UNAVAILABLE, f"process {key.pid}: {text}", pid=key.pid)
        assert self._recorder is not None  # it has been selected
        if text := await self._recorder.folders.problem(key, approval):
            return Precondition(Reason.LIBKINETO_UNAVAILABLE, text, pid=key.pid)
        return None

    def _not_polling(self, key: ProcessKey, name: str) -> Precondition:
        if self._recorder is None:
            how = "this daemon does not answer polls; set dynolog.ipc = true in its configuration"
        else:
            how = (
                "its libkineto is not polling this daemon for requests; start it with KINETO_USE_DAEMON=1 in its "
                "environment and wait until it has imported torch"
            )
        return Precondition(
            Reason.NOT_POLLING,
            f"{name} cannot be recorded by its own libkineto: {how}, or let kinetod's agent record (--recorder agent)",
            pid=key.pid,
        )


def polled_uid(polling: PollingProcess, approved: Credentials) -> str:
    """How the polling process differs from the approved one; empty if it does not."""
    return "" if polling.uid == approved.uid else f"its libkineto polled as uid {polling.uid}"


def nobody_polls() -> PolledTargets:
    """The rules of a daemon that answers no polls."""
    return PolledTargets(None, pb.CaptureSpec(), "agent")


@dataclass(frozen=True, slots=True)
class Resolved:
    """One target. `problem` says why it cannot be traced, if it cannot."""

    key: ProcessKey
    process: pb.Process
    agent: ConnectedAgent | None
    problem: KinetodError | None = None
    attached: Attached | None = None  # the agent was attached for this capture
    approved: Credentials | None = None  # the approved credentials
    administrator: bool = False  # whether one makes the request
    polling: PollingProcess | None = None  # its own libkineto records; it needs no agent then
    warnings: tuple[str, ...] = ()

    @property
    def records(self) -> pb.Recorder:
        """The recorder in it."""
        if self.problem is not None:
            return pb.RECORDER_UNSPECIFIED
        return pb.RECORDER_AGENT if self.polling is None else pb.RECORDER_KINETO


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """What a capture requires of its targets."""

    match: Match
    caller: Caller
    attacher: Attacher | None  # None: only processes with an agent
    keep_agent_ns: int
    polled: PolledTargets = field(default_factory=nobody_polls)
    each_by_itself: bool = False  # a named pid that cannot be traced does not end the others

    @property
    def all_or_none(self) -> bool:
        """Whether the first process that cannot be traced ends the request."""
        return self.match.names_pids and not self.each_by_itself


async def resolve(registry: Registry, wanted: TargetRequest, holds: contextlib.ExitStack) -> list[Resolved]:
    """The targets, by pid. Their agents stay until `holds` is closed.

    Raises KinetodError: with named pids for the first that cannot be traced, otherwise if none is selected.
    """
    match, own_uid = wanted.match, registry.own_uid
    if wanted.all_or_none:
        found = await _named(registry, wanted, own_uid)
    elif match.names_pids:
        found = await _visible(registry, wanted, own_uid)
    else:
        found = await _selected(registry, wanted, own_uid)
    if not found:
        raise _no_match(wanted)
    if len(found) > MAX_TARGETS:
        raise Exhausted(
            Reason.TOO_MANY_TARGETS,
            f"{match} matches {len(found)} processes, but one capture can have at most {MAX_TARGETS}; select fewer",
        )
    found = await _with_agents(registry, wanted, found, holds)
    found = await _decided_again(registry, wanted, found, own_uid)
    _raise_first(wanted, found)
    return found


def still_there(registry: Registry, wanted: TargetRequest, targets: Sequence[Resolved]) -> list[Resolved]:
    """Rechecks the targets just before the capture starts. Raises KinetodError for named pids as `resolve` does."""
    found = [_now(registry, wanted.polled, target) for target in targets]
    _raise_first(wanted, found)
    return found


def _raise_first(wanted: TargetRequest, found: Sequence[Resolved]) -> None:
    for resolved in found:
        if wanted.all_or_none and resolved.problem is not None:
            raise resolved.problem


async def _named(registry: Registry, wanted: TargetRequest, own_uid: int) -> list[Resolved]:
    candidates = await each_named(registry, wanted.match.pids, wanted.caller)
    for candidate in candidates:
        if (problem := _checked(registry, wanted, candidate, own_uid).problem) is not None:
            raise problem
    found = await registry.narrowed(wanted.match, candidates)
    return [_checked(registry, wanted, candidate, own_uid) for candidate in found]


async def _visible(registry: Registry, wanted: TargetRequest, own_uid: int) -> list[Resolved]:
    """The named processes that exist and that the caller may know of."""
    found = await registry.candidates(wanted.match.pids)
    return [_checked(registry, wanted, each, own_uid) for each in found if each.visible_to(wanted.caller)]


async def each_named(registry: Registry, pids: Collection[int], caller: Caller) -> list[Candidate]:
    """The processes with these pids. Raises KinetodError if one does not exist or is hidden from the caller."""
    found = []
    for pid in sorted(pids):
        candidate = await registry.candidate(pid)
        if candidate is None or not candidate.visible_to(caller):
            uid = None if candidate is None else candidate.facts.uid
            raise no_such_process(caller, pid, Action.TRACE, uid)
        found.append(candidate)
    return found


async def _selected(registry: Registry, wanted: TargetRequest, own_uid: int) -> list[Resolved]:
    attaches, polled = wanted.attacher is not None, wanted.polled

    def usable(candidate: Candidate) -> bool:
        if not candidate.visible_to(wanted.caller) or forbidden(wanted.caller, candidate, own_uid) is not None:
            return False
        polls = polled.process(candidate.key) is not None
        return polls if polled.only_kineto else attaches or candidate.has_agent() or polls

    await each_named(registry, wanted.match.pids, wanted.caller)  # their children are selected
    candidates = await registry.selected(wanted.match, usable, attachable=attaches or polled.any_polls())
    return [_checked(registry, wanted, candidate, own_uid) for candidate in candidates]


def _checked(registry: Registry, wanted: TargetRequest, candidate: Candidate, own_uid: int) -> Resolved:
    """Checks what can be checked without an agent, ownership first."""
    process, agent = candidate.process, candidate.agent
    name = _name(process)
    polling, refused = wanted.polled.chosen(candidate.key, name)
    problem: KinetodError | None = forbidden(wanted.caller, candidate, own_uid) or refused
    if problem is not None:
        pass
    elif polling is not None or (busy := wanted.polled.recording(candidate.key, name)) is not None:
        problem = _kineto_busy(wanted.polled, process, agent, candidate.key) if polling is not None else busy
    elif process.agent_state == pb.AGENT_STATE_INCOMPATIBLE:
        theirs = registry.incompatible_version(candidate.key)
        problem = Precondition(
            Reason.AGENT_INCOMPATIBLE,
            f"the agent in {name} speaks protocol version {theirs}, but this daemon (kinetod {__version__}) speaks "
            f"version {PROTOCOL_VERSION}; install the same version of kineto-agent and kinetod and restart the older "
            "one",
            pid=process.pid,
        )
    elif agent is not None:
        problem = _busy(process, agent)
    elif wanted.attacher is None and (polling := wanted.polled.instead(candidate.key)) is not None:
        problem = _kineto_busy(wanted.polled, process, agent, candidate.key)
    elif wanted.attacher is None:
        problem = Precondition(
            Reason.NO_AGENT,
            f"{name} has no agent, and attaching one is switched off (--no-attach of kinetoctl trace or of kinetod); "
            f"remove that option, or {HOW_TO_GET_AN_AGENT}",
            pid=process.pid,
        )
    if polling is not None:
        agent = None
    return Resolved(candidate.key, process, agent, problem, approved=candidate.facts.credentials, polling=polling)


def forbidden(caller: Caller, candidate: Candidate, own_uid: int) -> KinetodError | None:
    """Why the caller may not trace a process, if so. own_uid: of the registry."""
    return _not_allowed(caller, candidate) or not_yours(candidate.process, own_uid)


def _not_allowed(caller: Caller, candidate: Candidate) -> KinetodError | None:
    if may(caller, Action.TRACE, candidate.resource()):
        return None
    if not candidate.visible_to(caller):  # it became another user's since it was found
        return no_such_process(caller, candidate.key.pid, Action.TRACE, candidate.facts.uid)
    process, name = candidate.process, _name(candidate.process)
    if process.uid == caller.uid and not candidate.facts.plain:
        text = (
            f"{name} runs as {caller}, but the kernel would not let that user trace it: it changes its credentials, "
            f"has capabilities, or has made itself undumpable; only {needed(Action.TRACE)} may trace it"
        )
    else:
        text = (
            f"{name} belongs to {process.user}, and {caller} is not allowed to trace it (roles: "
            f"{listed(caller.roles)}); only its own user and {needed(Action.TRACE)} are"
        )
    problem = NotPermitted(Reason.NOT_YOUR_PROCESS, text, pid=process.pid)
    problem.audited = {"target_uid": process.uid}
    return problem


def no_such_process(caller: Caller, pid: int, action: Action, uid: int | None = None) -> KinetodError:
    """The error for a process that does not exist, has ended, or is hidden from the caller.

    uid: the owner of the process, for the audit log only.
    """
    problem = _no_such_process(caller, pid, action)
    problem.audited = {"target_uid": uid}
    return problem


def _no_such_process(caller: Caller, pid: int, action: Action) -> KinetodError:
    zombie, uid = _zombie(pid)
    if zombie and (sees_all(caller, Action.SEE_PROCESS) or uid == caller.uid):
        return Precondition(Reason.ATTACH_UNSUITABLE, f"process {pid} {zombie}", pid=pid)
    if sees_all(caller, Action.SEE_PROCESS):
        return NotFound(Reason.NO_SUCH_PROCESS, f"there is no process {pid} on this host", pid=pid)
    return NotPermitted(
        Reason.NOT_YOUR_PROCESS,
        f"process {pid} does not exist or does not belong to {caller}; {needed(action)} may {action} of another user",
        pid=pid,
    )


def _zombie(pid: int, proc: Path = PROC) -> tuple[str, int]:
    """What is to say of a zombie process, or of one whose main thread is, and its uid; empty if it is neither."""
    fields = read_status(proc / str(pid))
    if fields.get("State", "")[:1] != "Z":
        return "", 0
    said = f"is a zombie: it has ended, but its parent, process {fields['PPid']}, has not reaped it; "
    said += "`kinetoctl ps --all` lists running processes"
    if fields.get("Threads", "1") != "1":
        said = f"cannot be attached to: {MAIN_THREAD_ENDED}; {MAIN_THREAD_ADVICE}"
    return said, int(fields["Uid"].split()[0])


def not_yours(process: pb.Process, own_uid: int) -> NotPermitted | None:
    """The error for a process of a user that this daemon does not serve; None if it does."""
    if own_uid in (0, process.uid):
        return None
    problem = NotPermitted(
        Reason.NOT_YOUR_PROCESS,
        f"{_name(process)} belongs to {process.user}, and this daemon serves uid {own_uid} only; use that user's "
        "daemon or the system-wide one (run by root)",
        pid=process.pid,
    )
    problem.audited = {"target_uid": process.uid}
    return problem


def _busy(process: pb.Process, agent: ConnectedAgent) -> Precondition | None:
    if not agent.capture_id:
        return None
    return Precondition(
        Reason.BUSY,
        f"capture {agent.capture_id} is running in {_name(process)}; wait until it has ended, or cancel it",
        pid=process.pid,
        capture_id=agent.capture_id,
    )


def _kineto_busy(
    polled: PolledTargets, process: pb.Process, agent: ConnectedAgent | None, key: ProcessKey
) -> Precondition | None:
    """The error for a process whose libkineto would conflict with another recording."""
    return polled.busy(key, _name(process)) or (None if agent is None else _busy(process, agent))


def _now(registry: Registry, polled: PolledTargets, target: Resolved) -> Resolved:
    if target.problem is not None:
        return target
    agent, name = registry.agent(target.key), _name(target.process)
    if target.polling is not None:
        gone = polled.no_longer(target.polling, name)
        return replace(target, problem=gone or _kineto_busy(polled, target.process, agent, target.key))
    if (busy := polled.recording(target.key, name)) is not None:
        return replace(target, problem=busy)
    if agent is None or agent is not target.agent:  # another agent may belong to another program
        problem = Precondition(
            Reason.NO_AGENT,
            f"the agent in {name} has just disconnected: the process ended or stopped its agent; try again",
            pid=target.process.pid,
        )
        return replace(target, agent=None, problem=problem)
    return replace(target, agent=agent, problem=_busy(target.process, agent))


# agents for those that have none


async def _with_agents(
    registry: Registry, wanted: TargetRequest, targets: Sequence[Resolved], holds: contextlib.ExitStack
) -> list[Resolved]:
    """Attaches the missing agents concurrently; each failure becomes its target's problem."""

    def hold(agent: ConnectedAgent) -> None:
        if not agent.capture_id:
            agent.keep_ns = wanted.keep_agent_ns
        holds.enter_context(agent.held())

    administrator = sees_all(wanted.caller, Action.TRACE)

    async def one(target: Resolved) -> Resolved:
        if target.problem is not None:
            return target
        target = replace(target, administrator=administrator)
        if target.polling is not None:
            return replace(target, problem=await _kineto_problem(wanted.polled, target))
        if target.agent is not None:
            hold(target.agent)
            return target
        assert wanted.attacher is not None  # otherwise it has a problem
        if target.approved is None:
            return replace(target, problem=_attach_problem(target, gone(target.key.pid)))
        approval = Approval(target.approved, administrator)
        try:
            agent = await wanted.attacher.attach(target.key, approval)
        except AttachError as exc:
            return await _by_kineto(wanted.polled, target, exc)
        hold(agent)
        add_agent(target.process, agent)
        return replace(target, agent=agent, attached=agent.attached)

    return list(await asyncio.gather(*(one(target) for target in targets)))


async def _by_kineto(polled: PolledTargets, target: Resolved, error: AttachError) -> Resolved:
    """The target recorded by its own libkineto, if allowed and possible; otherwise with the error as its problem."""
    problem = _attach_problem(target, error)
    polling = polled.instead(target.key, error.code)
    if polling is None:
        return replace(target, problem=problem)
    other = polled.busy(target.key, _name(target.process)) or await _kineto_problem(polled, target)
    if other is not None:
        problem.message = f"{problem.message}; its own libkineto cannot record it either: {other.message}"
        return replace(target, problem=problem)
    warning = f"recorded by the process's own libkineto, since no agent can be attached: {error.reason}"
    return replace(target, polling=polling, warnings=(warning,))


async def _kineto_problem(polled: PolledTargets, target: Resolved) -> KinetodError | None:
    """Why the target's own libkineto cannot carry the request out, if so."""
    if target.approved is None:
        return _attach_problem(target, gone(target.key.pid))
    return await polled.problem(target.key, Approval(target.approved, target.administrator))


async def _decided_again(
    registry: Registry, wanted: TargetRequest, targets: Sequence[Resolved], own_uid: int
) -> list[Resolved]:
    """The same targets, with a problem for those that differ from the approved process, or are no longer the caller's.

    An existing problem may reveal what a process has become: it is then only in the audit log.
    """
    now = {each.key: each for each in await registry.candidates([target.key.pid for target in targets])}

    def decided(target: Resolved) -> Resolved:
        found = now.get(target.key)
        if target.approved is None or ((found is None or found.facts.credentials is None) and target.problem):
            return target
        if found is None or found.facts.credentials is None:
            return replace(target, agent=None, problem=_attach_problem(target, gone(target.key.pid)))
        problem = forbidden(wanted.caller, found, own_uid)
        difference = target.approved.difference(found.facts.credentials)
        if not difference and target.agent is not None and target.agent.identity.uid != target.approved.uid:
            difference = f"its agent connected as uid {target.agent.identity.uid}"
        if not difference and target.polling is not None:
            difference = polled_uid(target.polling, target.approved)
        if not difference and (problem is None or target.problem is not None):
            return target
        target.process.uid, target.process.user = found.facts.uid, found.facts.user  # its actual user
        if problem is None:
            problem = _attach_problem(target, replaced(target.key.pid, difference))
        if target.problem is not None:
            problem.audited = {**problem.audited, "detail": target.problem.message}
        return replace(target, agent=None, problem=problem)

    return [decided(target) for target in targets]


def _attach_problem(target: Resolved, error: AttachError) -> KinetodError:
    """The error for the caller. It does not reveal what a process has become, which may no longer be the caller's."""
    kind = NotPermitted if error.code is AttachCode.NOT_PERMITTED else Precondition
    audited: dict[str, Any] = {"target_uid": target.process.uid}
    text = error.reason
    if error.code is AttachCode.REPLACED:
        audited["detail"], text = error.reason, replaced(target.key.pid, "").reason
    problem = kind(Reason(error.code.value), text, pid=target.process.pid)
    problem.audited = audited
    return problem


def _no_match(wanted: TargetRequest) -> NotFound:
    if wanted.attacher is None:
        text = (
            f"no process with an agent matches {wanted.match}; `kinetoctl ps` lists processes with agents; for any "
            f"other process, {HOW_TO_GET_AN_AGENT}"
        )
    else:
        text = f"no process matches {wanted.match}; `kinetoctl ps --all` lists the processes, and --pid accepts any pid"
    return NotFound(Reason.NO_MATCH, text)


def _name(process: pb.Process) -> str:
    text = " ".join(process.command)
    return f"process {process.pid} ({text if len(text) <= 60 else text[:57] + '…'})"


def check_known(
    wanted: Sequence[str], agents: Iterable[ConnectedAgent | None], plugins: KnownPlugins = _NO_PLUGINS
) -> None:
    """Raises InvalidRequest for a type that is neither common, nor declared by a plug-in, nor offered by these agents.

    None represents a process without an agent, which has its own error; without any agent, nothing is checked. The
    message names unused plug-ins if the type may be one of theirs.
    """
    offers = [set(agent.activity_types()) for agent in agents if agent is not None]
    offered = sorted(set().union(*offers))
    for index, name in enumerate(wanted if offers else ()):
        if name in ACTIVITY_TYPES or name in offered or name in plugins.activity_types:
            continue
        like = difflib.get_close_matches(name, [*offered, *sorted(ACTIVITY_TYPES)], 1)
        guess = f" (did you mean {like[0]}?)" if like else ""
        there = "; ".join([", ".join(offered) or "nothing", *plugins.refusals([name])])
        text = f"unknown activity type {name!r:.80}{guess}; the selected processes offer {there}"
        raise invalid(f"spec.activity_types[{index}]", text)
