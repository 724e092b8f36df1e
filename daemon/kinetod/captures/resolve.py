"""From a selector to the processes of a capture, or to the error that says why not."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kineto_agent.wire import PROTOCOL_VERSION
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.agents import Agent
from kinetod.errors import Exhausted, KinetodError, NotFound, NotPermitted, Precondition, Reason
from kinetod.registry import Candidate, Match, Registry

MAX_TARGETS = 512  # they travel in one message
HOW_TO_GET_AN_AGENT = (
    "start it with `kinetoctl run -- <command>`, with KINETO_AGENT=1 in its environment, with "
    "`python -m kineto_agent <script>`, or call `import kineto_agent; kineto_agent.start()` in it"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """One target. Without an agent that can do it, `problem` says why."""

    process: pb.Process
    agent: Agent | None
    problem: KinetodError | None = None


async def resolve(registry: Registry, match: Match, *, own_uid: int | None = None) -> list[Resolved]:
    """The targets, by pid. Raises KinetodError: for named pids on the first that cannot be traced, else if none can."""
    own_uid = os.geteuid() if own_uid is None else own_uid
    found = await (_named(registry, match, own_uid) if match.pids else _selected(registry, match, own_uid))
    if not found:
        raise NotFound(
            Reason.NO_MATCH,
            f"no process with an agent matches {match}; `kinetoctl ps` lists those that can be traced, others: "
            f"{HOW_TO_GET_AN_AGENT}",
        )
    if len(found) > MAX_TARGETS:
        raise Exhausted(
            Reason.TOO_MANY_TARGETS,
            f"{match} matches {len(found)} processes, one capture takes at most {MAX_TARGETS}; select fewer",
        )
    return found


async def _named(registry: Registry, match: Match, own_uid: int) -> list[Resolved]:
    found = []
    for pid in sorted(match.pids):
        candidate = await registry.candidate(pid)
        if candidate is None:
            raise NotFound(Reason.NO_SUCH_PROCESS, f"there is no process {pid} on this host", pid=pid)
        resolved = _checked(registry, candidate, own_uid)
        if resolved.problem is not None:
            raise resolved.problem
        if match(resolved.process):
            found.append(resolved)
    return found


async def _selected(registry: Registry, match: Match, own_uid: int) -> list[Resolved]:
    candidates = await registry.candidates(registry.agent_pids(), fresh=False)
    found = [_checked(registry, candidate, own_uid) for candidate in candidates if match(candidate.process)]
    return [each for each in found if not isinstance(each.problem, NotPermitted)]


def _checked(registry: Registry, candidate: Candidate, own_uid: int) -> Resolved:
    process, agent = candidate.process, candidate.agent
    return Resolved(process, agent, _problem(registry, candidate, own_uid))


def _problem(registry: Registry, candidate: Candidate, own_uid: int) -> KinetodError | None:
    process, agent = candidate.process, candidate.agent
    name = f"process {process.pid} ({_short(process.command)})"
    if own_uid not in (0, process.uid):
        return NotPermitted(
            Reason.NOT_YOUR_PROCESS,
            f"{name} belongs to {process.user}, and this daemon serves uid {own_uid} only; ask the daemon of that "
            "user or the system's (run by root)",
            pid=process.pid,
        )
    if process.agent_state == pb.AGENT_STATE_INCOMPATIBLE:
        theirs = registry.incompatible_version(candidate.key)
        return Precondition(
            Reason.AGENT_INCOMPATIBLE,
            f"the agent in {name} speaks protocol version {theirs}, this daemon (kinetod {__version__}) version "
            f"{PROTOCOL_VERSION}; install the same version of kineto-agent and kinetod and restart the older one",
            pid=process.pid,
        )
    if agent is None:
        return Precondition(
            Reason.NO_AGENT, f"{name} has no agent, so it cannot be traced; {HOW_TO_GET_AN_AGENT}", pid=process.pid
        )
    if agent.capture_id:
        return Precondition(
            Reason.BUSY,
            f"capture {agent.capture_id} is running in {name}; wait for its end or cancel it",
            pid=process.pid,
            capture_id=agent.capture_id,
        )
    return None


def _short(command: Sequence[str]) -> str:
    text = " ".join(command)
    return text if len(text) <= 60 else text[:57] + "…"
