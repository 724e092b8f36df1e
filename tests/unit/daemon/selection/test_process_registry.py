import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents.agent_hub import AgentHub, ConnectedAgent, checked_hello
from kinetod.base.errors import InvalidRequest
from kinetod.gpus.gpu_reader import Held
from kinetod.permissions.role_policy import Caller, Role, Via
from kinetod.processes.containers import Container
from kinetod.processes.identity import ProcessKey
from kinetod.processes.process_info import ProcessFacts, read_facts
from kinetod.selection import process_registry
from kinetod.selection.candidate import Candidate
from kinetod.selection.process_registry import RecentFacts, Registry, checked_selector, is_targeted, shows_training
from support.agent.scripted_agent import hello_message

CALLER = Caller(uid=os.getuid(), user="me", roles=frozenset({Role.ADMIN}), via=Via.UNIX)
POD, CONTAINER = "8f2c1a90-7b3d-4e21-9a55-0c1d2e3f4a5b", "4f" * 32
PROCESS = pb.Process(
    pid=7,
    user="ada",
    uid=1000,
    command=["python", "train.py", "--fast"],
    rank=3,
    job_id="77",
    pod_uid=POD,
    container_id=CONTAINER,
)
FACTS = ProcessFacts(
    key=ProcessKey(7, 1),
    uid=1000,
    user="ada",
    command=("python", "train.py", "--fast"),
    gpus=(),
    rank=3,
    world_size=8,
    job_id="77",
    is_python=True,
    job="78",  # what the kernel says
    job_step="2",
)


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        (pb.Selector(), True),
        (pb.Selector(pids=[6, 7]), True),
        (pb.Selector(pids=[6]), False),
        (pb.Selector(command_regex=r"train\.py"), True),
        (pb.Selector(command_regex="py --fast$"), True),
        (pb.Selector(command_regex="^train"), False),
        (pb.Selector(user="ada"), True),
        (pb.Selector(user="1000"), True),
        (pb.Selector(user="bob"), False),
        (pb.Selector(ranks=[3]), True),
        (pb.Selector(ranks=[0]), False),
        (pb.Selector(job_ids=["77"]), True),
        (pb.Selector(job_ids=["7"]), False),
        (pb.Selector(job_ids=["7", "78"]), True),
        (pb.Selector(job_ids=["77"], job_step="2"), True),
        (pb.Selector(job_ids=["77"], job_step="0"), False),
        (pb.Selector(ranks=[-1]), True),
        (pb.Selector(pod_uids=[POD]), True),
        (pb.Selector(pod_uids=["0" * 32]), False),
        (pb.Selector(container_ids=[CONTAINER]), True),
        (pb.Selector(container_ids=["0" * 12, CONTAINER[:12]]), True),
        (pb.Selector(container_ids=["0" * 64]), False),
        (pb.Selector(pids=[6], children=True), True),  # whose children these are is looked up elsewhere
        (pb.Selector(pids=[6], children=True, user="bob"), False),
        (pb.Selector(job_ids=["77"], ranks=[0]), False),
    ],
)
def test_all_conditions_must_hold(selector: pb.Selector, selected: bool) -> None:
    assert checked_selector(selector)(PROCESS, FACTS) is selected


