"""The processes of this host as callers see them: the kernel's facts joined with what agents said."""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import re2
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.access.policy import Action, Caller, Thing, may
from kinetod.agents import Agent, AgentHub
from kinetod.errors import invalid
from kinetod.identity import PROC, ProcessKey
from kinetod.kubernetes.names import PodNames
from kinetod.procs import PrivateFacts, ProcessFacts, foreign_pids, read_facts
from kinetod.recent_facts import RecentFacts

DESCRIBE_DEADLINE_S = 0.5
MAX_REGEX_CHARS = 512
MAX_PIDS = 4096


class Expression(Protocol):
    """A compiled regular expression."""

    pattern: str

    def search(self, text: str) -> object | None:
        """Where it is found."""


@dataclass(frozen=True, slots=True)
class Match:
    """A checked `pb.Selector`. All given conditions must hold."""

    pids: frozenset[int]
    command: Expression | None
    user: str
    ranks: frozenset[int]
    job_ids: frozenset[str]

    def __call__(self, process: pb.Process) -> bool:
        """Whether the process is selected."""
        return (
            (not self.pids or process.pid in self.pids)
            and (self.command is None or self.command.search(" ".join(process.command)) is not None)
            and (not self.user or self.user in (process.user, str(process.uid)))
            and (not self.ranks or (process.HasField("rank") and process.rank in self.ranks))
            and (not self.job_ids or process.job_id in self.job_ids)
        )

    def __bool__(self) -> bool:
        return bool(self.pids or self.command or self.user or self.ranks or self.job_ids)

    def __str__(self) -> str:
        parts = [
            f"pid {', '.join(map(str, sorted(self.pids)))}" if self.pids else "",
            f"command matching {self.command.pattern!r}" if self.command else "",
            f"user {self.user}" if self.user else "",
            f"rank {', '.join(map(str, sorted(self.ranks)))}" if self.ranks else "",
            f"job {', '.join(sorted(self.job_ids))}" if self.job_ids else "",
        ]
        return ", ".join(part for part in parts if part) or "any process"


def checked_selector(selector: pb.Selector, field: str = "selector") -> Match:
    """Raises InvalidRequest with the path of the wrong field."""
    if len(selector.pids) > MAX_PIDS:
        raise invalid(f"{field}.pids", f"at most {MAX_PIDS} pids, got {len(selector.pids)}")
    for index, pid in enumerate(selector.pids):
        if pid <= 0:
            raise invalid(f"{field}.pids[{index}]", f"a pid is greater than 0, got {pid}")
    for index, rank in enumerate(selector.ranks):
        if rank < 0:
            raise invalid(f"{field}.ranks[{index}]", f"a rank is not negative, got {rank}")
    return Match(
        frozenset(selector.pids),
        _regex(selector.command_regex, field),
        selector.user,
        frozenset(selector.ranks),
        frozenset(selector.job_ids),
    )


