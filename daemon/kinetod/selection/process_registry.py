"""The processes of this host as callers see them: the kernel's facts joined with the agents' reports."""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import re2
from kineto_protos.call_values import ANY_RANK
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.agents.agent_hub import AgentHub, ConnectedAgent
from kinetod.base.errors import check_shown, invalid
from kinetod.gpus.gpu_reader import Held
from kinetod.kineto_ipc.poller_registry import PollingProcess, PollingProcesses
from kinetod.kubernetes.pod_names import PodNames
from kinetod.permissions.role_policy import Caller
from kinetod.processes.accelerator_signs import OutsideSigns
from kinetod.processes.containers import is_container_id, is_pod_uid
from kinetod.processes.credentials import REPLACED, Credentials
from kinetod.processes.identity import PROC, ProcessKey
from kinetod.processes.process_info import PrivateFacts, ProcessFacts, foreign_pids, read_all, with_descendants
from kinetod.selection.candidate import Candidate, note

DESCRIBE_DEADLINE_S = 0.5
MAX_REGEX_CHARS = 512
MAX_VALUES = 4096  # of pids, jobs and the like
MAX_RANKS = 100_000
MAX_JOB_CHARS = 128
MAX_SHOWN = 20
_STEP = re.compile(r"[\w.+-]{1,32}", re.ASCII)
FRESH_S = 1.0  # how long they are not read again
SHOWN_S = 3.0  # how long they may be shown
BATCH = 8  # processes read at a time in the background, so that callers need not wait for all of them

Read = Callable[[Sequence[int]], Awaitable[list[ProcessFacts]]]
_WORKERS = re.compile(
    r"from multiprocess(?:ing)?\.\w+ import "  # python -c "from multiprocessing.spawn import spawn_main; …"
    r"|\bloky\.backend\b"
    r"|/torch/_inductor/compile_worker/"
)