@pytest.mark.parametrize(
    ("selector", "problem"),
    [
        (pb.Selector(pids=[7, 0]), "selector.pids[1]: must be greater than 0, got 0"),
        (pb.Selector(pids=range(1, 4098)), "selector.pids: at most 4096 values, got 4097"),
        (pb.Selector(children=True), "selector.children: needs pids, the processes whose descendants are selected"),
        (pb.Selector(ranks=[0, -2]), "selector.ranks[1]: must be a rank of at least 0, or -1 for any rank, got -2"),
        (pb.Selector(gpus=[-1]), "selector.gpus[0]: must be at least 0, got -1"),
        (pb.Selector(job_ids=[""]), "selector.job_ids[0]: must have 1 to 128 characters, got ''"),
        (pb.Selector(job_step="0"), "selector.job_step: needs job_ids, the job that the step belongs to"),
        (
            pb.Selector(job_ids=["77"], job_step="a b"),
            "selector.job_step: must be a step such as 0, 3+1 or batch, got 'a b'",
        ),
        (
            pb.Selector(pod_uids=["llama-0"]),
            "selector.pod_uids[0]: must be a UID such as 8f2c1a90-7b3d-4e21-9a55-0c1d2e3f4a5b, got 'llama-0'",
        ),
        (
            pb.Selector(container_ids=[CONTAINER, "4F" * 6]),
            "selector.container_ids[1]: must be an id or its beginning: 12 to 64 hexadecimal digits, got "
            "'4F4F4F4F4F4F'",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(selector: pb.Selector, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_selector(selector)
    assert str(refused.value) == problem


def test_no_condition_is_not_the_same_as_all_processes() -> None:
    assert not checked_selector(pb.Selector(helpers=True))
    assert checked_selector(pb.Selector(gpus=[0]))


def test_an_expression_takes_time_in_proportion_to_the_command_line() -> None:
    match = checked_selector(pb.Selector(command_regex="(a+)+$"))
    assert not match(pb.Process(pid=7, command=["a" * 50_000 + "!"]), FACTS)  # backtracking would not come back


@pytest.mark.parametrize("text", ["(", "(?<=a)b", r"(a)\1", "x{1001}", "(((x{100}){100}){100})"])
def test_what_is_no_expression_of_re2_is_refused_with_the_field(text: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"selector\.command_regex: not a valid regular expression \(RE2 syntax\): "
    ):
        checked_selector(pb.Selector(command_regex=text))


def test_a_process_without_rank_has_not_rank_0() -> None:
    for ranks in ([0], [-1]):
        assert not checked_selector(pb.Selector(ranks=ranks))(pb.Process(pid=7), FACTS)


def test_a_selector_says_what_it_selects() -> None:
    selector = pb.Selector(pids=[7], command_regex="x", user="ada", ranks=[1, 0], job_ids=["77"])
    assert str(checked_selector(selector)) == "pid 7, command matching 'x', user ada, rank 0, 1, job 77"
    assert str(checked_selector(pb.Selector())) == "any process"
    selector = pb.Selector(pids=[7, 8], children=True, ranks=[-1], gpus=[1, 0], job_ids=["77"], job_step="batch")
    assert str(checked_selector(selector)) == ("pid 7, 8 and all descendants, any rank, GPU 0, 1, job 77, step batch")
    selector = pb.Selector(pod_uids=[POD], container_ids=[CONTAINER[:12]])
    assert str(checked_selector(selector)) == f"pod {POD}, container 4f4f4f4f4f4f"
    assert str(checked_selector(pb.Selector(gpus=range(22)))).endswith(", 18, 19 and 2 more")


def test_what_an_agent_says_fits_into_the_public_messages() -> None:
    hello = checked_hello(
        hello_message(
            framework="\ud800torch\n" + "x" * 1000,
            rank=2**40,
            world_size=-1,
            iterations=-(2**60),
            sources={"a\n": ["b"] * 100},
        )
    )
    process = pb.Process(framework=hello.framework, iterations=hello.iterations)
    assert process.framework.startswith("?torch x")
    assert len(process.framework) == 128
    assert (hello.rank, hello.world_size, hello.iterations) == (None, None, -1)
    assert hello.sources == {"a ": ["b"] * 64}
    assert hello.pid == os.getpid()


class Gpus:
    """GPUs on which processes hold contexts."""

    def __init__(self, held: Held) -> None:
        self.has_gpus = True
        self._held = held

    async def now(self) -> Held:
        return self._held

    async def lately(self) -> Held:
        return self._held


def anybody(_candidate: Candidate) -> bool:
    return True


def selected(selector: pb.Selector, *, attachable: bool = True, held: Held | None = None) -> set[int]:
    """The pids that a selector means in a daemon without any agent."""

    async def ask() -> set[int]:
        found = Registry(AgentHub(), gpus=Gpus(held or {}))
        match = checked_selector(selector)
        taken = {each.key.pid for each in await found.selected(match, anybody, attachable=attachable)}
        listing = Registry(AgentHub(), gpus=Gpus(held or {}), attaching=attachable)
        shown = await listing.processes(match, CALLER, include_without_agent=False)
        assert {each.pid for each in shown} == taken
        return taken

    return asyncio.run(ask())


def listed(selector: pb.Selector, *, everything: bool = False, attaching: bool = True) -> set[int]:
    """The pids that ListProcesses answers with."""

    async def ask() -> set[int]:
        found = Registry(AgentHub(), attaching=attaching)
        match = checked_selector(selector)
        return {each.pid for each in await found.processes(match, CALLER, include_without_agent=everything)}

    return asyncio.run(ask())


@pytest.fixture
def children_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon never looks at its children; here they and theirs are all that it sees."""
    monkeypatch.setattr(
        process_registry,
        "foreign_pids",
        lambda _proc: {child.pid for child in psutil.Process().children(recursive=True)},
    )


@pytest.mark.usefixtures("children_count")
def test_a_regular_expression_means_python_processes_without_an_agent_but_not_their_forks() -> None:
    mark = f"mark-{os.getpid()}"
    forking = f"""import os, sys  # {mark}
if os.fork() == 0:
    sys.stdin.read(1)
    os._exit(0)
print(1, flush=True)
os.wait()
"""
    with (
        subprocess.Popen([sys.executable, "-c", forking], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as python,
        subprocess.Popen(["sh", "-c", f"read x; : {mark}"], stdin=subprocess.PIPE) as shell,
        subprocess.Popen(
            [sys.executable, "-c", "print(1, flush=True); input()", mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other,
    ):
        for each in (python, other):
            assert each.stdout is not None
            each.stdout.readline()
        try:
            assert selected(pb.Selector(command_regex=mark)) == {python.pid, other.pid}
            assert selected(pb.Selector(command_regex=mark), attachable=False) == set()
            (fork,) = (child.pid for child in psutil.Process(python.pid).children())
            assert selected(pb.Selector(command_regex=mark, helpers=True)) == {python.pid, other.pid, fork}
            assert selected(pb.Selector(pids=[python.pid], children=True)) == {python.pid}
            assert selected(pb.Selector(pids=[python.pid], children=True, helpers=True)) == {python.pid, fork}
            assert listed(pb.Selector(pids=[fork, shell.pid])) == {fork, shell.pid}
            assert listed(pb.Selector(pids=[fork, shell.pid]), attaching=False) == set()
            assert listed(pb.Selector(command_regex=mark), everything=True) == {python.pid, other.pid, fork}
            on_gpus = {fork: frozenset({0, 2}), other.pid: frozenset({1})}
            assert selected(pb.Selector(command_regex=mark), held=on_gpus) == {fork, other.pid}
            assert selected(pb.Selector(command_regex=mark, gpus=[1, 3]), held=on_gpus) == {other.pid}
            assert selected(pb.Selector(command_regex=mark, gpus=[3]), held=on_gpus) == set()
            assert shell.poll() is None
        finally:
            for process in (python, shell, other):
                assert process.stdin is not None
                process.stdin.close()


def test_a_process_on_the_accelerator_of_a_plug_in_is_meant_as_one_with_a_gpu() -> None:
    candidate = Candidate(FACTS.key, PROCESS, None, replace(FACTS, plugins=("pebble",)))
    assert is_targeted(candidate, checked_selector(pb.Selector(user="ada")), attachable=True)


@pytest.mark.parametrize("ours", [False, True])
def test_our_own_programs_are_not_meant_even_with_an_agent(ours: bool) -> None:
    hello = checked_hello(hello_message())
    agent = ConnectedAgent(SimpleNamespace(identity=None), hello)  # type: ignore[arg-type]
    for has_one in (agent, None):
        candidate = Candidate(FACTS.key, PROCESS, has_one, replace(FACTS, gpus=(0,), is_ours=ours))
        assert is_targeted(candidate, checked_selector(pb.Selector(job_ids=["77"])), attachable=True) is not ours


def trainers(selector: pb.Selector | None = None, held: Held | None = None) -> dict[int, pb.Process]:
    """What a person would trace, by pid, in a daemon without any agent."""

    async def ask() -> dict[int, pb.Process]:
        found = Registry(AgentHub(), gpus=Gpus(held or {}))
        match = checked_selector(selector or pb.Selector())
        listed = await found.processes(match, CALLER, include_without_agent=False, trainers=True)
        return {each.pid: each for each in listed}

    return asyncio.run(ask())


def test_trainers_are_python_processes_with_a_sign_of_it_and_whoever_holds_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = [sys.executable, "-S", "-c", "print(1, flush=True); input()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(waiting, env={"RANK": "3"}, **pipes) as rank,
        subprocess.Popen(waiting, env={"SLURM_JOB_ID": "77"}, **pipes) as job,
        subprocess.Popen(waiting, env={}, **pipes) as tool,
        subprocess.Popen(["sh", "-c", "echo; read x"], **pipes) as program,
    ):
        everybody = (rank, job, tool, program)
        monkeypatch.setattr(process_registry, "foreign_pids", lambda _proc: {each.pid for each in everybody})
        try:
            for each in everybody:
                assert each.stdout is not None
                each.stdout.readline()
            found = trainers()
            assert set(found) == {rank.pid, job.pid}
            assert found[rank.pid].parent_pid == os.getpid()
            assert found[rank.pid].obstacle == ""
            assert set(trainers(held={program.pid: frozenset({1})})) == {rank.pid, job.pid, program.pid}
            assert set(trainers(pb.Selector(ranks=[3]))) == {rank.pid}
        finally:
            for each in everybody:
                assert each.stdin is not None
                each.stdin.close()


def test_the_signs_of_training() -> None:
    def shows(held: Held | None = None, **facts: Any) -> bool:
        plain = replace(FACTS, rank=None, job_id="", job="", **facts)
        candidate = Candidate(plain.key, pb.Process(agent_state=pb.AGENT_STATE_NONE), None, plain)
        return shows_training(candidate, held or {})

    assert not shows()
    assert shows(framework="torch")
    assert shows(plugins=("pebble",))
    assert not shows(plugins=("pebble",), is_ours=True)
    assert not shows(framework="torch", is_ours=True)
    assert shows(gpus=(0,))
    assert shows(gpus=(0,), is_python=False)
    assert not shows({8: frozenset({0})}, gpus=(0,), is_python=False)  # such as a monitor: others hold the contexts
    assert shows({7: frozenset({0})}, is_python=False)


def test_an_empty_selector_means_processes_with_an_agent_only() -> None:
    assert selected(pb.Selector()) == set()


def test_a_process_in_a_container_has_its_id_and_pod() -> None:
    facts = read_facts(os.getpid())
    assert facts is not None
    found = process_registry.to_proto(
        replace(facts, container=Container(id="4f" * 32, pod_uid="8f2c", runtime="cri-o"))
    )
    assert (found.container_id, found.pod_uid) == ("4f" * 32, "8f2c")
    outside = process_registry.to_proto(replace(facts, container=None))
    assert (outside.container_id, outside.pod_uid) == ("", "")


OURS = [os.getpid(), os.getppid()]


class Reader:
    """Reads the facts of real processes and notes which."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.steady = True
        self.done = asyncio.Event()

    async def __call__(self, pids: Sequence[int]) -> list[ProcessFacts]:
        self.read += pids
        self.done.set()
        return [facts for facts in map(read_facts, pids) if facts is not None]

    def is_steady(self, _key: ProcessKey) -> bool:
        return self.steady


async def shown(facts: RecentFacts, pids: Sequence[int]) -> list[int]:
    return [each.key.pid for each in await facts.get(pids)]


def test_processes_with_an_agent_are_not_read_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRESH_S", "SHOWN_S"):
        monkeypatch.setattr(process_registry, name, 1000)

    async def scenario() -> None:
        reader = Reader()
        facts = RecentFacts(reader, reader.is_steady)
        assert await shown(facts, OURS) == await shown(facts, OURS) == OURS
        assert reader.read == OURS
        assert await shown(facts, OURS[:1]) == OURS[:1]

    asyncio.run(scenario())


def test_what_is_a_second_old_is_shown_and_read_anew_behind_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_registry, "FRESH_S", -1)
    monkeypatch.setattr(process_registry, "SHOWN_S", 1000)
    monkeypatch.setattr(process_registry, "BATCH", 1)

    async def scenario() -> None:
        reader = Reader()
        facts = RecentFacts(reader, reader.is_steady)
        await facts.get(OURS)
        reader.done.clear()
        assert await shown(facts, OURS) == OURS
        assert reader.read == OURS  # not waited for
        async with asyncio.timeout(30):
            while len(reader.read) < 2 * len(OURS):
                await reader.done.wait()
                reader.done.clear()
        assert reader.read == OURS * 2

    asyncio.run(scenario())


def test_what_nobody_has_asked_for_lately_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_registry, "SHOWN_S", -1)

    async def scenario() -> None:
        reader = Reader()
        facts = RecentFacts(reader, reader.is_steady)
        await facts.get(OURS)
        assert await shown(facts, OURS) == OURS
        assert reader.read == OURS * 2

    asyncio.run(scenario())


def test_a_process_without_an_agent_is_always_read() -> None:
    async def scenario() -> None:
        reader = Reader()
        reader.steady = False
        facts = RecentFacts(reader, reader.is_steady)
        await facts.get(OURS)
        assert await shown(facts, OURS) == OURS
        assert reader.read == OURS * 2

    asyncio.run(scenario())


def test_a_process_that_has_ended_is_left_out() -> None:
    async def scenario() -> None:
        reader = Reader()
        assert await shown(RecentFacts(reader, reader.is_steady), [2**22, *OURS]) == OURS

    asyncio.run(scenario())
