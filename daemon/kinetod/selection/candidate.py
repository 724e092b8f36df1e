"""A process as selection sees it: the kernel's facts, the data shown to callers, and its agent."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.permissions.role_policy import Action, Caller, Resource, may
from kinetod.processes.identity import PROC, ProcessKey, lines
from kinetod.processes.process_info import ProcessFacts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process and its agent, if that can be talked to."""

    key: ProcessKey
    process: pb.Process
    agent: ConnectedAgent | None
    facts: ProcessFacts

    def resource(self) -> Resource:
        """The facts for access decisions about it."""
        return Resource(uid=self.facts.uid, plain=self.facts.plain, job=self.facts.job, pod=self.facts.pod)

    def visible_to(self, caller: Caller) -> bool:
        """Whether the caller may know of it."""
        return may(caller, Action.SEE_PROCESS, self.resource())

    def has_agent(self) -> bool:
        """Whether it has an agent, including one that we cannot talk to."""
        return self.process.agent_state != pb.AGENT_STATE_NONE

    def polls(self) -> bool:
        """Whether its libkineto asks this daemon for configurations."""
        return self.process.HasField("kineto")


# Obstacles to tracing a process, in a few words, as far as lists can show them without a full inspection. `kinetoctl
# doctor` inspects fully. Invisible obstacles are not mentioned, so "no obstacle" is not a promise.
ATTACHING_OFF = "no agent; attaching is off"
NOT_SERVED = "another user's"  # of a daemon that serves only its own user
PROTECTED = "protected by the kernel"
NOT_ALLOWED = "not permitted"
OTHER_VERSION = "agent of another version"
STOPPED = "stopped"


async def note(
    candidates: Sequence[Candidate], caller: Caller, *, own_uid: int, attaching: bool, proc: Path = PROC
) -> None:
    """Fills in `obstacle`. own_uid: the user whose processes can be reached, 0 for all users; attaching: as in
    Registry.
    """
    without_agent = [each.key.pid for each in candidates if not each.has_agent()]
    seen = await asyncio.to_thread(lambda: {pid: seen_in_status(pid, proc) for pid in without_agent})
    for each in candidates:
        each.process.obstacle = (
            _of_rights(each, caller, own_uid) or _of_agent(each, attaching) or seen.get(each.key.pid, "")
        )


def _of_rights(candidate: Candidate, caller: Caller, own_uid: int) -> str:
    facts = candidate.facts
    if own_uid not in (0, facts.uid):
        return NOT_SERVED
    why_not = PROTECTED if facts.uid == caller.uid and not facts.plain else NOT_ALLOWED
    return "" if may(caller, Action.TRACE, candidate.resource()) else why_not


def _of_agent(candidate: Candidate, attaching: bool) -> str:
    if candidate.process.agent_state == pb.AGENT_STATE_INCOMPATIBLE:
        return OTHER_VERSION
    return "" if attaching or candidate.has_agent() else ATTACHING_OFF


def seen_in_status(pid: int, proc: Path = PROC) -> str:
    """Obstacles to attaching that the kernel's status shows; empty if there are none. Blocking."""
    with contextlib.suppress(OSError, ValueError):
        status = dict(
            line.split(":\t", 1) for line in lines((proc / str(pid) / "status").read_bytes()) if ":\t" in line
        )
        if (tracer := int(status.get("TracerPid", "0"))) > 0:
            return f"traced by process {tracer}"
        return STOPPED if status.get("State", "").startswith("T") else ""
    return ""
