"""Captures by the libkineto of another user's process, of a kinetod without any right beside the attach helper."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.peers.on_demand_kineto import polls_in
from support.service import attach_service
from support.service.attach_service import CALLER_UID, OWNER_UID, POLICY, Service, own_folders, unprivileged
from support.service.daemon import Daemon, error_of, running_daemon, watch_to_end
from support.waiting import scaled, until

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
SECOND_NS = 10**9
SCRIPT = Path(__file__).parents[2] / "support/targets/polling_training.py"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with attach_service.running() as started:
        yield started


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dynolog-", dir="/run") as name:
        os.chown(name, CALLER_UID, CALLER_UID)
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.fixture(scope="module")
def front_end(service: Service, sockets: Path) -> Iterator[Daemon]:
    environ = {"KINETOD_ATTACH_HELPER_SOCKET": str(service.socket), **polls_in(str(sockets))}
    with running_daemon(uid=CALLER_UID, environ=environ) as daemon:
        yield daemon


@contextmanager
def training(front_end: Daemon, sockets: Path, *prefix: str) -> Iterator[int]:
    """An unmodified torch of another user, whose libkineto polls; its pid."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHONPATH"))}
    environ = {**own, "KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": str(sockets), "OMP_NUM_THREADS": "1"}
    command = [*prefix, *unprivileged(OWNER_UID, "dac_read_search"), sys.executable, "-P", str(SCRIPT), "steps"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == [b"importing\n", b"training\n"]
            until(lambda: _polls(front_end, process.pid), "its libkineto polls", 60, pause_s=0.2)
            yield process.pid
        finally:
            process.kill()


def _polls(front_end: Daemon, pid: int) -> bool:
    request = pb.ListProcessesRequest(selector=pb.Selector(pids=[pid]), include_without_agent=True)
    found = front_end.stub().ListProcesses(request, timeout=20).processes
    return any(process.HasField("kineto") for process in found)


def create(front_end: Daemon, pid: int, duration_ns: int = SECOND_NS) -> pb.Capture:
    spec = pb.CaptureSpec(
        selector=pb.Selector(pids=[pid]),
        recorder=pb.RECORDER_KINETO,
        formats=["chrome-json"],
        duration_ns=duration_ns,
    )
    capture: pb.Capture = front_end.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(30))
    return capture


def ended(front_end: Daemon, capture: pb.Capture) -> pb.Target:
    (target,) = watch_to_end(front_end.stub(), capture.id, 120).targets
    return target


@pytest.fixture(scope="module")
def target(front_end: Daemon, sockets: Path) -> Iterator[int]:
    with training(front_end, sockets) as pid:
        yield pid


def test_another_users_libkineto_records_and_nothing_is_left(front_end: Daemon, service: Service, target: int) -> None:
    capture = create(front_end, target)
    found = ended(front_end, capture)
    assert (found.verdict, found.reason) == (pb.VERDICT_DONE, "")
    request = pb.FetchTraceRequest(capture_id=capture.id, pid=target, format="chrome-json")
    trace = json.loads(b"".join(chunk.data for chunk in front_end.stub().FetchTrace(request, timeout=60)))
    assert sum(row.get("cat") == "cpu_op" for row in trace["traceEvents"]) == found.summary.activities["cpu_op"]
    assert not own_folders()
    for asked in ("makefolder", "opentracefile", "removefolder"):
        service.logged(f"{asked} by process {front_end.pid} of uid {CALLER_UID} to process {target} (uid {OWNER_UID}")


def test_a_user_whom_the_helpers_policy_leaves_alone_is_refused(
    front_end: Daemon, service: Service, target: int
) -> None:
    service.policy.write_text(f"{POLICY}denied_users = [{OWNER_UID}]\n")
    try:
        _, reason, text = error_of(lambda: create(front_end, target))
    finally:
        service.policy.write_text(POLICY)
    assert reason == "LIBKINETO_UNAVAILABLE"
    assert f"processes of uid {OWNER_UID} are left alone" in text
    assert not own_folders()


def test_a_capture_that_no_poll_has_fetched_leaves_nothing(front_end: Daemon, target: int) -> None:
    os.kill(target, signal.SIGSTOP)
    try:
        found = ended(front_end, create(front_end, target))
    finally:
        os.kill(target, signal.SIGCONT)
    assert (found.verdict, found.reason_code) == (pb.VERDICT_FAILED, "NOT_POLLED")
    assert not own_folders()


def test_the_next_front_end_and_the_next_helper_fetch_what_the_killed_ones_asked_for(
    front_end: Daemon, service: Service, target: int
) -> None:
    capture = create(front_end, target, 4 * SECOND_NS)
    notes = front_end.state_dir / "captures" / capture.id / "targets"
    until(lambda: any(_is_sent(path) for path in notes.glob("*/raw/kineto/request.json")), "it is sent", 60)
    front_end.kill()
    assert service.process is not None
    service.process.kill()
    service.process.wait()
    service.start()
    front_end.start()
    assert ended(front_end, capture).verdict == pb.VERDICT_DONE
    assert not own_folders()


def _is_sent(path: Path) -> bool:
    return bool(json.loads(path.read_bytes())["sent_ns"])


def test_a_process_that_is_killed_while_it_records_leaves_nothing(front_end: Daemon, sockets: Path) -> None:
    with training(front_end, sockets) as pid:
        capture = create(front_end, pid, 60 * SECOND_NS)
        states = front_end.stub().WatchCapture(pb.WatchCaptureRequest(id=capture.id), timeout=120)
        next(event for event in states if event.target.state == pb.TARGET_STATE_COLLECT)
        os.kill(pid, signal.SIGKILL)
        found = ended(front_end, capture)
    assert (found.verdict, found.reason_code) == (pb.VERDICT_FAILED, "TARGET_EXITED")
    until(lambda: not own_folders(), "what it left is removed")
