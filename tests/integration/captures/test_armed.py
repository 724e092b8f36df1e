"""Captures that are armed first and started later, and the clock by which they are."""

import json
import os
import time
from typing import Any

import grpc
import pytest
from kineto_agent.protocol import wire
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent
from support.service.daemon import Daemon, error_of, running_daemon, watch_to_end
from support.waiting import scaled

SECOND_NS = 10**9
MINUTE_NS = 60 * SECOND_NS
OWN = pb.Selector(pids=[os.getpid()])
CLOCK = pb.ClockOffset(offset_ns=-1_500_000, uncertainty_ns=40_000)


def arm(stub: ProfilerStub, **fields: Any) -> pb.Capture:
    if "iterations" not in fields:
        fields.setdefault("duration_ns", SECOND_NS)
    spec = pb.CaptureSpec(**{"selector": OWN, "arm_ns": MINUTE_NS, **fields})
    capture: pb.Capture = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
    return capture


def start(stub: ProfilerStub, capture_id: str, **fields: Any) -> pb.Capture:
    capture: pb.Capture = stub.StartCapture(pb.StartCaptureRequest(id=capture_id, **fields), timeout=scaled(10))
    return capture


def refusal(stub: ProfilerStub, capture_id: str, **fields: Any) -> tuple[grpc.StatusCode, str, str]:
    return error_of(lambda: start(stub, capture_id, **fields))


def only_target(capture: pb.Capture) -> pb.Target:
    (target,) = capture.targets
    return target


def test_an_armed_capture_asks_nothing_of_its_agent_until_it_is_started(
    stub: ProfilerStub, agent: ScriptedAgent
) -> None:
    before_ns = time.time_ns()
    armed = arm(stub)
    assert before_ns + MINUTE_NS <= armed.armed_until_ns <= time.time_ns() + MINUTE_NS
    assert (armed.status, only_target(armed).state) == (pb.CAPTURE_STATUS_RUNNING, pb.TARGET_STATE_PENDING)
    assert error_of(lambda: arm(stub))[1] == "BUSY"
    agent.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        agent.sock.recv(1)
    agent.sock.settimeout(scaled(20))
    begin_ns = time.time_ns() + 5 * SECOND_NS
    started = start(stub, armed.id, start_time_ns=begin_ns)
    assert (started.id, started.armed_until_ns) == (armed.id, 0)
    request = agent.capture()
    assert (request.start_time_ns, request.duration_ns) == (begin_ns, SECOND_NS)
    assert watch_to_end(stub, armed.id).status == pb.CAPTURE_STATUS_DONE


def test_a_watcher_sees_that_a_capture_was_armed_and_that_it_has_begun(
    stub: ProfilerStub, agent: ScriptedAgent
) -> None:
    armed = arm(stub)
    events = stub.WatchCapture(pb.WatchCaptureRequest(id=armed.id), timeout=scaled(20))
    assert next(events).snapshot.armed_until_ns == armed.armed_until_ns
    start(stub, armed.id, clock=CLOCK)
    begun = next(events).snapshot
    assert (begun.armed_until_ns, begun.clock) == (0, CLOCK)
    agent.capture()
    *_, last = events
    assert last.snapshot.status == pb.CAPTURE_STATUS_DONE


def test_the_clock_of_the_start_is_kept_with_the_capture_and_its_traces(
    daemon: Daemon, stub: ProfilerStub, agent: ScriptedAgent
) -> None:
    armed = arm(stub, formats=["chrome-json"])
    start(stub, armed.id, clock=CLOCK)
    agent.capture()
    ended = watch_to_end(stub, armed.id)
    assert ended.clock == CLOCK
    stored = stub.GetCapture(pb.GetCaptureRequest(id=armed.id), timeout=scaled(10))
    stored.ClearField("answer")  # comes after the end
    assert stored == ended
    (path,) = (daemon.state_dir / "captures" / armed.id).rglob("target.json")
    info = json.loads(path.read_bytes())
    assert (info["clock_offset_ns"], info["clock_uncertainty_ns"]) == (CLOCK.offset_ns, CLOCK.uncertainty_ns)
    chunks = stub.FetchTrace(pb.FetchTraceRequest(capture_id=armed.id), timeout=scaled(10))
    trace = json.loads(b"".join(chunk.data for chunk in chunks))
    assert str(CLOCK.offset_ns) in json.dumps({key: trace[key] for key in trace if key != "traceEvents"})


