"""The processes of this host as callers see them: the kernel's facts joined with what the agents reported."""

import asyncio
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import re2
from kineto_protos.selector import ANY_RANK
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.agents.agent_hub import AgentHub, ConnectedAgent
from kinetod.base.errors import check_shown, invalid
from kinetod.gpus.context_holders import Held
from kinetod.kineto_ipc.polling_process import PollingProcesses
from kinetod.kubernetes.pod_names import PodNames
from kinetod.permissions.role_policy import Caller
from kinetod.processes.accelerator_signs import OutsideSigns
from kinetod.processes.ancestry import with_descendants
from kinetod.processes.containers import is_container_id, is_pod_uid
from kinetod.processes.credentials import REPLACED, Credentials
from kinetod.processes.identity import PROC, ProcessKey
from kinetod.processes.process_info import PrivateFacts, ProcessFacts, foreign_pids, read_all
from kinetod.selection.candidate import Candidate
from kinetod.selection.obstacles import note
from kinetod.selection.process_info_cache import RecentFacts
from kinetod.selection.process_messages import add_agent, add_polling, to_proto
from kinetod.selection.target_selection import Member, leading, leading_of_families

DESCRIBE_DEADLINE_S = 0.5
MAX_REGEX_CHARS = 512
MAX_VALUES = 4096  # of pids, jobs and the like
MAX_RANKS = 100_000
MAX_JOB_CHARS = 128
MAX_SHOWN = 20
_STEP = re.compile(r"[\w.+-]{1,32}", re.ASCII)


class Expression(Protocol):
    """A compiled regular expression."""

    pattern: str

    def search(self, text: str) -> object | None:
        """Finds the pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A checked `pb.Selector`. All given conditions must hold."""

    pids: frozenset[int] = frozenset()
    children: bool = False
    command: Expression | None = None
    user: str = ""
    ranks: frozenset[int] = frozenset()
    gpus: frozenset[int] = frozenset()
    job_ids: frozenset[str] = frozenset()
    job_step: str = ""
    pod_uids: frozenset[str] = frozenset()
    container_ids: tuple[str, ...] = ()  # or how they begin
    helpers: bool = False

    @property
    def names_pids(self) -> bool:
        """Whether each process is named: then it is meant, whatever it is."""
        return bool(self.pids) and not self.children

    @property
    def means_python(self) -> bool:
        """Whether the conditions are narrow enough for Python processes without an agent and an open GPU."""
        narrow = (self.command, self.ranks, self.gpus, self.job_ids, self.pod_uids, self.container_ids)
        return self.children or any(narrow)

    def __call__(self, process: pb.Process, facts: ProcessFacts) -> bool:
        """Whether the process meets all conditions but `gpus` and, with `children`, `pids`."""
        return (
            (self.children or not self.pids or process.pid in self.pids)
            and (self.command is None or self.command.search(" ".join(process.command)) is not None)
            and (not self.user or self.user in (process.user, str(process.uid)))
            and (not self.ranks or (process.HasField("rank") and not self.ranks.isdisjoint((process.rank, ANY_RANK))))
            and (not self.job_ids or not self.job_ids.isdisjoint((process.job_id, facts.job)))
            and (not self.job_step or self.job_step == facts.job_step)
            and (not self.pod_uids or process.pod_uid in self.pod_uids)
            and (not self.container_ids or process.container_id.startswith(self.container_ids))
        )

    def is_on(self, gpus: Iterable[int]) -> bool:
        """Whether a process on these GPUs meets the condition `gpus`."""
        return not self.gpus or not self.gpus.isdisjoint(gpus)

    def __bool__(self) -> bool:
        """Whether there is any condition."""
        return any(getattr(self, each.name) for each in fields(self) if each.name not in ("children", "helpers"))

    def __str__(self) -> str:
        pids = _some("pid", self.pids)
        parts = [
            f"{pids} and their descendants" if self.children else pids,
            f"command matching {self.command.pattern!r}" if self.command else "",
            f"user {self.user}" if self.user else "",
            "any rank" if ANY_RANK in self.ranks else _some("rank", self.ranks),
            _some("GPU", self.gpus),
            _some("job", self.job_ids),
            f"step {self.job_step}" if self.job_step else "",
            _some("pod", self.pod_uids),
            _some("container", self.container_ids),
        ]
        return ", ".join(part for part in parts if part) or "any process"


def _some(name: str, values: Collection[int] | Collection[str]) -> str:
    if not values:
        return ""
    first = ", ".join(map(str, sorted(values)[:MAX_SHOWN]))
    return f"{name} {first}" if len(values) <= MAX_SHOWN else f"{name} {first} and {len(values) - MAX_SHOWN} more"


