import os

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents import checked_hello
from kinetod.registry import checked_selector
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
        (pb.Selector(job_id="77"), True),
        (pb.Selector(job_id="7"), False),
        (pb.Selector(job_id="77", ranks=[0]), False),
    ],
)
def test_all_conditions_must_hold(selector: pb.Selector, selected: bool) -> None:
    assert checked_selector(selector)(PROCESS) is selected


def test_a_process_without_rank_has_not_rank_0() -> None:
    assert not checked_selector(pb.Selector(ranks=[0]))(pb.Process(pid=7))


def test_a_selector_says_what_it_selects() -> None:
    selector = pb.Selector(pids=[7], command_regex="x", user="ada", ranks=[1, 0], job_id="77")
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