def _regex(text: str, field: str) -> Expression | None:
    """By RE2, whose time grows with the text only: any user may ask, and any user's command lines are searched."""
    if len(text) > MAX_REGEX_CHARS:
        raise invalid(f"{field}.command_regex", f"longer than {MAX_REGEX_CHARS} characters")
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options) if text else None
    except re2.error as exc:
        problem = exc.args[0].decode("utf-8", "replace") if isinstance(exc.args[0], bytes) else str(exc)
        raise invalid(f"{field}.command_regex", f"no regular expression (RE2 syntax): {problem}") from exc


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process and its agent, if that can be talked to."""

    key: ProcessKey
    process: pb.Process
    agent: Agent | None
    facts: ProcessFacts

    def thing(self) -> Thing:
        """What decisions about it are made from."""
        return Thing(uid=self.facts.uid, plain=self.facts.plain, job=self.facts.job, pod=self.facts.pod)

    def visible_to(self, caller: Caller) -> bool:
        """Whether the caller may know of it."""
        return may(caller, Action.SEE_PROCESS, self.thing())

    def has_agent(self) -> bool:
        """Also one that we cannot talk to."""
        return self.process.agent_state != pb.AGENT_STATE_NONE


class Privileged(Protocol):
    """Who may read of processes what we may not: the attach helper service."""

    async def private_facts(self, keys: Iterable[ProcessKey]) -> Mapping[ProcessKey, PrivateFacts]:
        """Of as many as can be had."""


class Registry:
    """Joins AgentHub and /proc. Without `privileged` the facts of processes that we may not read are left out."""

    def __init__(
        self,
        hub: AgentHub,
        *,
        proc: Path = PROC,
        privileged: Privileged | None = None,
        names: PodNames | None = None,
    ) -> None:
        self._hub = hub
        self._proc = proc
        self._privileged = privileged
        self._names = names
        self._recent = RecentFacts(self._facts, lambda key: hub.get(key) is not None)
        self.own_uid = 0 if privileged is not None else os.geteuid()  # whose processes are within reach; 0: everybody's

    async def processes(self, match: Match, caller: Caller, *, include_without_agent: bool) -> list[pb.Process]:
        """The selected processes that the caller may see, with recent data, by pid."""
        pids = set(self.agent_pids())
        if include_without_agent:
            pids |= set(await asyncio.to_thread(foreign_pids, self._proc))
        wanted = sorted(pids & match.pids if match.pids else pids)
        facts, _ = await asyncio.gather(self._recent.get(wanted), self._refresh(wanted))
        candidates = filter(None, map(self._join, facts))
        return [each.process for each in candidates if each.visible_to(caller) and match(each.process)]

    async def candidates(self, pids: Sequence[int], *, fresh: bool) -> list[Candidate]:
        """Those of `pids` that exist and have an agent, are Python, or use a GPU; `fresh` asks the agents."""
        facts_task = self._facts(pids)
        facts = (await asyncio.gather(facts_task, self._refresh(pids)))[0] if fresh else await facts_task
        return list(filter(None, map(self._join, facts)))

    async def _refresh(self, pids: Sequence[int]) -> None:
        wanted = set(pids)
        agents = [agent for agent in self._hub.agents() if agent.key.pid in wanted]
        await self._hub.refresh(agents, DESCRIBE_DEADLINE_S)

    async def selected(self, match: Match, *, attachable: bool) -> list[Candidate]:
        """What a selector without pids means, by pid: processes with an agent, and those that should get one.

        Those are the ones that use a GPU, and Python processes that a regular expression for the command means;
        never kinetod's own ones, nor the forked workers of a selected process, which have its command and files.
        """
        pids = set(self.agent_pids())
        attachable = attachable and bool(match)
        if attachable:
            pids |= await asyncio.to_thread(foreign_pids, self._proc)
        found = [each for each in await self.candidates(sorted(pids), fresh=False) if match(each.process)]
        by_pid = {each.key.pid: each for each in found}
        return [each for each in found if each.has_agent() or (attachable and _should_have_one(each, match, by_pid))]

    def agent(self, key: ProcessKey) -> Agent | None:
        """The agent in this process now."""
        return self._hub.get(key)

    async def candidate(self, pid: int) -> Candidate | None:
        """One process whatever it is; None if there is no such process."""
        facts = await self._facts([pid])
        return self._join(facts[0], anything=True) if facts else None

    async def _facts(self, pids: Sequence[int]) -> list[ProcessFacts]:
        """Of those that exist."""
        if not pids:
            return []
        found = await asyncio.to_thread(lambda: [read_facts(pid, self._proc) for pid in pids])
        facts = [each for each in found if each is not None]
        if self._privileged is not None:
            private = await self._privileged.private_facts([each.key for each in facts if each.hidden])
            facts = [each.with_private(private[each.key]) if each.key in private else each for each in facts]
        return facts if self._names is None else await self._names.named(facts)

    def agent_pids(self) -> list[int]:
        """Processes with an agent, also with one that we cannot talk to."""
        return sorted({agent.key.pid for agent in self._hub.agents()} | {key.pid for key in self._hub.incompatible()})

    def incompatible_version(self, key: ProcessKey) -> int:
        """The protocol version of the agent in this process that we cannot talk to; 0 if there is none."""
        return self._hub.incompatible_version(key) or 0

    def _join(self, facts: ProcessFacts, *, anything: bool = False) -> Candidate | None:
        agent = self._hub.get(facts.key)
        incompatible = agent is None and self._hub.incompatible_version(facts.key) is not None
        if not (agent or incompatible or facts.is_python or facts.gpus or anything):
            return None
        process = to_proto(facts)
        if agent is not None:
            add_agent(process, agent)
        elif incompatible:
            process.agent_state = pb.AGENT_STATE_INCOMPATIBLE
        return Candidate(facts.key, process, agent, facts)


def _should_have_one(candidate: Candidate, match: Match, others: Mapping[int, Candidate]) -> bool:
    facts = candidate.facts
    parent = others.get(facts.parent_pid)
    if facts.is_ours or (parent is not None and parent.facts.command == facts.command):
        return False
    return bool(facts.gpus) or (facts.is_python and match.command is not None)


def to_proto(facts: ProcessFacts) -> pb.Process:
    """A process without an agent."""
    process = pb.Process(
        pid=facts.key.pid,
        start_time_ns=facts.key.start_time_ns,
        user=facts.user,
        uid=facts.uid,
        command=facts.command,
        gpus=facts.gpus,
        job_id=facts.job_id,
        agent_state=pb.AGENT_STATE_NONE,
        iterations=-1,
    )
    if facts.rank is not None:
        process.rank = facts.rank
    if facts.world_size is not None:
        process.world_size = facts.world_size
    if facts.container is not None:
        process.container_id = facts.container.id
        process.pod_uid = facts.container.pod_uid
    if facts.names is not None:
        process.pod_namespace, process.pod_name = facts.names.namespace, facts.names.pod
        process.container_name = facts.names.container
    return process


def add_agent(process: pb.Process, agent: Agent) -> None:
    """Adds what the agent said of itself."""
    hello = agent.hello
    if hello.rank is not None:
        process.rank = hello.rank
    if hello.world_size is not None:
        process.world_size = hello.world_size
    process.job_id = hello.job_id or process.job_id
    process.framework = hello.framework
    process.python_version = hello.python_version
    process.agent_version = hello.agent_version
    process.iterations = hello.iterations
    process.busy_capture_id = agent.capture_id or hello.busy_capture_id
    process.agent_state = pb.AGENT_STATE_BUSY if process.busy_capture_id else pb.AGENT_STATE_READY
    process.activity_types.extend(agent.activity_types())
    process.attached = agent.attached is not None
    if not process.command:
        process.command.extend(hello.argv)
