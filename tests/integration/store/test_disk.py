"""Full disks, stores that cannot be written, processes of somebody else."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent
from support.service.daemon import DaemonFailed, as_user, error_of, running_daemon, watch_to_end
from support.small_disk import fill, small_disk
from support.waiting import scaled

SECOND_NS = 10**9
NOBODY = 65534
OWN_PID = os.getpid()
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def _nobody_can_run_python() -> bool:
    if os.geteuid() != 0:
        return False
    command = [sys.executable, "-c", "import kinetod.app"]
    try:
        return subprocess.run([*as_user(NOBODY), *command], capture_output=True).returncode == 0
    except OSError:
        return False


needs_nobody = pytest.mark.skipif(not _nobody_can_run_python(), reason="needs root and a Python for everybody")


@pytest.fixture
def disk() -> Iterator[Path]:
    """A file system of its own with 24 MiB."""
    with small_disk("size=24m") as folder:
        yield folder


def create(stub: ProfilerStub, pid: int = OWN_PID) -> pb.Capture:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=60 * SECOND_NS)
    capture: pb.Capture = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
    return capture


@contextmanager
def collecting(*options: str, state_dir: Path | None = None) -> Iterator[tuple[ProfilerStub, ScriptedAgent, str]]:
    """A daemon, the agent of this process while its records are wanted, and the capture's id."""
    with (
        running_daemon(*options, state_dir=state_dir) as daemon,
        ScriptedAgent(daemon.agent_socket) as agent,
    ):
        agent.hello()
        stub = daemon.stub()
        capture_id = create(stub).id
        agent.collect()
        yield stub, agent, capture_id


@pytest.mark.slow
@needs_root
def test_a_capture_that_fills_the_disk_keeps_what_fitted(disk: Path) -> None:
    with collecting("--min-free-bytes", "12MiB", state_dir=disk / "state") as (stub, agent, capture_id):
        (disk / "somebody else's").write_bytes(bytes(10 << 20))
        agent.record(150_000)  # 3.6 MB: more than is left above the reserve
        agent.cancelled(capture_id)
        (target,) = watch_to_end(stub, capture_id).targets
        assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "DISK_FULL")
        assert len(target.files) == 1
        (disk / "somebody else's too").write_bytes(bytes(3 << 20))
        code, reason, message = error_of(lambda: create(stub))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LOW_DISK")
        assert "12 MiB must stay free" in message


@needs_root
def test_a_disk_that_is_full_to_the_last_byte_ends_in_a_verdict(disk: Path) -> None:
    with collecting("--min-free-bytes", "0", state_dir=disk / "state") as (stub, agent, capture_id):
        filler = fill(disk)
        agent.record(1000)
        agent.cancelled(capture_id)
        shutil.rmtree(filler)  # what is written next finds room again: the verdict
        (target,) = watch_to_end(stub, capture_id).targets
        assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "DISK_FULL")
        assert "the disk is full" in target.reason


@pytest.mark.slow
def test_a_capture_needs_room_before_the_disk_is_full() -> None:
    with (
        running_daemon(environ={"KINETOD_STORE_START_FREE_BYTES": "8000TiB"}) as daemon,
        ScriptedAgent(daemon.agent_socket) as agent,
    ):
        agent.hello()
        code, reason, message = error_of(lambda: create(daemon.stub()))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LOW_DISK")
        assert f"is free on the disk of {daemon.state_dir}, but a new capture needs 8000 TiB" in message


@pytest.mark.slow
def test_the_limit_per_target_ends_a_capture() -> None:
    with collecting("--max-trace-bytes", "64KiB") as (stub, agent, capture_id):
        agent.record(20_000)
        agent.cancelled(capture_id)
        (target,) = watch_to_end(stub, capture_id).targets
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "TRACE_LIMIT")
    assert "the limit of 64 KiB" in target.reason


@pytest.mark.slow
def test_too_many_captures_at_once_are_refused() -> None:
    with running_daemon("--max-captures", "1") as daemon, ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        with RemoteAgent(daemon.agent_socket) as other:
            other.do("hello")
            create(daemon.stub())
            code, reason, _ = error_of(lambda: create(daemon.stub(), other.pid))
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CAPTURES")


@needs_nobody
def test_a_process_of_another_user_is_refused() -> None:
    with running_daemon(uid=NOBODY) as daemon:
        code, reason, message = error_of(lambda: create(daemon.stub()))
        assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_YOUR_PROCESS")
        assert message.startswith(f"process {os.getpid()} (")
        assert daemon.rpc_socket.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@needs_nobody
def test_a_store_that_becomes_unwritable_refuses_captures() -> None:
    with running_daemon(uid=NOBODY) as daemon, RemoteAgent(daemon.agent_socket, prefix=as_user(NOBODY)) as agent:
        agent.do("hello")
        daemon.state_dir.chmod(0o500)
        code, reason, message = error_of(lambda: create(daemon.stub(), agent.pid))
        daemon.state_dir.chmod(0o700)
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STORE_NOT_WRITABLE")
    assert str(daemon.state_dir) in message


@needs_nobody
def test_a_daemon_does_not_start_on_a_store_that_it_cannot_write() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(DaemonFailed, match="cannot create the state folder"):
        Path(folder).chmod(0o755)
        with running_daemon(uid=NOBODY, state_dir=Path(folder) / "state"):
            pass


@pytest.mark.slow
def test_a_store_of_another_version_is_refused() -> None:
    with running_daemon() as daemon:
        daemon.stop()
        with sqlite3.connect(daemon.state_dir / "index.sqlite") as index:
            index.execute("PRAGMA user_version=99")
        index.close()
        with pytest.raises(DaemonFailed, match="another version of kinetod"):
            daemon.start()


@pytest.mark.slow
@needs_root
def test_agents_and_callers_of_every_user_may_connect_to_the_daemon_of_root() -> None:
    with running_daemon() as daemon:
        assert daemon.agent_socket.stat().st_mode & 0o777 == 0o666
        assert daemon.rpc_socket.stat().st_mode & 0o777 == 0o666
