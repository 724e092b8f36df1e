"""Calls that need no capture: who is asked what, and how refusals look."""

import os
import subprocess
import sys
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kineto_agent.protocol import wire
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import ScriptedAgent, hello_message
from support.service.daemon import Daemon, DaemonFailed, error_of, free_address, running_daemon
from support.waiting import scaled, until

SECOND_NS = 10**9
DAY_NS = 86_400 * SECOND_NS
OWN = pb.Selector(pids=[os.getpid()])


def refused(stub: ProfilerStub, spec: pb.CaptureSpec, key: str = "") -> tuple[grpc.StatusCode, str, str]:
    return error_of(
        lambda: stub.CreateCapture(pb.CreateCaptureRequest(spec=spec, idempotency_key=key), timeout=scaled(10))
    )


def test_the_host_says_where_its_store_is_and_what_it_allows(daemon: Daemon, stub: ProfilerStub) -> None:
    host = stub.GetHost(pb.GetHostRequest(), timeout=scaled(10))
    assert host.version == "0.1.0"
    assert host.store_path == str(daemon.state_dir)
    assert host.agent_socket == str(daemon.agent_socket)
    assert host.store_free_bytes > 0
    assert host.max_duration_ns == 600 * SECOND_NS
    assert host.default_buffer_limit_bytes == 128 << 20
    assert host.gpus or host.gpu_note
    assert 0 < host.started_ns < host.now_ns


@pytest.mark.parametrize("service", ["", "kineto.v1.Profiler"])
def test_the_health_service_says_serving(daemon: Daemon, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(daemon.channel())
    request = health_pb2.HealthCheckRequest(service=service)
    answer = stub.Check(request, timeout=10)  # type: ignore[attr-defined]  # the stubs leave methods out
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service(daemon: Daemon) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(daemon.channel())
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)  # type: ignore[operator]  # likewise
    assert {service.name for service in answer.list_services_response.service} == {
        "kineto.v1.Profiler",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (pb.CaptureSpec(selector=OWN), "spec"),
        (pb.CaptureSpec(selector=OWN, duration_ns=0), "spec.duration_ns"),
        (pb.CaptureSpec(selector=OWN, duration_ns=-SECOND_NS), "spec.duration_ns"),
        (pb.CaptureSpec(selector=OWN, duration_ns=7 * DAY_NS), "spec.duration_ns"),
        (pb.CaptureSpec(selector=OWN, iterations=pb.IterationWindow(count=0)), "spec.iterations.count"),
        (pb.CaptureSpec(selector=OWN, duration_ns=1, formats=["pdf"]), "spec.formats[0]"),
        (pb.CaptureSpec(selector=pb.Selector(pids=[-4]), duration_ns=1), "spec.selector.pids[0]"),
    ],
)
def test_a_wrong_field_is_named(stub: ProfilerStub, spec: pb.CaptureSpec, field: str) -> None:
    code, reason, message = refused(stub, spec)
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert message.startswith(f"{field}: ")


def test_a_pid_that_does_not_exist_is_named(stub: ProfilerStub) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    code, reason, message = refused(stub, pb.CaptureSpec(selector=pb.Selector(pids=[child.pid]), duration_ns=1))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "NO_SUCH_PROCESS")
    assert message == f"there is no process {child.pid} on this host"


def test_a_process_without_agent_is_refused_with_advice(stub: ProfilerStub) -> None:
    code, reason, message = refused(stub, pb.CaptureSpec(selector=OWN, duration_ns=1, no_attach=True))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_AGENT")
    for way in ("--no-attach", "kinetoctl run --", "KINETO_AGENT=1", "python -m kineto_agent", "kineto_agent.start()"):
        assert way in message


def test_a_selector_without_match_is_not_found(stub: ProfilerStub) -> None:
    code, reason, message = refused(
        stub, pb.CaptureSpec(selector=pb.Selector(command_regex="no such thing"), duration_ns=1)
    )
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "NO_MATCH")
    assert "command matching 'no such thing'" in message


def test_one_bad_pid_fails_the_whole_request(daemon: Daemon, stub: ProfilerStub) -> None:
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        selector = pb.Selector(pids=[os.getpid(), 1])
        code, reason, _ = refused(stub, pb.CaptureSpec(selector=selector, duration_ns=1, no_attach=True))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_AGENT")
        assert not stub.ListCaptures(pb.ListCapturesRequest(), timeout=scaled(10)).captures


@pytest.mark.parametrize(
    "call",
    ["GetCapture", "WatchCapture", "CancelCapture", "DeleteCapture"],
)
def test_an_unknown_capture_is_not_found(stub: ProfilerStub, call: str) -> None:
    request = getattr(pb, f"{call}Request")(id="../../etc")
    code, reason, _ = error_of(lambda: getattr(stub, call)(request, timeout=10))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "NO_SUCH_CAPTURE")


def test_a_foreign_page_token_is_refused(stub: ProfilerStub) -> None:
    code, reason, _ = error_of(lambda: stub.ListCaptures(pb.ListCapturesRequest(page_token="???"), timeout=scaled(10)))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