def checked_selector(selector: pb.Selector, field: str = "selector") -> Match:
    """Checks a selector. Raises InvalidRequest with the path of the wrong field."""

    def check(name: str, is_right: Callable[[Any], bool], what: str, most: int = MAX_VALUES) -> Sequence[Any]:
        values: Sequence[Any] = getattr(selector, name)
        if len(values) > most:
            raise invalid(f"{field}.{name}", f"at most {most} values, got {len(values)}")
        for index, value in enumerate(values):
            if not is_right(value):
                raise invalid(f"{field}.{name}[{index}]", f"{what}, got {value!r:.80}")
        return values

    if selector.children and not selector.pids:
        raise invalid(f"{field}.children", "needs pids: what descends from which processes?")
    if selector.job_step and not selector.job_ids:
        raise invalid(f"{field}.job_step", "needs job_ids: a step of which job?")
    if selector.job_step and not _STEP.fullmatch(selector.job_step):
        raise invalid(f"{field}.job_step", f"a step is like 0, 3+1 or batch, got {selector.job_step!r:.80}")
    for name in ("user", "command_regex"):
        check_shown(f"{field}.{name}", getattr(selector, name))
    for index, job in enumerate(selector.job_ids[:MAX_VALUES]):
        check_shown(f"{field}.job_ids[{index}]", job)
    rank = f"a rank is not negative, or {ANY_RANK} for any"
    pod = "a UID is like 8f2c1a90-7b3d-4e21-9a55-0c1d2e3f4a5b"
    container = "an id, or its beginning, is 12 to 64 hexadecimal digits"
    return Match(
        pids=frozenset(check("pids", lambda pid: pid > 0, "a pid is greater than 0")),
        children=selector.children,
        command=_regex(selector.command_regex, field),
        user=selector.user,
        ranks=frozenset(check("ranks", lambda rank: rank >= ANY_RANK, rank, MAX_RANKS)),
        gpus=frozenset(check("gpus", lambda gpu: gpu >= 0, "the number of a GPU is not negative")),
        job_ids=frozenset(check("job_ids", lambda job: 0 < len(job) <= MAX_JOB_CHARS, "an id has 1 to 128 characters")),
        job_step=selector.job_step,
        pod_uids=frozenset(check("pod_uids", is_pod_uid, pod)),
        container_ids=tuple(check("container_ids", is_container_id, container)),
        helpers=selector.helpers,
    )


def _regex(text: str, field: str) -> Expression | None:
    """Compiles with RE2, whose time is linear in the text: any user may search all users' command lines."""
    if len(text) > MAX_REGEX_CHARS:
        raise invalid(f"{field}.command_regex", f"longer than {MAX_REGEX_CHARS} characters")
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options) if text else None
    except re2.error as exc:
        problem = exc.args[0].decode("utf-8", "replace") if isinstance(exc.args[0], bytes) else str(exc)
        raise invalid(f"{field}.command_regex", f"not a valid regular expression (RE2 syntax): {problem}") from exc


class Privileged(Protocol):
    """Reads facts about processes that we may not read: the attach helper service."""

    async def private_facts(
        self, keys: Iterable[ProcessKey], signs: Iterable[OutsideSigns]
    ) -> Mapping[ProcessKey, PrivateFacts]:
        """The private facts of as many processes as possible."""


class Holders(Protocol):
    """Knows which processes hold a context on which GPU: gpus.context_holders.ContextHolders."""

    @property
    def has_gpus(self) -> bool:
        """Whether this host has any, as far as is known without asking."""

    async def now(self) -> Held:
        """Empty if that is not to be had."""

    async def lately(self) -> Held:
        """Likewise, a little older, but soon."""


