"""DiagnoseProcess and `kinetoctl doctor` with a real daemon and real processes."""

import os
import signal

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service import subjects
from support.service.cli import run_process
from support.service.daemon import Daemon, error_of, running_daemon
from support.waiting import scaled, until

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def diagnose(daemon: Daemon, pid: int) -> pb.Diagnosis:
    found: pb.Diagnosis = daemon.stub().DiagnoseProcess(pb.DiagnoseProcessRequest(pid=pid), timeout=scaled(30))
    return found


def problems(found: pb.Diagnosis) -> list[str]:
    return [check.name for check in found.checks if check.status == pb.CHECK_STATUS_PROBLEM]


def test_a_python_process_can_be_traced(daemon: Daemon) -> None:
    with subjects.python() as pid:
        found = diagnose(daemon, pid)
        assert (found.process.pid, found.method, problems(found)) == (pid, "pending-call", [])
        result = run_process(["doctor", str(pid)], daemon.client_environ())
        assert result.code == 0
        assert result.stdout.endswith(f"process {pid} can be traced (pending-call)\n")


def test_a_process_with_an_agent_needs_no_attach(daemon: Daemon) -> None:
    environ = daemon.client_environ()
    prefix = ("env", f"KINETO_AGENT_SOCKET={daemon.agent_socket}", f"PYTHONPATH={environ['PYTHONPATH']}")
    with subjects.python("import kineto_agent; kineto_agent.start()", prefix=prefix) as pid:
        until(lambda: diagnose(daemon, pid).method == "agent", "the agent has connected")
        assert problems(diagnose(daemon, pid)) == []


STEPS = """
import time, kineto_agent
kineto_agent.start()
for _ in range(100):
    kineto_agent.step()
    time.sleep(0.001)
"""


def test_a_program_that_no_longer_steps_is_told_by_doctor_and_ps(daemon: Daemon) -> None:
    environ = daemon.client_environ()
    prefix = ("env", f"KINETO_AGENT_SOCKET={daemon.agent_socket}", f"PYTHONPATH={environ['PYTHONPATH']}")
    with subjects.python(STEPS, prefix=prefix) as pid:
        checks = until(
            lambda: [check for check in diagnose(daemon, pid).checks if check.name == "steps"], "it no longer steps"
        )
        assert checks[0].detail.startswith("no step for ")
        assert checks[0].advice == f"`kinetoctl stacks {pid}` shows where it is waiting"
        assert "none for " in run_process(["ps", "--pid", str(pid)], environ).stdout


def test_a_zombie_is_told_from_a_process_that_is_not_there(daemon: Daemon) -> None:
    with subjects.zombie() as pid:
        assert problems(diagnose(daemon, pid)) == ["process", "method"]
        assert run_process(["doctor", str(pid)], daemon.client_environ()).code == 5
    code, reason, message = error_of(lambda: diagnose(daemon, 2**22))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "NO_SUCH_PROCESS")
    assert message == "there is no process 4194304 on this host"


def test_the_daemon_itself_is_none_to_trace(daemon: Daemon) -> None:
    assert "process" in problems(diagnose(daemon, daemon.pid))


@pytest.mark.parametrize("pid", [0, -1])
def test_what_is_no_pid_is_refused(daemon: Daemon, pid: int) -> None:
    code, reason, _message = error_of(lambda: diagnose(daemon, pid))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


@pytest.mark.slow
def test_a_daemon_that_attaches_to_nobody_says_so() -> None:
    with running_daemon("--no-attach") as daemon, subjects.python() as pid:
        assert problems(diagnose(daemon, pid)) == ["agent", "method"]


@pytest.mark.slow
@root_only
def test_a_daemon_of_another_user_does_not_look() -> None:
    with running_daemon(uid=12345) as daemon, subjects.python() as pid:
        code, reason, message = error_of(lambda: diagnose(daemon, pid))
        assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_YOUR_PROCESS")
        assert "belongs to root" in message


def test_a_process_that_ends_while_it_is_looked_at_is_no_internal_error(daemon: Daemon) -> None:
    for _ in range(5):
        with subjects.python() as pid:
            call = daemon.stub().DiagnoseProcess.future(pb.DiagnoseProcessRequest(pid=pid), timeout=scaled(30))
            os.kill(pid, signal.SIGKILL)
            try:
                assert call.result().process.pid in (0, pid)
            except grpc.RpcError as exc:
                assert exc.code() is grpc.StatusCode.NOT_FOUND
    assert "INTERNAL" not in daemon.log()