def test_the_same_start_again_is_the_same_also_when_all_is_over(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    armed = arm(stub)
    start(stub, armed.id, clock=CLOCK)
    assert start(stub, armed.id, clock=CLOCK).id == armed.id
    code, reason, message = refusal(stub, armed.id)
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CAPTURE_STARTED")
    assert armed.id in message
    agent.capture()
    ended = watch_to_end(stub, armed.id)
    assert start(stub, armed.id, clock=CLOCK) == ended
    assert refusal(stub, armed.id)[1] == "CAPTURE_STARTED"


def test_each_process_of_a_capture_by_iteration_gets_its_own_first_one(
    stub: ProfilerStub, agent: ScriptedAgent, daemon: Daemon
) -> None:
    with RemoteAgent(daemon.agent_socket) as other:
        other.do("hello")
        window = pb.IterationWindow(count=3, roundup=10)
        armed = arm(stub, selector=pb.Selector(pids=[os.getpid(), other.pid]), iterations=window)
        start(stub, armed.id, iterations=[pb.IterationStart(pid=os.getpid(), start=120, warmup=4)])
        request = agent.await_start()
        assert (request.start_iteration, request.warmup_iterations, request.iteration_roundup) == (120, 4, 10)
        other.do("await_start")
        assert (request.iterations, request.start_time_ns) == (3, 0)
        # Kept: a call that nobody holds any more is cancelled.
        cancelling = stub.CancelCapture.future(pb.CancelCaptureRequest(id=armed.id), timeout=scaled(20))
        agent.cancelled(armed.id, keep=False)
    cancelling.result()
    assert only_of(watch_to_end(stub, armed.id), os.getpid()).verdict == pb.VERDICT_CANCELLED


def only_of(capture: pb.Capture, pid: int) -> pb.Target:
    (target,) = (each for each in capture.targets if each.pid == pid)
    return target


def test_without_agreed_iterations_the_daemon_aligns_its_processes_itself(
    stub: ProfilerStub, agent: ScriptedAgent, daemon: Daemon
) -> None:
    with RemoteAgent(daemon.agent_socket) as other:
        other.do("hello")
        armed = arm(stub, selector=pb.Selector(pids=[os.getpid(), other.pid]), iterations=pb.IterationWindow(count=3))
        start(stub, armed.id)
        assert agent.expect(wire.Describe) == wire.Describe()
        stub.CancelCapture(pb.CancelCaptureRequest(id=armed.id), timeout=scaled(20))


def test_what_nobody_starts_in_time_is_cancelled(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    armed = arm(stub, arm_ns=SECOND_NS // 20)
    ended = watch_to_end(stub, armed.id)
    target = only_target(ended)
    assert (ended.status, ended.armed_until_ns) == (pb.CAPTURE_STATUS_CANCELLED, 0)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_CANCELLED, "NOT_STARTED")
    assert "within 50 ms" in target.reason
    code, reason, message = refusal(stub, armed.id)
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CAPTURE_NOT_ARMED")
    assert target.reason in message
    again = arm(stub)  # the process is free
    start(stub, again.id)
    agent.capture()
    assert watch_to_end(stub, again.id).status == pb.CAPTURE_STATUS_DONE


@pytest.mark.parametrize("keep_partial", [False, True])
def test_an_armed_capture_can_be_cancelled(stub: ProfilerStub, agent: ScriptedAgent, keep_partial: bool) -> None:
    armed = arm(stub)
    cancelled = stub.CancelCapture(pb.CancelCaptureRequest(id=armed.id, keep_partial=keep_partial), timeout=scaled(20))
    assert (cancelled.status, cancelled.armed_until_ns) == (pb.CAPTURE_STATUS_CANCELLED, 0)
    assert only_target(cancelled).reason_code == "CANCELLED"
    assert refusal(stub, armed.id)[1] == "CAPTURE_NOT_ARMED"


def test_a_process_that_dies_while_armed_has_its_verdict_at_once(daemon: Daemon, stub: ProfilerStub) -> None:
    with RemoteAgent(daemon.agent_socket) as dying, RemoteAgent(daemon.agent_socket) as living:
        dying.do("hello")
        living.do("hello")
        armed = arm(stub, selector=pb.Selector(pids=[dying.pid, living.pid]))
        events = stub.WatchCapture(pb.WatchCaptureRequest(id=armed.id), timeout=scaled(20))
        next(events)
        dying.kill()
        target = next(event.target for event in events if event.target.verdict)
        assert (target.pid, target.verdict, target.reason_code) == (dying.pid, pb.VERDICT_FAILED, "TARGET_EXITED")
        assert target.reason.startswith(f"process {dying.pid} ended before the capture was started")
        start(stub, armed.id)
        living.do("capture")
        assert watch_to_end(stub, armed.id).status == pb.CAPTURE_STATUS_PARTIAL


def test_a_capture_without_processes_that_could_begin_is_not_armed(daemon: Daemon, stub: ProfilerStub) -> None:
    with RemoteAgent(daemon.agent_socket) as dying:
        dying.do("hello")
        armed = arm(stub, selector=pb.Selector(pids=[dying.pid]))
        dying.kill()
        ended = watch_to_end(stub, armed.id)
    assert (ended.status, ended.armed_until_ns) == (pb.CAPTURE_STATUS_FAILED, 0)
    assert refusal(stub, armed.id)[1:] == (
        "CAPTURE_NOT_ARMED",
        f"capture {armed.id} is not waiting to be started: {only_target(ended).reason}",
    )


@pytest.mark.slow
def test_a_daemon_that_ends_while_a_capture_is_armed_leaves_a_true_verdict() -> None:
    with running_daemon() as daemon:
        for end, code in ((daemon.kill, "DAEMON_RESTARTED"), (daemon.stop, "DAEMON_STOPPED")):
            with RemoteAgent(daemon.agent_socket) as process:
                process.do("hello")
                armed = arm(daemon.stub(), selector=pb.Selector(pids=[process.pid]))
                end()
            daemon.start()
            target = only_target(watch_to_end(daemon.stub(), armed.id))
            assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, code)
            assert target.reason.endswith("while the capture was waiting to be started")
            assert refusal(daemon.stub(), armed.id)[1] == "CAPTURE_NOT_ARMED"


def test_a_capture_that_began_at_once_cannot_be_started(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = arm(stub, arm_ns=0)
    assert created.armed_until_ns == 0
    _, reason, message = refusal(stub, created.id)
    assert (reason, "without arm_ns" in message) == ("CAPTURE_NOT_ARMED", True)
    agent.capture()
    watch_to_end(stub, created.id)
    assert refusal(stub, created.id)[1] == "CAPTURE_NOT_ARMED"
    assert refusal(stub, "20200101-000000-000-000000")[:2] == (grpc.StatusCode.NOT_FOUND, "NO_SUCH_CAPTURE")


def test_the_clock_is_that_of_the_host(stub: ProfilerStub) -> None:
    before_ns = time.time_ns()
    clock = stub.GetClock(pb.GetClockRequest(), timeout=scaled(10))
    assert before_ns <= clock.received_ns <= clock.sent_ns <= time.time_ns()