# Finds the selected processes that only help others: launchers and DataLoader workers. Pure.
#
# If processes hold a context on a GPU, those are the training processes, together with others that run exactly the same
# command line, which may not have created a context yet.
# If none does, or that is not visible, relations decide. A worker is forked, and then has its parent's command line and
# opens no GPU of its own, or is started by multiprocessing, joblib or torch's compiler with their typical command line.
# A launcher is an ancestor of the remaining processes. Workers are removed first, since their parent is not a launcher.
# Of the rest, processes with an open GPU have priority. A process that has finished iterations is training, whatever it
# looks like.
@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A selected process."""

    pid: int
    command: tuple[str, ...]
    ancestors: tuple[int, ...] = ()  # the parent first
    gpus: frozenset[int] = frozenset()  # that it holds or has open
    holds: bool = False  # a context on a GPU
    trains: bool = False  # it has finished iterations


def leading(members: Iterable[Member]) -> frozenset[int]:
    """The pids of the processes that do not only help others; at least one if there are any members."""
    by_pid = {each.pid: each for each in members}
    workers = {each.pid for each in by_pid.values() if not each.trains and _is_worker(each, by_pid)}
    rest = [each for each in by_pid.values() if each.pid not in workers]
    holding = {each.pid: each for each in by_pid.values() if each.holds}
    if holding:
        commands = {each.command for each in holding.values()}
        above = _above(holding.values())
        late = {
            each.pid
            for each in rest
            if each.command in commands and each.pid not in above and holding.keys().isdisjoint(each.ancestors)
        }
        return frozenset(holding.keys() | late | {each.pid for each in rest if each.trains})
    if any(each.gpus for each in rest):
        rest = [each for each in rest if each.gpus or each.trains]
    above = _above(rest)
    return frozenset(each.pid for each in rest if each.trains or each.pid not in above)


def leading_of_families(members: Iterable[Member]) -> frozenset[int]:
    """Like `leading`, separately for each family of processes that descend from the same member. Unrelated programs do
    not count as helpers because one of them holds a context.
    """
    by_pid = {each.pid: each for each in members}
    families: dict[int, list[Member]] = {}
    for each in by_pid.values():
        eldest = next((pid for pid in reversed(each.ancestors) if pid in by_pid), each.pid)
        families.setdefault(eldest, []).append(each)
    return frozenset().union(*map(leading, families.values()))


def _above(members: Iterable[Member]) -> set[int]:
    return {pid for each in members for pid in each.ancestors}


def _is_worker(member: Member, members: Mapping[int, Member]) -> bool:
    parent = members.get(member.ancestors[0]) if member.ancestors else None
    if member.gpus - (parent.gpus if parent is not None else frozenset()):
        return False  # not inherited
    if parent is not None and parent.command == member.command:
        return True
    return not members.keys().isdisjoint(member.ancestors) and _WORKERS.search(" ".join(member.command)) is not None


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
    container_ids: tuple[str, ...] = ()  # full ids or their first digits
    helpers: bool = False

    @property
    def names_pids(self) -> bool:
        """Whether pids are given: then these processes are selected, whatever they are."""
        return bool(self.pids) and not self.children

    @property
    def means_python(self) -> bool:
        """Whether the conditions are narrow enough to include Python processes without an agent and an open GPU."""
        narrow = (self.command, self.ranks, self.gpus, self.job_ids, self.pod_uids, self.container_ids)
        return self.children or any(narrow)

    def __call__(self, process: pb.Process, facts: ProcessFacts) -> bool:
        """Whether the process meets all conditions except `gpus` and, with `children`, `pids`."""
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
            f"{pids} and all descendants" if self.children else pids,
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
        raise invalid(f"{field}.children", "needs pids, the processes whose descendants are selected")
    if selector.job_step and not selector.job_ids:
        raise invalid(f"{field}.job_step", "needs job_ids, the job that the step belongs to")
    if selector.job_step and not _STEP.fullmatch(selector.job_step):
        raise invalid(f"{field}.job_step", f"must be a step such as 0, 3+1 or batch, got {selector.job_step!r:.80}")
    for name in ("user", "command_regex"):
        check_shown(f"{field}.{name}", getattr(selector, name))
    for index, job in enumerate(selector.job_ids[:MAX_VALUES]):
        check_shown(f"{field}.job_ids[{index}]", job)
    rank = f"must be a rank of at least 0, or {ANY_RANK} for any rank"
    pod = "must be a UID such as 8f2c1a90-7b3d-4e21-9a55-0c1d2e3f4a5b"
    container = "must be an id or its beginning: 12 to 64 hexadecimal digits"
    return Match(
        pids=frozenset(check("pids", lambda pid: pid > 0, "must be greater than 0")),
        children=selector.children,
        command=_regex(selector.command_regex, field),
        user=selector.user,
        ranks=frozenset(check("ranks", lambda rank: rank >= ANY_RANK, rank, MAX_RANKS)),
        gpus=frozenset(check("gpus", lambda gpu: gpu >= 0, "must be at least 0")),
        job_ids=frozenset(check("job_ids", lambda job: 0 < len(job) <= MAX_JOB_CHARS, "must have 1 to 128 characters")),
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
    """Finds which processes hold a context on which GPU: gpus.gpu_reader.ContextHolders."""

    @property
    def has_gpus(self) -> bool:
        """Whether this host has any, as far as known without a new reading."""

    async def now(self) -> Held:
        """The current holders; empty if they are unavailable."""

    async def lately(self) -> Held:
        """The same, possibly slightly older, but quickly."""


class Registry:
    """Joins AgentHub and /proc.

    Without `privileged`, facts of processes that we may not read are missing; without `gpus`, holders of contexts are
    unknown. attaching: whether captures attach to processes without an agent. polling: processes whose libkineto polls
    this daemon. signs: external signs of the plug-ins' processes.
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
        # the user whose processes can be reached; 0: all users
        self.own_uid = 0 if privileged is not None else os.geteuid()

    async def processes(
        self, match: Match, caller: Caller, *, include_without_agent: bool, trainers: bool = False
    ) -> list[pb.Process]:
        """The processes that the caller may see and a capture would select, with recent data, by pid.

        include_without_agent: adds others that meet the conditions, if they have an agent, are Python or use a GPU;
        trainers: without conditions and that option, the processes that a person would trace.
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
        """The processes that a person would trace: those with a sign of training that do not only help others of their
        family.
        """
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
        """For a host's display: processes with an agent, `on_gpus` of any kind, and those that a person would trace;
        with `everything` all that are Python or use a GPU. Only those that meet the conditions and the caller may see,
        by pid.
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
        """The processes selected without listing each pid, by pid: those with an agent, and those that should get one.
        The latter use a GPU or a plug-in's accelerator, or are Python if the conditions are narrow, and are not
        kinetod's own.

        usable: whether the caller can trace it at all. listed: as in `meant`.
        """
        attachable = attachable and bool(match)

        def counts(candidate: Candidate) -> bool:
            return usable(candidate) and is_targeted(candidate, match, attachable=attachable)

        return await self.meant(match, await self._pids(match, attachable=attachable), counts, listed=listed)

    async def _pids(self, match: Match, *, attachable: bool, others: Collection[int] = ()) -> set[int]:
        """The pids to search for processes that meet the conditions."""
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
        """Those of these processes that meet the conditions, by pid, without launchers and workers.

        listed: for display only, with recent data of the agents. anything: pids that count whatever they are; others
        count only if they have an agent, poll, are Python or use a GPU.
        """
        wanted = sorted(pids)
        if listed:
            facts, _ = await asyncio.gather(self._recent.get(wanted), self.refresh(wanted))
        else:
            facts = await self._facts(wanted)
        joined = filter(None, (self._join(each, anything=each.key.pid in anything) for each in facts))
        return await self.narrowed(match, filter(usable, joined), listed=listed)

    async def narrowed(self, match: Match, candidates: Iterable[Candidate], *, listed: bool = False) -> list[Candidate]:
        """The candidates that meet the conditions, without launchers and workers unless pids are given or helpers are
        requested.
        """
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
        """One process of any kind; None if there is no such process."""
        return next(iter(await self.candidates([pid])), None)

    async def candidates(self, pids: Iterable[int]) -> list[Candidate]:
        """Reads the facts of the processes that exist, of any kind."""
        facts = await self._facts(sorted(pids))
        for each in facts:
            agent = self._hub.get(each.key)
            # the process that holds its link is not this program
            if agent is not None and agent.identity.uid != each.uid:
                agent.connection.close(f"{REPLACED}; it now runs as uid {each.uid}")
        return [each for each in (self._join(each, anything=True) for each in facts) if each is not None]

    async def whose(self, key: ProcessKey) -> Credentials | None:
        """The present credentials of a process; None if it has ended."""
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
        """Processes with an agent, including one that we cannot talk to."""
        return sorted({agent.key.pid for agent in self._hub.agents()} | {key.pid for key in self._hub.incompatible()})

    def incompatible_version(self, key: ProcessKey) -> int:
        """The protocol version of the agent in this process that we cannot talk to; 0 if there is none."""
        return self._hub.incompatible_version(key) or 0

    def _join(self, facts: ProcessFacts, *, anything: bool = False) -> Candidate | None:
        agent = self._hub.get(facts.key)
        if agent is not None and agent.identity.uid != facts.uid:  # it connected as another user
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