class Registry:
    """Joins AgentHub and /proc.

    Without `privileged` the facts of processes that we may not read are left out; without `gpus` nobody tells who holds
    a context on a GPU. attaching: whether captures bring agents into processes that have none. polling: those whose
    libkineto polls this daemon. signs: by which the plug-ins of this daemon know their processes.
    """

    def __init__(
        self,
        hub: AgentHub,
        *,
        proc: Path = PROC,
        privileged: Privileged | None = None,
        gpus: Holders | None = None,
        attaching: bool = True,
        names: PodNames | None = None,
        polling: PollingProcesses | None = None,
        signs: Sequence[OutsideSigns] = (),
    ) -> None:
        self._hub = hub
        self._proc = proc
        self._privileged = privileged
        self._gpus = gpus
        self._attaching = attaching
        self._names = names
        self._polling = polling
        self._signs = signs
        self._recent = RecentFacts(self._facts, lambda key: hub.get(key) is not None)
        self.own_uid = 0 if privileged is not None else os.geteuid()  # whose processes are within reach; 0: everybody's

    async def processes(
        self, match: Match, caller: Caller, *, include_without_agent: bool, trainers: bool = False
    ) -> list[pb.Process]:
        """Of the processes that the caller may see those that a capture would take, with recent data, by pid.

        include_without_agent: also the others that meet the conditions, if they have an agent, are Python or use a GPU;
        trainers: without conditions and that, what a person would trace.
        """

        def sees(candidate: Candidate) -> bool:
            return candidate.visible_to(caller)

        if match.names_pids:
            anything = match.pids if self._attaching or include_without_agent else match.pids & set(self.agent_pids())
            found = await self.meant(match, anything, sees, listed=True, anything=anything)
        elif include_without_agent:
            pids = await self._pids(match, attachable=True)
            found = await self.meant(replace(match, helpers=True), pids, sees, listed=True)
        elif trainers and not match:
            found = await self._trainers(match, sees)
        else:
            found = await self.selected(match, sees, attachable=self._attaching, listed=True)
        await note(found, caller, own_uid=self.own_uid, attaching=self._attaching, proc=self._proc)
        return [each.process for each in found]

    async def _trainers(self, match: Match, usable: Callable[[Candidate], bool]) -> list[Candidate]:
        """What a person would trace: whatever shows a sign of training, unless it only helps others of its family."""
        held = await self._held([], listed=True)
        pids = await self._pids(match, attachable=True, others=held.keys())
        found = await self.meant(replace(match, helpers=True), pids, usable, listed=True, anything=held.keys())
        _set_gpus(found, held)
        signs = [each for each in found if shows_training(each, held)]
        if match.helpers:
            return signs
        leaders = leading_of_families(_member(each, held) for each in signs)
        return [each for each in signs if each.key.pid in leaders]

    async def shown(
        self, match: Match, caller: Caller, on_gpus: Collection[int], *, everything: bool
    ) -> list[pb.Process]:
        """For a host's display: processes with an agent, `on_gpus`, whatever these are, and what a person would trace;
        with `everything` all that are Python or use a GPU. Of them those that meet the conditions and the caller may
        see, by pid.
        """

        def sees(candidate: Candidate) -> bool:
            return candidate.visible_to(caller)

        wide = replace(match, helpers=True) if everything or not match else match
        pids = await self._pids(wide, attachable=everything, others=on_gpus)
        found = await self.meant(wide, pids, sees, listed=True, anything=on_gpus)
        if not everything:
            found += [each for each in await self._trainers(match, sees) if each.key.pid not in pids]
        return [each.process for each in sorted(found, key=lambda each: each.key.pid)]

    async def selected(
        self, match: Match, usable: Callable[[Candidate], bool], *, attachable: bool, listed: bool = False
    ) -> list[Candidate]:
        """What a selector means that does not name each pid, by pid: processes with an agent, and those that should
        get one. Those use a GPU or a plug-in's accelerator, or are Python if the conditions are narrow, and are none of
        kinetod's own.

        usable: what the caller can have at all. listed: as in `meant`.
        """
        attachable = attachable and bool(match)

        def counts(candidate: Candidate) -> bool:
            return usable(candidate) and is_meant(candidate, match, attachable=attachable)

        return await self.meant(match, await self._pids(match, attachable=attachable), counts, listed=listed)

    async def _pids(self, match: Match, *, attachable: bool, others: Collection[int] = ()) -> set[int]:
        """Where to look for what meets the conditions."""
        pids = {*self.agent_pids(), *others}
        if attachable:
            pids |= await asyncio.to_thread(foreign_pids, self._proc)
        if match.children:
            return pids & await asyncio.to_thread(with_descendants, match.pids, self._proc)
        return pids & match.pids if match.pids else pids

    async def meant(
        self,
        match: Match,
        pids: Collection[int],
        usable: Callable[[Candidate], bool],
        *,
        listed: bool = False,
        anything: Collection[int] = (),
    ) -> list[Candidate]:
        """Of these processes those that meet the conditions, by pid, without launchers and workers.

        listed: to be shown only, and then with recent data of the agents. anything: pids that count whatever they are;
        others only if they have an agent, poll, are Python or use a GPU.
        """
        wanted = sorted(pids)
        if listed:
            facts, _ = await asyncio.gather(self._recent.get(wanted), self.refresh(wanted))
        else:
            facts = await self._facts(wanted)
        joined = filter(None, (self._join(each, anything=each.key.pid in anything) for each in facts))
        return await self.narrowed(match, filter(usable, joined), listed=listed)

    async def narrowed(self, match: Match, candidates: Iterable[Candidate], *, listed: bool = False) -> list[Candidate]:
        """Those that meet the conditions, without launchers and workers unless each is named or these are wanted."""
        found = [each for each in candidates if match(each.process, each.facts)]
        leaves_out = len(found) > 1 and not (match.helpers or match.names_pids)
        held = await self._held(found, listed=listed) if leaves_out or match.gpus else {}
        _set_gpus(found, held)
        found = [each for each in found if match.is_on(each.process.gpus)]
        if not leaves_out:
            return found
        leaders = leading(_member(each, held) for each in found)
        return [each for each in found if each.key.pid in leaders]

    async def _held(self, candidates: Iterable[Candidate], *, listed: bool) -> Held:
        if self._gpus is None or not (self._gpus.has_gpus or any(each.facts.gpus for each in candidates)):
            return {}
        return await (self._gpus.lately() if listed else self._gpus.now())

    async def refresh(self, pids: Collection[int]) -> None:
        """Asks the agents of these processes for a fresh Hello; those that do not answer soon keep the last one."""
        wanted = set(pids)
        agents = [agent for agent in self._hub.agents() if agent.key.pid in wanted]
        await self._hub.refresh(agents, DESCRIBE_DEADLINE_S)

    def agent(self, key: ProcessKey) -> ConnectedAgent | None:
        """The agent in this process now."""
        return self._hub.get(key)

    async def candidate(self, pid: int) -> Candidate | None:
        """One process whatever it is; None if there is no such process."""
        return next(iter(await self.candidates([pid])), None)

    async def candidates(self, pids: Iterable[int]) -> list[Candidate]:
        """The facts of the processes that exist, of any kind, read now."""
        facts = await self._facts(sorted(pids))
        for each in facts:
            agent = self._hub.get(each.key)
            if agent is not None and agent.identity.uid != each.uid:  # what holds its link is not this program
                agent.connection.close(f"{REPLACED}; it runs as uid {each.uid} now")
        return [each for each in (self._join(each, anything=True) for each in facts) if each is not None]

    async def whose(self, key: ProcessKey) -> Credentials | None:
        """The process as it is now; None if it has ended."""
        return next((each.credentials for each in await self._facts([key.pid]) if each.key == key), None)

    async def _facts(self, pids: Sequence[int]) -> list[ProcessFacts]:
        """The facts of the processes that exist."""
        if not pids:
            return []
        facts = await asyncio.to_thread(read_all, pids, self._proc, self._signs)
        if self._privileged is not None:
            private = await self._privileged.private_facts([each.key for each in facts if each.hidden], self._signs)
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
        if agent is not None and agent.identity.uid != facts.uid:  # it connected as another user's
            agent = None
        incompatible = agent is None and self._hub.incompatible_version(facts.key) is not None
        polling = self._polling.get(facts.key) if self._polling is not None else None
        if not (agent or incompatible or polling or facts.is_python or facts.gpus or anything):
            return None
        process = to_proto(facts)
        if agent is not None:
            add_agent(process, agent)
        elif incompatible:
            process.agent_state = pb.AGENT_STATE_INCOMPATIBLE
        if polling is not None:
            add_polling(process, polling)
        return Candidate(facts.key, process, agent, facts)


