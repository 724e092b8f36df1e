import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod import registry
from kinetod.agents import AgentHub, checked_hello
from kinetod.containers import Container
from kinetod.errors import InvalidRequest
from kinetod.procs import read_facts
from kinetod.registry import Registry, checked_selector
from support.scripted_agent import hello_message

PROCESS = pb.Process(pid=7, user="ada", uid=1000, command=["python", "train.py", "--fast"], rank=3, job_id="77")


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
        (pb.Selector(job_ids=["77"], ranks=[0]), False),
    ],
)
def test_all_conditions_must_hold(selector: pb.Selector, selected: bool) -> None:
    assert checked_selector(selector)(PROCESS) is selected


def test_an_expression_takes_time_in_proportion_to_the_command_line() -> None:
    match = checked_selector(pb.Selector(command_regex="(a+)+$"))
    assert not match(pb.Process(pid=7, command=["a" * 50_000 + "!"]))  # backtracking would not come back


@pytest.mark.parametrize("text", ["(", "(?<=a)b", r"(a)\1", "x{1001}", "(((x{100}){100}){100})"])
def test_what_is_no_expression_of_re2_is_refused_with_the_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"selector\.command_regex: no regular expression \(RE2 syntax\): "):
        checked_selector(pb.Selector(command_regex=text))


def test_a_process_without_rank_has_not_rank_0() -> None:
    assert not checked_selector(pb.Selector(ranks=[0]))(pb.Process(pid=7))


def test_a_selector_says_what_it_selects() -> None:
    selector = pb.Selector(pids=[7], command_regex="x", user="ada", ranks=[1, 0], job_ids=["77"])
    assert str(checked_selector(selector)) == "pid 7, command matching 'x', user ada, rank 0, 1, job 77"
    assert str(checked_selector(pb.Selector())) == "any process"


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


def selected(selector: pb.Selector, *, attachable: bool = True) -> set[int]:
    """The pids that a selector means in a daemon without any agent."""

    async def ask() -> set[int]:
        match = checked_selector(selector)
        return {each.key.pid for each in await Registry(AgentHub()).selected(match, attachable=attachable)}

    return asyncio.run(ask())


@pytest.fixture
def children_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon never looks at its children; here they and theirs are all that it sees."""
    monkeypatch.setattr(
        registry, "foreign_pids", lambda _proc: {child.pid for child in psutil.Process().children(recursive=True)}
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
        subprocess.Popen([sys.executable, "-c", "input()", mark], stdin=subprocess.PIPE) as other,
    ):
        assert python.stdout is not None
        python.stdout.readline()
        try:
            assert selected(pb.Selector(command_regex=mark)) == {python.pid, other.pid}
            assert selected(pb.Selector(command_regex=mark), attachable=False) == set()
            assert shell.poll() is None
        finally:
            for process in (python, shell, other):
                assert process.stdin is not None
                process.stdin.close()


def test_an_empty_selector_means_processes_with_an_agent_only() -> None:
    assert selected(pb.Selector()) == set()


def test_a_process_in_a_container_has_its_id_and_pod() -> None:
    facts = read_facts(os.getpid())
    assert facts is not None
    found = registry.to_proto(replace(facts, container=Container(id="4f" * 32, pod_uid="8f2c", runtime="cri-o")))
    assert (found.container_id, found.pod_uid) == ("4f" * 32, "8f2c")
    outside = registry.to_proto(replace(facts, container=None))
    assert (outside.container_id, outside.pod_uid) == ("", "")