def is_targeted(candidate: Candidate, match: Match, *, attachable: bool) -> bool:
    """Whether it has an agent or, if it may be attached to, should get one: it has a GPU open, its libkineto polls, or
    it is Python. Never one of ours: a kinetoctl in a job with KINETO_AGENT set has an agent, too.
    """
    facts = candidate.facts
    worth_one = attachable and (
        bool(facts.gpus or facts.plugins) or candidate.polls() or (facts.is_python and match.means_python)
    )
    return not facts.is_ours and (candidate.has_agent() or worth_one)


def shows_training(candidate: Candidate, held: Held) -> bool:
    """Whether a person would trace it: it has an agent, its libkineto polls, or it holds a context on a GPU (has one
    open, if contexts are unknown), or is Python with a framework, a GPU, a plug-in's accelerator, a rank or a job.
    Never one of ours.
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


# Caches the kernel's facts about processes with an agent briefly, for lists that are requested repeatedly.
#
# Reading a process's facts takes a dozen files and a query to the helper service: 30 ms of CPU for 64 processes. Facts
# that are a second old are shown once more and read again in the background, for the next list. Callers wait only for
# facts that were not requested recently. A process whose agent has gone is always read anew.
class RecentFacts:
    """Facts by pid. `read` returns those of existing processes; `is_steady` says which may be cached."""

    def __init__(self, read: Read, is_steady: Callable[[ProcessKey], bool]) -> None:
        self._read = read
        self._is_steady = is_steady
        self._kept: dict[int, tuple[float, ProcessFacts]] = {}  # pid -> monotonic time of reading, facts
        self._renewal: asyncio.Task[None] | None = None

    async def get(self, pids: Sequence[int]) -> list[ProcessFacts]:
        """The facts of the processes that exist, in the order of `pids`; at most SHOWN_S old."""
        now = time.monotonic()
        self._kept = {
            pid: (read_at, facts)
            for pid, (read_at, facts) in self._kept.items()
            if now - read_at <= SHOWN_S and self._is_steady(facts.key)
        }
        known = {pid: facts for pid, (_read_at, facts) in self._kept.items()}
        missing = [pid for pid in pids if pid not in known]
        if missing:
            known |= {facts.key.pid: facts for facts in await self._read_anew(missing)}
        self._renew([pid for pid, (read_at, _facts) in self._kept.items() if now - read_at > FRESH_S])
        return [known[pid] for pid in pids if pid in known]

    async def _read_anew(self, pids: Sequence[int]) -> list[ProcessFacts]:
        read_at, read = time.monotonic(), await self._read(pids)
        for pid in pids:
            self._kept.pop(pid, None)
        self._kept |= {facts.key.pid: (read_at, facts) for facts in read if self._is_steady(facts.key)}
        return read

    def _renew(self, pids: list[int]) -> None:
        if pids and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.create_task(self._read_in_batches(pids), name="facts")

    async def _read_in_batches(self, pids: Sequence[int]) -> None:
        for first in range(0, len(pids), BATCH):
            await self._read_anew(pids[first : first + BATCH])


def to_proto(facts: ProcessFacts) -> pb.Process:
    """The message for a process without an agent."""
    process = pb.Process(
        pid=facts.key.pid,
        start_time_ns=facts.key.start_time_ns,
        user=facts.user,
        uid=facts.uid,
        command=facts.command,
        gpus=facts.gpus,
        job_id=facts.job_id,
        framework=facts.framework,
        parent_pid=facts.parent_pid,
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
    process.trace_parent = facts.trace_parent
    process.resource.update(facts.resource)
    return process


def add_agent(process: pb.Process, agent: ConnectedAgent) -> None:
    """Adds the agent's own data."""
    hello = agent.hello
    if hello.rank is not None:
        process.rank = hello.rank
    if hello.world_size is not None:
        process.world_size = hello.world_size
    process.job_id = hello.job_id or process.job_id
    process.framework = hello.framework or process.framework
    process.python_version = hello.python_version
    process.agent_version = hello.agent_version
    process.iterations = hello.iterations
    process.iteration_ns = hello.iteration_ns
    process.stalled_ns = hello.stalled_ns
    process.busy_capture_id = agent.capture_id or hello.busy_capture_id
    process.agent_state = pb.AGENT_STATE_BUSY if process.busy_capture_id else pb.AGENT_STATE_READY
    process.activity_types.extend(agent.activity_types())
    process.attached = agent.attached is not None
    if agent.standing is not None:
        process.standing.CopyFrom(agent.standing)
    if not process.command:
        process.command.extend(hello.argv)


def add_polling(process: pb.Process, polling: PollingProcess) -> None:
    """Adds the data from its libkineto's polls."""
    process.kineto.last_poll_ns = polling.last_poll_ns
    process.kineto.tracing = polling.tracing
    process.kineto.job_id = polling.job_id
