"""Clients of Dynolog at a real daemon: who may do what, what they are told, where their traces appear."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent
from support.dynolog import client, recorded
from support.dynolog.door import audited, door_of, noted_file, open_door, trace_request
from support.service import subjects
from support.service.calls_as import plain_python
from support.service.daemon import Daemon
from support.waiting import scaled, until

ADA, BOB = 61001, 61002
ME = os.getpid()
NONE = {
    "processesMatched": [], "activityProfilersTriggered": [], "activityProfilersBusy": 0,
    "eventProfilersTriggered": [], "eventProfilersBusy": 0,
}  # fmt: skip
CAPTURE = ("collect", "record 20", "state PROCESS", "result")
only_root = pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")


@pytest.fixture(scope="module")
def daemon(logs: Path) -> Iterator[Daemon]:
    """Knows processes with agents only: not those of other tests, which have torch loaded."""
    with open_door("--no-attach", log_roots=str(logs)) as started:
        yield started


def test_each_command_of_dyno_is_answered_as_dynolog_answers_it(door: str) -> None:
    assert client.asked(door, recorded.STATUS) == {"status": 1}
    assert client.asked(door, recorded.VERSION)["version"]
    assert client.asked(door, recorded.PAUSE)["status"] is False
    assert client.asked(door, recorded.RESUME)["status"] is False
    assert client.asked(door, recorded.ITERATIONS) == NONE
    assert client.asked(door, recorded.JOB) == NONE


@pytest.mark.parametrize(
    "sent", [recorded.QUOTE, b"\4\0\0\0null", client.framed({"fn": "getThing"}), client.framed({"a": 1})]
)
def test_what_dynolog_does_not_understand_gets_no_answer(door: str, sent: bytes) -> None:
    assert client.asked(door, sent) is None


def test_a_process_is_traced_once_and_busy_meanwhile_and_its_file_appears(
    daemon: Daemon, door: str, agent: ScriptedAgent, place: Path
) -> None:
    request = trace_request(place / "t.json", pids=[ME])
    told = client.asked(door, request)
    assert told["processesMatched"] == told["activityProfilersTriggered"] == [ME]
    assert client.asked(door, request) == {**NONE, "activityProfilersBusy": 1}
    start = agent.capture()
    assert (start.duration_ns, start.options) == (200_000_000, {"with_stack": True})
    assert noted_file(daemon, place / f"t_{ME}.json")["decision"] == "written"
    assert json.loads((place / f"t_{ME}.json").read_bytes())["traceEvents"]
    capture = daemon.stub().GetCapture(pb.GetCaptureRequest(id=told["kinetod"]["capture"]), timeout=scaled(10))
    assert (capture.status, capture.spec.labels["dynolog.log_file"]) == (pb.CAPTURE_STATUS_DONE, f"{place}/t.json")
    line = next(line for line in audited(daemon, "CreateCapture") if line.get("capture") == capture.id)
    assert (line["via"], line["uid"], line["selector"]) == ("dynolog", os.getuid(), {"pids": [ME], "children": True})


@pytest.mark.slow
def test_fifty_requests_in_a_row_leave_fifty_traces(
    daemon: Daemon, door: str, agent: ScriptedAgent, place: Path
) -> None:
    for number in range(50):
        told = client.asked(door, trace_request(place / f"t{number}.json", pids=[ME]))
        assert told["activityProfilersTriggered"] == [ME], told
        agent.capture(samples=5)

        def is_free() -> bool:
            return not daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).captures_running

        until(is_free, "the capture has ended")
    for number in range(50):
        assert noted_file(daemon, place / f"t{number}_{ME}.json")["decision"] == "written"


def test_a_job_id_means_its_processes_and_no_pid_those_without_a_job(daemon: Daemon, door: str) -> None:
    with ScriptedAgent(daemon.agent_socket, job_id="77") as agent:
        agent.hello()
        assert client.asked(door, trace_request(job_id=78)) == NONE
        assert client.asked(door, trace_request()) == NONE
        assert client.asked(door, trace_request(job_id=77, pids=[0]))["processesMatched"] == [ME]
        agent.capture()


def test_as_many_processes_are_traced_as_the_limit_says(daemon: Daemon, door: str) -> None:
    agents = [RemoteAgent(daemon.agent_socket) for _ in range(3)]
    try:
        for each in agents:
            each.do("hello")
        pids = sorted(each.pid for each in agents)
        told = client.asked(door, trace_request(pids=pids, process_limit=2))
        assert told["processesMatched"] == pids[:2]
        assert told["kinetod"]["notes"] == ["1 more process matches, beyond process_limit (--process-limit)"]
        rest = client.asked(door, trace_request(pids=pids, process_limit=2))
        assert (rest["processesMatched"], rest["activityProfilersBusy"]) == (pids[2:], 2)
    finally:
        for each in agents:
            each.kill()


def test_a_process_that_cannot_be_traced_is_told_apart_and_the_others_are_traced() -> None:
    with open_door() as attaching, RemoteAgent(attaching.agent_socket) as agent, subjects.stopped() as stopped:
        agent.do("hello")
        told = client.asked(door_of(attaching), trace_request(pids=[agent.pid, stopped]))
        assert told["processesMatched"] == [agent.pid], told
        (refused,) = told["kinetod"]["refused"]
        assert (refused["pid"], refused["reason"]) == (stopped, "ATTACH_UNSUITABLE")


def test_a_wrong_configuration_is_refused_with_the_reason(daemon: Daemon, door: str, agent: ScriptedAgent) -> None:
    told = client.asked(door, trace_request(pids=[ME], more="ACTIVITIES_ITERATIONS=many"))
    assert told["processesMatched"] == []
    assert told["kinetod"]["reason"] == "INVALID_FIELD"
    assert told["status"].startswith("failed: config: line 4: ACTIVITIES_ITERATIONS: expected a whole number")
    assert audited(daemon, "CreateCapture")[-1]["decision"] == "refused"
    told = client.asked(door, {"fn": "setKinetOnDemandRequest", "config": ""})
    assert told == {**NONE, "status": "failed with exception = pids is missing"}


def test_a_file_elsewhere_is_refused_at_once_and_the_trace_is_in_the_store(
    daemon: Daemon, door: str, agent: ScriptedAgent
) -> None:
    told = client.asked(door, trace_request("/elsewhere/t.json", pids=[ME]))
    assert told["kinetod"]["log_file"] == "not written: /elsewhere is not inside any folder of dynolog.log_roots"
    agent.capture()
    why = "its traces are kept only in the store: /elsewhere is not inside"
    assert f"{told['kinetod']['capture']}: {why}" in daemon.log()


@only_root
def test_a_user_traces_that_users_processes_and_gets_that_users_file(daemon: Daemon, door: str, place: Path) -> None:
    os.chown(place, ADA, ADA)
    remote = RemoteAgent(daemon.agent_socket, python=plain_python(ADA))
    try:
        remote.do("hello")
        request = trace_request(place / "t.json", pids=[remote.pid])
        assert client.asked_as(BOB, door, request) == NONE
        told = client.asked_as(ADA, door, request)
        assert told["processesMatched"] == [remote.pid], told
        remote.do(*CAPTURE)
        line = noted_file(daemon, place / f"t_{remote.pid}.json")
        assert (line["decision"], line["target_uid"]) == ("written", ADA), line
        status = (place / f"t_{remote.pid}.json").stat()
        assert (status.st_uid, status.st_mode & 0o777) == (ADA, 0o644)
        capture = daemon.stub().GetCapture(pb.GetCaptureRequest(id=told["kinetod"]["capture"]), timeout=scaled(10))
        assert capture.owner_uid == ADA
    finally:
        remote.kill()


@only_root
def test_what_root_asks_for_is_written_as_the_user_of_the_process(daemon: Daemon, door: str, place: Path) -> None:
    os.chown(place, ADA, ADA)
    remote = RemoteAgent(daemon.agent_socket, python=plain_python(ADA))
    try:
        remote.do("hello")
        assert client.asked(door, trace_request(place / "t.json", pids=[remote.pid]))["processesMatched"]
        remote.do(*CAPTURE)
        line = noted_file(daemon, place / f"t_{remote.pid}.json")
        assert (line["decision"], line["owner_uid"], line["target_uid"]) == ("written", 0, ADA)
    finally:
        remote.kill()


@only_root
def test_a_users_own_daemon_serves_that_user_and_root_alone() -> None:
    with open_door(uid=ADA) as own:
        door = door_of(own)
        assert client.asked_as(ADA, door, recorded.STATUS) == {"status": 1}
        assert client.asked(door, recorded.STATUS) == {"status": 1}
        assert client.asked_as(BOB, door, recorded.STATUS) is None
        remote = RemoteAgent(own.agent_socket, python=plain_python(ADA))
        try:
            remote.do("hello")
            told = client.asked(door, trace_request("/tmp/t.json", pids=[remote.pid]))
            assert told["kinetod"]["log_file"] == "not written: /tmp is not inside any folder of dynolog.log_roots"
        finally:
            remote.kill()


def test_a_setting_refuses_all_tracing() -> None:
    with open_door("--no-attach", tracing="refuse") as refusing, ScriptedAgent(refusing.agent_socket) as agent:
        agent.hello()
        told = client.asked(door_of(refusing), trace_request(pids=[ME]))
        assert (told["processesMatched"], told["kinetod"]["reason"]) == ([], "TRACING_REFUSED")


def test_a_unix_socket_is_served(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("d") / "s"
    with open_door(rpc=f"unix:{path}") as started:
        assert door_of(started) == f"unix:{path}"
        assert client.asked(f"unix:{path}", recorded.STATUS) == {"status": 1}


def test_the_next_daemon_writes_the_file_of_a_capture_that_this_one_did_not_end(place: Path) -> None:
    with open_door("--no-attach", log_roots=str(place)) as first, ScriptedAgent(first.agent_socket) as agent:
        agent.hello()
        assert client.asked(door_of(first), trace_request(place / "t.json", pids=[ME]))["processesMatched"] == [ME]
        agent.collect()
        agent.record(20)
        until(lambda: list((first.state_dir / "dynolog").glob("*.json")), "the promise is on the disk")
        raw = first.state_dir / "captures"
        until(lambda: any(path.stat().st_size for path in raw.rglob("buffers.bin")), "records are on the disk")
        first.kill()
        first.start()
        line = noted_file(first, place / f"t_{ME}.json")
        assert line["decision"] == "written", line["problem"]
        assert json.loads((place / f"t_{ME}.json").read_bytes())["traceEvents"]


def test_a_door_whose_port_is_taken_says_so_and_opens_when_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with open_door(rpc=f"127.0.0.1:{port}") as started:
            stub = started.stub()

            def check() -> pb.Check:
                found = stub.DiagnoseHost(pb.DiagnoseHostRequest(), timeout=scaled(60)).checks
                only: pb.Check
                (only,) = [each for each in found if each.name == "dynolog_door"]
                return only

            closed = check()
            assert closed.status == pb.CHECK_STATUS_PROBLEM
            assert f"`dyno` is not served: 127.0.0.1:{port} is in use by process {ME}" in closed.detail
            taken.close()
            assert door_of(started) == f"127.0.0.1:{port}"
            assert client.asked(f"127.0.0.1:{port}", recorded.STATUS) == {"status": 1}
            assert check().status == pb.CHECK_STATUS_OK
