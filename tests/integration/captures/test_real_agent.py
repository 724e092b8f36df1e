"""The real agent in real Python processes, traced by pid through a real daemon."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.targets.programs import LISTEN, Program, connected, ready_pids, tell
from support.waiting import scaled, until

SECOND_NS = 10**9
# Says "ready" once, works until its standard input ends or a line tells it to do something else.
TARGET = f"""
import kineto_agent
kineto_agent.start()
{LISTEN}
def train_step():
    return sum(range(2000))
print("ready", flush=True)
while True:
    train_step()
    if commands:
        command = commands.pop(0)
        if command == "fork" and os.fork() == 0:
            os._exit(0)
        if command == "end":
            break
"""


@contextmanager
def target(daemon: Daemon) -> Iterator[Program]:
    """A process with the agent, connected."""
    with connected(daemon, TARGET) as process:
        yield process


def create(stub: ProfilerStub, pid: int, duration_ns: int) -> str:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=duration_ns)
    capture_id: str = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10)).id
    return capture_id


def until_records(stub: ProfilerStub, capture_id: str) -> None:
    events = stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=scaled(30))
    next(event for event in events if any(each.records for each in event.target.counts))
    events.cancel()


def test_a_running_process_is_traced_by_pid(daemon: Daemon) -> None:
    stub = daemon.stub()
    with target(daemon) as process:
        capture = watch_to_end(stub, create(stub, process.pid, SECOND_NS))
        (traced,) = capture.targets
        assert (pb.Verdict.Name(traced.verdict), traced.reason) == ("VERDICT_DONE", "")
        chunks = stub.FetchTrace(pb.FetchTraceRequest(capture_id=capture.id), timeout=scaled(10))
        trace = json.loads(gzip.decompress(b"".join(chunk.data for chunk in chunks)))
        assert any("train_step" in event.get("name", "") for event in trace["traceEvents"])
        # and again: the agent is free once more
        again = watch_to_end(stub, create(stub, process.pid, SECOND_NS // 10))
        assert again.status == pb.CAPTURE_STATUS_DONE


def test_a_target_that_is_killed_leaves_a_partial_trace(daemon: Daemon) -> None:
    stub = daemon.stub()
    with target(daemon) as process:
        capture_id = create(stub, process.pid, 60 * SECOND_NS)
        until_records(stub, capture_id)
        process.kill()  # not waited for: of a process that is gone, not every kernel tells how it ended
        (traced,) = watch_to_end(stub, capture_id).targets
    assert (traced.verdict, traced.reason_code) == (pb.VERDICT_PARTIAL, "TARGET_EXITED")
    assert traced.reason.endswith("it was killed by SIGKILL")
    assert len(traced.files) == 1


def test_a_target_that_exits_normally_leaves_a_partial_trace(daemon: Daemon) -> None:
    stub = daemon.stub()
    with target(daemon) as process:
        capture_id = create(stub, process.pid, 60 * SECOND_NS)
        until_records(stub, capture_id)
        tell(process, "end")
        (traced,) = watch_to_end(stub, capture_id).targets
        assert process.wait(scaled(10)) == 0
    assert (traced.verdict, traced.reason_code) == (pb.VERDICT_PARTIAL, "TARGET_EXITED")
    assert len(traced.files) == 1


@pytest.mark.slow
def test_a_target_that_forks_is_traced_to_the_end(daemon: Daemon) -> None:
    stub = daemon.stub()
    with target(daemon) as process:
        capture_id = create(stub, process.pid, SECOND_NS)
        until_records(stub, capture_id)
        tell(process, "fork")
        (traced,) = watch_to_end(stub, capture_id).targets
        assert traced.verdict == pb.VERDICT_DONE
        assert ready_pids(stub) == {process.pid}


@pytest.mark.slow
def test_the_agent_comes_back_to_a_daemon_that_was_killed_mid_capture() -> None:
    with running_daemon() as daemon, target(daemon) as process:
        capture_id = create(daemon.stub(), process.pid, 60 * SECOND_NS)
        until_records(daemon.stub(), capture_id)
        daemon.kill()
        daemon.start()
        stub = daemon.stub()
        (traced,) = watch_to_end(stub, capture_id).targets
        assert (traced.verdict, traced.reason_code) == (pb.VERDICT_PARTIAL, "DAEMON_RESTARTED")
        until(lambda: process.pid in ready_pids(stub), "the agent is back")
        assert watch_to_end(stub, create(stub, process.pid, SECOND_NS // 10)).status == pb.CAPTURE_STATUS_DONE
