"""Resolves a selector to the processes of a capture, or to the error that says why not.

Theory of operation
    `resolve` finds the processes, refuses what can be refused by inspection, and only then attaches agents to those
    without one, all at once. That takes milliseconds to seconds, so no lock is held; `still_there` checks again,
    without waiting, when the capture is created. In between the agents are held, so that an attached one does not
    leave.

    A process may execute another program at any moment and then belong to another user. So once each target's agent is
    there, the credentials of the process are read and checked again, as is the user whom the kernel names as having
    connected. From then on that very link counts: an execve closes it, and a later link is a different one.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kineto_agent.protocol.wire import PROTOCOL_VERSION
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.agents.attacher import Attacher
from kinetod.attach.attach_types import Approval, AttachCode, Attached, AttachError, replaced
from kinetod.attach.inspect.process_inspection import read_status
from kinetod.attach.inspect.target_memory import gone
from kinetod.base.errors import Exhausted, KinetodError, NotFound, NotPermitted, Precondition, Reason
from kinetod.captures.request.polled_targets import PolledTargets, nobody_polls, polled_uid
from kinetod.kineto_ipc.polling_process import PollingProcess
from kinetod.permissions.role_policy import Action, Caller, listed, may, needed, sees_all
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import PROC, ProcessKey
from kinetod.selection.candidate import Candidate
from kinetod.selection.process_messages import add_agent
from kinetod.selection.process_registry import Match, Registry

MAX_TARGETS = 512  # they travel in one message
HOW_TO_GET_AN_AGENT = (
    "start it with `kinetoctl run -- <command>`, with KINETO_AGENT=1 in its environment, with "
    "`python -m kineto_agent <script>`, or call `import kineto_agent; kineto_agent.start()` in it"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """One target. `problem` says why it cannot be traced, if it cannot."""

    key: ProcessKey
    process: pb.Process
    agent: ConnectedAgent | None
    problem: KinetodError | None = None
    attached: Attached | None = None  # the agent was brought in for this capture
    approved: Credentials | None = None  # what was decided about
    administrator: bool = False  # asks for it
    polling: PollingProcess | None = None  # its own libkineto records; it needs no agent then
    warnings: tuple[str, ...] = ()

    @property
    def records(self) -> pb.Recorder:
        """Who records in it."""
        if self.problem is not None:
            return pb.RECORDER_UNSPECIFIED
        return pb.RECORDER_AGENT if self.polling is None else pb.RECORDER_KINETO


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """What a capture requires of its targets."""

    match: Match
    caller: Caller
    attacher: Attacher | None  # None: only processes that have an agent
    keep_agent_ns: int
    polled: PolledTargets = field(default_factory=nobody_polls)
    each_by_itself: bool = False  # a named pid that cannot be traced does not end the others

    @property
    def all_or_none(self) -> bool:
        """Whether the first process that cannot be traced ends the request."""
        return self.match.names_pids and not self.each_by_itself


async def resolve(
    registry: Registry, wanted: TargetRequest, holds: contextlib.ExitStack, *, own_uid: int | None = None
) -> list[Resolved]:
    """The targets, by pid. Their agents stay until `holds` is closed.

    Raises KinetodError: for named pids on the first that cannot be traced, else if none is selected.
    """
    match, own_uid = wanted.match, registry.own_uid if own_uid is None else own_uid
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
            f"{match} matches {len(found)} processes, but one capture takes at most {MAX_TARGETS}; select fewer",
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
    candidates = await _each(registry, wanted)
    for candidate in candidates:
        if (problem := _checked(registry, wanted, candidate, own_uid).problem) is not None:
            raise problem
    found = await registry.narrowed(wanted.match, candidates)
    return [_checked(registry, wanted, candidate, own_uid) for candidate in found]


async def _visible(registry: Registry, wanted: TargetRequest, own_uid: int) -> list[Resolved]:
    """Those of the named processes that exist and that the caller may know of."""
    found = await registry.candidates(wanted.match.pids)
    return [_checked(registry, wanted, each, own_uid) for each in found if each.visible_to(wanted.caller)]


async def _each(registry: Registry, wanted: TargetRequest) -> list[Candidate]:
    """The processes with these pids. Raises KinetodError if one does not exist or is hidden from the caller."""
    found = []
    for pid in sorted(wanted.match.pids):
        candidate = await registry.candidate(pid)
        if candidate is None or not candidate.visible_to(wanted.caller):
            raise no_such_process(wanted.caller, pid, Action.TRACE)
        found.append(candidate)
    return found


async def _selected(registry: Registry, wanted: TargetRequest, own_uid: int) -> list[Resolved]:
    attaches, polled = wanted.attacher is not None, wanted.polled

    def usable(candidate: Candidate) -> bool:
        if not candidate.visible_to(wanted.caller) or _forbidden(wanted.caller, candidate, own_uid) is not None:
            return False
        polls = polled.process(candidate.key) is not None
        return polls if polled.only_kineto else attaches or candidate.has_agent() or polls

    await _each(registry, wanted)  # whose children are meant
    candidates = await registry.selected(wanted.match, usable, attachable=attaches or polled.any_polls())
    return [_checked(registry, wanted, candidate, own_uid) for candidate in candidates]


def _checked(registry: Registry, wanted: TargetRequest, candidate: Candidate, own_uid: int) -> Resolved:
    """Checks what can be checked without an agent, ownership first."""
    process, agent = candidate.process, candidate.agent
    name = _name(process)
    polling, refused = wanted.polled.chosen(candidate.key, name)
    problem: KinetodError | None = _forbidden(wanted.caller, candidate, own_uid) or refused
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


def _forbidden(caller: Caller, candidate: Candidate, own_uid: int) -> NotPermitted | None:
    return _not_allowed(caller, candidate) or not_yours(candidate.process, own_uid)


def _not_allowed(caller: Caller, candidate: Candidate) -> NotPermitted | None:
    if may(caller, Action.TRACE, candidate.thing()):
        return None
    process, name = candidate.process, _name(candidate.process)
    if process.uid == caller.uid and not candidate.facts.plain:
        text = (
            f"{name} runs as {caller}, but the kernel would not let that user trace it: it changes its credentials, "
            f"has capabilities, or has made itself undumpable; only {needed(Action.TRACE)} may"
        )
    else:
        text = (
            f"{name} belongs to {process.user}, and {caller} with the roles {listed(caller.roles)} may not trace it; "
            f"only its own user and {needed(Action.TRACE)} may"
        )
    problem = NotPermitted(Reason.NOT_YOUR_PROCESS, text, pid=process.pid)
    problem.audited = {"target_uid": process.uid}
    return problem


def no_such_process(caller: Caller, pid: int, action: Action) -> KinetodError:
    """The error for a process that does not exist, has ended, or is hidden from the caller."""
    parent, uid = _zombies_parent(pid)
    if parent and (sees_all(caller, Action.SEE_PROCESS) or uid == caller.uid):
        return Precondition(
            Reason.ATTACH_UNSUITABLE,
            f"process {pid} is a zombie: it has ended, but its parent, process {parent}, has not reaped it; "
            "`kinetoctl ps --all` lists the others",
            pid=pid,
        )
    if sees_all(caller, Action.SEE_PROCESS):
        return NotFound(Reason.NO_SUCH_PROCESS, f"there is no process {pid} on this host", pid=pid)
    return NotPermitted(
        Reason.NOT_YOUR_PROCESS,
        f"process {pid} does not exist or does not belong to {caller}; {needed(action)} may {action} of another user",
        pid=pid,
    )


def _zombies_parent(pid: int, proc: Path = PROC) -> tuple[int, int]:
    """Parent pid and uid of a zombie process; (0, 0) if it is not one."""
    fields = read_status(proc / str(pid))
    if fields.get("State", "")[:1] != "Z":
        return 0, 0
    return int(fields["PPid"]), int(fields["Uid"].split()[0])


def not_yours(process: pb.Process, own_uid: int) -> NotPermitted | None:
    """The error for a process of a user that this daemon does not serve; None if it does."""
    if own_uid in (0, process.uid):
        return None
    return NotPermitted(
        Reason.NOT_YOUR_PROCESS,
        f"{_name(process)} belongs to {process.user}, and this daemon serves uid {own_uid} only; use that user's "
        "daemon or the system-wide one (run by root)",
        pid=process.pid,
    )


def _busy(process: pb.Process, agent: ConnectedAgent) -> Precondition | None:
    if not agent.capture_id:
        return None
    return Precondition(
        Reason.BUSY,
        f"capture {agent.capture_id} is running in {_name(process)}; wait for its end or cancel it",
        pid=process.pid,
        capture_id=agent.capture_id,
    )


def _kineto_busy(
    polled: PolledTargets, process: pb.Process, agent: ConnectedAgent | None, key: ProcessKey
) -> Precondition | None:
    """The error for a process whose libkineto would meet another recording."""
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
    if agent is None or agent is not target.agent:  # another one is another program's, for all that we know
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
        assert wanted.attacher is not None  # else it has a problem
        if target.approved is None:
            return replace(target, problem=_attach_problem(target, gone(target.key.pid)))
        approval = Approval(target.approved, administrator)
        try:
            agent = await wanted.attacher.attach(target.key, approval)
        except AttachError as exc:
            return await _by_kineto(wanted.polled, target, await _explained(registry, target, exc))
        hold(agent)
        add_agent(target.process, agent)
        return replace(target, agent=agent, attached=agent.attached)

    return list(await asyncio.gather(*(one(target) for target in targets)))


async def _by_kineto(polled: PolledTargets, target: Resolved, error: AttachError) -> Resolved:
    """The target recorded by its own libkineto, if that may and can; else with the error as its problem."""
    problem = _attach_problem(target, error)
    polling = polled.instead(target.key, error.code)
    if polling is None:
        return replace(target, problem=problem)
    other = polled.busy(target.key, _name(target.process)) or await _kineto_problem(polled, target)
    if other is not None:
        text = f"{problem.message}; nor can its own libkineto record: {other.message}"
        return replace(target, problem=type(problem)(problem.reason, text, pid=target.key.pid))
    warning = f"the process's own libkineto records, since no agent can be attached: {error.reason}"
    return replace(target, polling=polling, warnings=(warning,))


async def _kineto_problem(polled: PolledTargets, target: Resolved) -> KinetodError | None:
    """Why the target's own libkineto cannot carry the request out, if so."""
    if target.approved is None:
        return _attach_problem(target, gone(target.key.pid))
    return await polled.problem(target.key, Approval(target.approved, target.administrator))


