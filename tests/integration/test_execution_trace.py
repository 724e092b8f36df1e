"""torch's execution trace through the real agent and daemon: a file beside the trace, or alone."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_protos.v1.profiler_pb2_grpc import ProfilerStub
from support.daemon import Daemon, watch_to_end
from support.programs import LISTEN, Program, connected, hear, tell

pytestmark = pytest.mark.torch

TARGET = f"""
import time
import torch
from torch.profiler import ExecutionTraceObserver
import kineto_agent
kineto_agent.start()
{LISTEN}
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
own = None
def say(text):
    print(text, flush=True)
say("ready %d" % threading.get_native_id())
while True:
    with torch.profiler.record_function("train_step"):
        model(torch.ones(4, 8)).sum().backward()
    time.sleep(0.002)  # so that the files stay small
    if commands:
        command = commands.pop(0)
        if command.startswith("own "):
            own = ExecutionTraceObserver()
            own.register_callback(command[4:])
            own.start()
            say("own runs")
        if command == "stop own":
            own.stop()
            own.unregister_callback()
            say("own ended")
        if command == "fork":
            child = os.fork()
            if child == 0:
                for _ in range(100):
                    model(torch.ones(4, 8))
                sys.exit(0)  # with every destructor
            say("child %d" % os.waitpid(child, 0)[1])
        if command == "end":
            break
"""


def ask(process: Program, command: str) -> str:
    """One command; its answer."""
    tell(process, command)
    return hear(process)


@pytest.fixture(scope="module")
def program(daemon: Daemon) -> Iterator[Program]:
    """For tests that leave it as they found it."""
    with connected(daemon, TARGET, quiet=True) as started:
        yield started


def create(stub: ProfilerStub, pid: int, *types: str, duration_ns: int = 300_000_000) -> str:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=duration_ns, activity_types=types)
    capture_id: str = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=10).id
    return capture_id


def until_collecting(stub: ProfilerStub, capture_id: str) -> None:
    events = stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=30)
    next(event for event in events if event.target.state == pb.TARGET_STATE_COLLECT)
    events.cancel()


def fetch(stub: ProfilerStub, capture_id: str, file_format: str) -> bytes:
    chunks = stub.FetchTrace(pb.FetchTraceRequest(capture_id=capture_id, format=file_format), timeout=20)
    return b"".join(chunk.data for chunk in chunks)


def execution_trace(stub: ProfilerStub, capture: pb.Capture) -> Any:
    return json.loads(fetch(stub, capture.id, "execution-trace"))


def verdict(capture: pb.Capture) -> tuple[str, str, str]:
    (target,) = capture.targets
    return pb.Verdict.Name(target.verdict), target.reason_code, target.reason


def test_the_file_alone_has_the_nodes_of_the_main_thread(daemon: Daemon, program: Program) -> None:
    stub = daemon.stub()
    for _ in range(2):  # the second one too
        capture = watch_to_end(stub, create(stub, program.pid, "execution_trace"))
        assert verdict(capture) == ("VERDICT_DONE", "", "")
        (file,) = capture.targets[0].files
        assert file.format == "execution-trace"
        assert file.name.endswith(".execution_trace.json")
        trace = execution_trace(stub, capture)
        assert (trace["pid"], "finish_ts" in trace) == (program.pid, True)
        names = {node["name"] for node in trace["nodes"]}
        assert {"train_step", "aten::linear", "AddmmBackward0"} <= names
        steps = [node for node in trace["nodes"] if node["name"] == "train_step"]
        assert len(steps) > 5


def test_the_file_comes_beside_a_trace(daemon: Daemon, program: Program) -> None:
    stub = daemon.stub()
    capture = watch_to_end(stub, create(stub, program.pid, "execution_trace", "python_function"))
    assert [file.format for file in capture.targets[0].files] == ["chrome", "execution-trace"]
    assert execution_trace(stub, capture)["nodes"]
    assert json.loads(gzip.decompress(fetch(stub, capture.id, "chrome")))["traceEvents"]


def test_it_is_not_recorded_unless_it_is_named(daemon: Daemon, program: Program) -> None:
    stub = daemon.stub()
    capture = watch_to_end(stub, create(stub, program.pid))
    assert [file.format for file in capture.targets[0].files] == ["chrome"]


def test_a_program_that_uses_the_observer_itself_is_left_alone(daemon: Daemon, program: Program, tmp_path: Any) -> None:
    stub = daemon.stub()
    own = tmp_path / "own.json"
    assert ask(program, f"own {own}") == "own runs"
    capture = watch_to_end(stub, create(stub, program.pid, "execution_trace"))
    assert verdict(capture)[:2] == ("VERDICT_FAILED", "USER_OBSERVER_ACTIVE")
    assert ask(program, "stop own") == "own ended"
    assert json.loads(own.read_text())["nodes"]
    again = watch_to_end(stub, create(stub, program.pid, "execution_trace"))
    assert verdict(again)[0] == "VERDICT_DONE"


def test_ours_ends_when_the_program_registers_its_own(daemon: Daemon, program: Program, tmp_path: Any) -> None:
    stub = daemon.stub()
    own = tmp_path / "own.json"
    capture_id = create(stub, program.pid, "execution_trace", duration_ns=3_000_000_000)
    until_collecting(stub, capture_id)
    assert ask(program, f"own {own}") == "own runs"
    capture = watch_to_end(stub, capture_id)
    assert verdict(capture)[:2] == ("VERDICT_DONE", "")
    assert "registered an ExecutionTraceObserver of its own" in capture.targets[0].warnings[0]
    assert execution_trace(stub, capture)["nodes"]
    assert ask(program, "stop own") == "own ended"
    assert json.loads(own.read_text())["nodes"]


def test_a_forked_child_neither_hangs_nor_writes_into_the_file(daemon: Daemon, program: Program) -> None:
    stub = daemon.stub()
    capture_id = create(stub, program.pid, "execution_trace", duration_ns=3_000_000_000)
    until_collecting(stub, capture_id)
    assert ask(program, "fork") == "child 0"
    capture = watch_to_end(stub, capture_id)
    assert verdict(capture)[0] == "VERDICT_DONE"
    assert len({node["id"] for node in execution_trace(stub, capture)["nodes"]}) > 10


def test_a_process_that_dies_leaves_a_cut_file_and_a_verdict_that_says_so(daemon: Daemon) -> None:
    stub = daemon.stub()
    with connected(daemon, TARGET, quiet=True) as started:
        capture_id = create(stub, started.pid, "execution_trace", duration_ns=60_000_000_000)
        events = stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=30)
        next(event for event in events if any(each.records for each in event.target.counts))
        events.cancel()
        started.kill()
        name, code, reason = verdict(watch_to_end(stub, capture_id))
        assert (name, code) == ("VERDICT_PARTIAL", "TARGET_EXITED")
        assert "the execution-trace file is not whole" in reason
