"""The operators of a real torch program, beside what torch's own profiler says about the same work."""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.losses import without_losses
from support.service.daemon import Daemon, running_daemon, watch_to_end, watch_until_it_collects
from support.targets import programs
from support.waiting import scaled, until

pytestmark = pytest.mark.torch
PROGRAM = Path(__file__).with_name("torch_program.py")
SECOND_NS = 10**9
INPUTS = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Both traces of the same work, and what the daemon says about ours."""

    ours: dict[str, Any]
    kinetos: dict[str, Any]
    target: pb.Target


@contextmanager
def program(daemon: Daemon) -> Iterator[programs.Program]:
    """The torch program with the agent, connected."""
    code = f"import kineto_agent, runpy; kineto_agent.start(); runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    with programs.program([sys.executable, "-c", code], daemon) as process:
        until(lambda: "cpu_op" in offered(daemon.stub(), process.pid), "the agent offers operators")
        yield process


def offered(stub: ProfilerStub, pid: int) -> list[str]:
    processes = stub.ListProcesses(pb.ListProcessesRequest(), timeout=scaled(10)).processes
    return [name for process in processes if process.pid == pid for name in process.activity_types]


def do(process: programs.Program, command: str) -> None:
    programs.tell(process, command)
    answer = programs.hear(process)
    while answer.startswith("USDT"):
        answer = programs.hear(process)
    assert json.loads(answer) == {"did": command.split()[0]}


def record(stub: ProfilerStub, process: programs.Program, options: pb.Options) -> tuple[pb.Target, Any]:
    """A capture around one piece of work, ended as soon as that is done."""
    spec = pb.CaptureSpec(
        selector=pb.Selector(pids=[process.pid]),
        duration_ns=60 * SECOND_NS,
        activity_types=["cpu_op", "user_annotation"],
        options=options,
    )
    capture_id = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10)).id
    watch_until_it_collects(stub, capture_id)
    do(process, "work")
    stub.CancelCapture(pb.CancelCaptureRequest(id=capture_id, keep_partial=True), timeout=scaled(10))
    (target,) = watch_to_end(stub, capture_id).targets
    chunks = stub.FetchTrace(pb.FetchTraceRequest(capture_id=capture_id), timeout=scaled(10))
    return target, json.loads(gzip.decompress(b"".join(chunk.data for chunk in chunks)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    path = tmp_path_factory.mktemp("kineto") / "trace.json"
    with running_daemon() as daemon, program(daemon) as process:
        target, ours = record(daemon.stub(), process, pb.Options(record_shapes=True))
        do(process, f"profile {path}")
    yield Recorded(ours=ours, kinetos=json.loads(path.read_text()), target=target)


def of(trace: dict[str, Any], category: str) -> Rows:
    """The rows of a category, without the iterations: torch's profiler was not told of any."""
    rows = (row for row in trace["traceEvents"] if row.get("cat") == category)
    return [row for row in rows if not row["name"].startswith("ProfilerStep#")]


@pytest.mark.parametrize("category", ["cpu_op", "user_annotation"])
def test_every_operator_of_every_thread_is_there(recorded: Recorded, category: str) -> None:
    def by_thread(trace: dict[str, Any]) -> list[Counter[str]]:
        threads = {row["tid"]: Counter[str]() for row in of(trace, category)}
        for row in of(trace, category):
            threads[row["tid"]][row["name"]] += 1
        return sorted(threads.values(), key=lambda names: sorted(names.items()))

    assert by_thread(recorded.ours) == by_thread(recorded.kinetos)


@pytest.mark.parametrize("category", ["cpu_op", "user_annotation", "fwdbwd"])
def test_rows_have_the_same_keys(recorded: Recorded, category: str) -> None:
    def keys(trace: dict[str, Any]) -> Counter[tuple[str, ...]]:
        return Counter(
            (row["name"], row["ph"], *sorted(row), *sorted(row.get("args", {}))) for row in of(trace, category)
        )

    assert keys(recorded.ours) == keys(recorded.kinetos)


def test_operators_have_the_same_inputs(recorded: Recorded) -> None:
    def inputs(trace: dict[str, Any]) -> Counter[tuple[str, str]]:
        return Counter(
            (row["name"], json.dumps([row["args"].get(name) for name in INPUTS])) for row in of(trace, "cpu_op")
        )

    assert inputs(recorded.ours) == inputs(recorded.kinetos)


def test_backward_operators_are_linked_to_the_same_forward_operators(recorded: Recorded) -> None:
    def links(trace: dict[str, Any]) -> Counter[tuple[str, str, bool]]:
        places = {(row["tid"], row["ts"]): row["name"] for row in of(trace, "cpu_op")}
        ends: dict[int, dict[str, Any]] = {}
        for row in of(trace, "fwdbwd"):
            ends.setdefault(row["id"], {})[row["ph"]] = (row["tid"], row["ts"])
        return Counter((places[pair["s"]], places[pair["f"]], pair["s"][0] == pair["f"][0]) for pair in ends.values())

    assert links(recorded.ours) == links(recorded.kinetos)
    assert any(not same_thread for _, _, same_thread in links(recorded.ours))


def test_operators_nest_as_in_torchs_trace(recorded: Recorded) -> None:
    def pairs(trace: dict[str, Any]) -> Counter[tuple[str, str]]:
        rows = sorted(
            (*of(trace, "cpu_op"), *of(trace, "user_annotation")), key=lambda row: (row["tid"], row["ts"], -row["dur"])
        )
        found: Counter[tuple[str, str]] = Counter()
        stack: Rows = []
        for row in rows:
            while stack and (stack[-1]["tid"] != row["tid"] or stack[-1]["ts"] + stack[-1]["dur"] <= row["ts"]):
                stack.pop()
            found[(stack[-1]["name"] if stack else "", row["name"])] += 1
            stack.append(row)
        return found

    assert pairs(recorded.ours) == pairs(recorded.kinetos)


def test_the_trace_says_what_was_asked_for(recorded: Recorded) -> None:
    assert recorded.ours["record_shapes"] == 1
    counts, steps = recorded.target.counts
    assert counts.way.startswith("observer, torch ")
    assert (steps.source, steps.dropped) == ("steps", 0)
    assert recorded.target.summary.activities["cpu_op"] == len(of(recorded.ours, "cpu_op"))
    assert (recorded.target.verdict, without_losses(recorded.target.warnings)) == (pb.VERDICT_PARTIAL, [])