async def _explained(registry: Registry, target: Resolved, error: AttachError) -> AttachError:
    """The error, or a better one if the process has been replaced by another program in the meantime."""
    found = await registry.whose(target.key) if error.code is AttachCode.FAILED else None
    difference = target.approved.difference(found) if found is not None and target.approved is not None else ""
    return replaced(target.key.pid, difference) if difference else error


async def _decided_again(
    registry: Registry, wanted: TargetRequest, targets: Sequence[Resolved], own_uid: int
) -> list[Resolved]:
    """The same targets with the problem of those that are not what was decided about, or not the caller's any more."""
    open_ones = [target.key.pid for target in targets if target.problem is None]
    now = {each.key: each for each in await registry.candidates(open_ones)} if open_ones else {}

    def decided(target: Resolved) -> Resolved:
        if target.problem is not None or (target.agent is None and target.polling is None) or target.approved is None:
            return target
        found = now.get(target.key)
        if found is None or found.facts.credentials is None:
            return replace(target, agent=None, problem=_attach_problem(target, gone(target.key.pid)))
        problem: KinetodError | None = _forbidden(wanted.caller, found, own_uid)
        if problem is None:
            difference = target.approved.difference(found.facts.credentials)
            if not difference and target.agent is not None and target.agent.identity.uid != target.approved.uid:
                difference = f"its agent connected as uid {target.agent.identity.uid}"
            if not difference and target.polling is not None:
                difference = polled_uid(target.polling, target.approved)
            if not difference:
                return target
            problem = _attach_problem(target, replaced(target.key.pid, difference))
            problem.audited = {"target_uid": found.facts.uid}
        target.process.uid, target.process.user = found.facts.uid, found.facts.user  # whose it really is
        return replace(target, agent=None, problem=problem)

    return [decided(target) for target in targets]


def _attach_problem(target: Resolved, error: AttachError) -> KinetodError:
    kind = NotPermitted if error.code is AttachCode.NOT_PERMITTED else Precondition
    return kind(Reason(error.code.value), error.reason, pid=target.process.pid)


def _no_match(wanted: TargetRequest) -> NotFound:
    if wanted.attacher is None:
        text = (
            f"no process with an agent matches {wanted.match}; `kinetoctl ps` lists those that have one; for any "
            f"other process, {HOW_TO_GET_AN_AGENT}"
        )
    else:
        text = (
            f"no process that has an agent or uses a GPU, and no Python process found by command, rank, job or pod, "
            f"matches {wanted.match}; `kinetoctl ps --all` lists all processes, and --pid accepts any of them"
        )
    return NotFound(Reason.NO_MATCH, text)


def _name(process: pb.Process) -> str:
    text = " ".join(process.command)
    return f"process {process.pid} ({text if len(text) <= 60 else text[:57] + '…'})"