def test_a_connected_agent_is_listed_with_fresh_data(daemon: Daemon, stub: ProfilerStub) -> None:
    with ScriptedAgent(daemon.agent_socket, rank=3, world_size=8, iterations=5) as agent:
        agent.hello()
        listing = stub.ListProcesses.future(pb.ListProcessesRequest(), timeout=scaled(10))
        agent.expect(wire.Describe)
        agent.send(hello_message(rank=3, world_size=8, iterations=6))
        listing.result()  # it waits half a second at most
        (process,) = until(
            lambda: [
                each
                for each in stub.ListProcesses(pb.ListProcessesRequest(), timeout=scaled(10)).processes
                if each.iterations == 6
            ],
            "what it has said is listed",
        )
    assert process.pid == os.getpid()
    assert process.uid == os.getuid()
    assert (process.rank, process.world_size, process.iterations) == (3, 8, 6)
    assert process.agent_state == pb.AGENT_STATE_READY
    assert process.framework == "torch 2.11.0"
    assert list(process.activity_types) == ["python_function"]
    assert process.start_time_ns > 0


def test_an_agent_that_does_not_describe_itself_is_listed_with_what_it_said(daemon: Daemon, stub: ProfilerStub) -> None:
    with ScriptedAgent(daemon.agent_socket, rank=1) as agent:
        agent.hello()
        (process,) = stub.ListProcesses(pb.ListProcessesRequest(), timeout=scaled(10)).processes
    assert process.rank == 1


def test_python_processes_without_agent_are_listed_on_request(daemon: Daemon, stub: ProfilerStub) -> None:
    request = pb.ListProcessesRequest(include_without_agent=True)
    (process,) = (each for each in stub.ListProcesses(request, timeout=10).processes if each.pid == os.getpid())
    assert process.agent_state == pb.AGENT_STATE_NONE
    listed = {each.pid for each in stub.ListProcesses(request, timeout=10).processes}
    assert not listed & {daemon.pid, *(worker.pid for worker in psutil.Process(daemon.pid).children())}


def test_an_agent_of_another_version_is_shown_and_refused(daemon: Daemon, stub: ProfilerStub) -> None:
    with ScriptedAgent(daemon.agent_socket) as agent:
        frame = bytearray(wire.encode(hello_message()))
        frame[4:6] = (wire.PROTOCOL_VERSION + 1).to_bytes(2, "little")
        agent.send_raw(bytes(frame))
        assert "speaks protocol version 1, not 2" in agent.expect(wire.Refuse).reason
        (process,) = stub.ListProcesses(pb.ListProcessesRequest(), timeout=scaled(10)).processes
        assert process.agent_state == pb.AGENT_STATE_INCOMPATIBLE
        code, reason, message = refused(stub, pb.CaptureSpec(selector=OWN, duration_ns=1))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "AGENT_INCOMPATIBLE")
    assert "version 2" in message


@pytest.mark.slow
def test_a_loopback_port_serves_too_and_belongs_to_one_daemon() -> None:
    address = free_address()
    allowed = {"KINETOD_ACCESS_LOOPBACK_WITHOUT_TLS": "true"}
    with running_daemon("--listen", address, environ=allowed) as first:
        with grpc.insecure_channel(address) as channel:
            host = ProfilerStub(channel).GetHost(pb.GetHostRequest(), timeout=scaled(10))
        assert host.store_path == str(first.state_dir)
        with (
            pytest.raises(DaemonFailed, match="cannot listen on"),
            running_daemon("--listen", address, environ=allowed),
        ):
            pass


def test_a_network_address_is_refused_at_the_start() -> None:
    with pytest.raises(DaemonFailed, match="is not a loopback address"), running_daemon("--listen", "0.0.0.0:1"):
        pass


@pytest.mark.slow
def test_sockets_that_a_killed_daemon_left_are_replaced() -> None:
    with running_daemon() as daemon:
        daemon.kill()
        assert daemon.agent_socket.exists()
        daemon.start()
        assert daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).agents == 0
        assert daemon.stop() == 0
        assert not daemon.agent_socket.exists()
        assert not daemon.rpc_socket.exists()
        daemon.start()


@pytest.mark.parametrize("name", ["GetHost", "GetCapture", "WatchHost", "FetchTrace"])
def test_bytes_that_are_no_message_are_refused_as_a_wrong_field_without_a_traceback(daemon: Daemon, name: str) -> None:
    call: Any = daemon.channel().unary_stream(f"/kineto.v1.Profiler/{name}")
    code, reason, message = error_of(lambda: call(b"\xff\xff\xff", timeout=10))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert message.startswith("request: it is not a valid message for this method")
    assert "Traceback" not in daemon.log()
    audited = [line for line in daemon.log().splitlines() if "kinetod.audit" in line][-1]
    assert f'"call":"{name}","decision":"refused"' in audited and '"reason":"INVALID_FIELD"' in audited