def is_meant(candidate: Candidate, match: Match, *, attachable: bool) -> bool:
    """Whether it has an agent or, if it may be attached to, should get one: it has a GPU open, its libkineto polls, or
    it is Python. None of ours is: a kinetoctl that runs in a job with KINETO_AGENT set has an agent, too.
    """
    facts = candidate.facts
    worth_one = attachable and (
        bool(facts.gpus or facts.plugins) or candidate.polls() or (facts.is_python and match.means_python)
    )
    return not facts.is_ours and (candidate.has_agent() or worth_one)


def shows_training(candidate: Candidate, held: Held) -> bool:
    """Whether a person would trace it: it has an agent, its libkineto polls, or it holds a context on a GPU (has one
    open, if nobody's contexts are known), or is Python with a framework, a GPU, a plug-in's accelerator, a rank or a
    job. None of ours is.
    """
    facts = candidate.facts
    if facts.is_ours:
        return False
    if candidate.has_agent() or candidate.polls() or facts.key.pid in held or (facts.gpus and not held):
        return True
    signs = (facts.framework, facts.gpus, facts.plugins, facts.rank is not None, facts.job_id, facts.job)
    return facts.is_python and any(signs)


def _set_gpus(candidates: Iterable[Candidate], held: Held) -> None:
    for each in candidates:
        if gpus := held.get(each.key.pid):
            each.process.gpus[:] = sorted(gpus)


def _member(candidate: Candidate, held: Held) -> Member:
    return Member(
        pid=candidate.key.pid,
        command=candidate.facts.command,
        ancestors=candidate.facts.ancestors,
        gpus=frozenset(candidate.process.gpus),
        holds=candidate.key.pid in held,
        trains=candidate.process.iterations > 0,
    )
