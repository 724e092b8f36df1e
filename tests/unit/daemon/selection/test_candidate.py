"""What a list says against tracing a process."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.permissions.role_policy import Caller, Role, Via
from kinetod.processes.identity import ProcessKey
from kinetod.processes.process_info import ProcessFacts
from kinetod.selection.candidate import Candidate, note, seen_in_status

ADA = Caller(uid=1000, user="ada", roles=frozenset({Role.OWN}), via=Via.UNIX)
FACTS = ProcessFacts(
    key=ProcessKey(7, 1), uid=1000, user="ada", command=("python", "train.py"), gpus=(), rank=None, world_size=None,
    job_id="", is_python=True,
)  # fmt: skip


def noted(
    tmp_path: Path,
    facts: ProcessFacts = FACTS,
    state: pb.AgentState = pb.AGENT_STATE_NONE,
    *,
    own_uid: int = 0,
    attaching: bool = True,
) -> str:
    candidate = Candidate(facts.key, pb.Process(pid=7, agent_state=state), None, facts)
    asyncio.run(note([candidate], ADA, own_uid=own_uid, attaching=attaching, proc=tmp_path))
    return candidate.process.obstacle


def status(proc: Path, text: str) -> None:
    (proc / "7").mkdir(exist_ok=True)
    (proc / "7/status").write_text(text)


def test_of_a_process_that_runs_nothing_is_said(tmp_path: Path) -> None:
    status(tmp_path, "Name:\tpython\nState:\tS (sleeping)\nTracerPid:\t0\n")
    assert noted(tmp_path) == ""


@pytest.mark.parametrize(
    ("state", "tracer", "expected"),
    [("T (stopped)", 0, "stopped"), ("t (tracing stop)", 55, "traced by process 55"), ("S (sleeping)", 0, "")],
)
def test_the_kernel_says_who_stands_still_and_whom_another_tool_traces(
    tmp_path: Path, state: str, tracer: int, expected: str
) -> None:
    status(tmp_path, f"Name:\tpython\nState:\t{state}\nTracerPid:\t{tracer}\n")
    assert seen_in_status(7, tmp_path) == expected


def test_a_process_that_has_ended_or_writes_lines_of_its_own_is_no_error(tmp_path: Path) -> None:
    assert seen_in_status(7, tmp_path) == ""
    status(tmp_path, "Name:\tpy\\nTracerPid:\tmany\nTracerPid:\tx\n")
    assert seen_in_status(7, tmp_path) == ""


def test_rights_come_first_then_agents(tmp_path: Path) -> None:
    status(tmp_path, "State:\tT (stopped)\n")
    assert noted(tmp_path, own_uid=1001) == "another user's"
    assert noted(tmp_path, replace(FACTS, uid=0)) == "not permitted"
    assert noted(tmp_path, replace(FACTS, plain=False)) == "protected by the kernel"
    assert noted(tmp_path, state=pb.AGENT_STATE_INCOMPATIBLE) == "agent of another version"
    assert noted(tmp_path, attaching=False) == "no agent; attaching is off"
    assert noted(tmp_path) == "stopped"


def test_what_would_be_in_the_way_of_attaching_does_not_matter_where_an_agent_is(tmp_path: Path) -> None:
    status(tmp_path, "State:\tT (stopped)\n")
    assert noted(tmp_path, state=pb.AGENT_STATE_READY, attaching=False) == ""
