"""kinetod without any right over other users' processes, beside the attach helper service."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service import attach_service, subjects
from support.service.attach_service import CALLER_UID, OWNER_UID, POLICY, Service, unprivileged
from support.service.cli import Result, run_process
from support.service.daemon import Daemon, running_daemon
from support.targets.fake_program import FakeProgram
from support.waiting import scaled

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
LOOP = """
import threading, time
def train_step():
    return sum(range(2000))
threading.Thread(target=lambda: [(train_step(), time.sleep(0.0001)) for _ in iter(int, 1)], daemon=True).start()
"""

MAPS = """
import mmap
with open(%r, "rb") as file:
    kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with attach_service.running() as started:
        started.policy.write_text(POLICY.replace('"containers"', '"always"'))
        yield started


@pytest.fixture(scope="module")
def front_end(service: Service) -> Iterator[Daemon]:
    environ = {"KINETOD_ATTACH_HELPER_SOCKET": str(service.socket)}
    with running_daemon(uid=CALLER_UID, environ=environ) as daemon:
        yield daemon


@pytest.fixture
def target() -> Iterator[int]:
    prefix = ("env", "RANK=3", "SLURM_JOB_ID=7702", *unprivileged(OWNER_UID, "dac_read_search"))
    with subjects.python(LOOP, prefix=prefix) as pid:
        yield pid


def trace(daemon: Daemon, pid: int, folder: Path, duration: str = "100ms") -> Result:
    return run_process(
        ["trace", "--pid", str(pid), "--duration", duration, "-o", "json"], daemon.client_environ(), folder
    )


def listed(daemon: Daemon, pid: int) -> pb.Process:
    """As ListProcesses shows it."""
    request = pb.ListProcessesRequest(selector=pb.Selector(pids=[pid]), include_without_agent=True)
    (process,) = daemon.stub().ListProcesses(request, timeout=20).processes
    assert isinstance(process, pb.Process)
    return process


def test_another_users_process_is_traced(front_end: Daemon, target: int, tmp_path: Path) -> None:
    result = trace(front_end, target, tmp_path)
    assert result.code == 0, result.stderr
    (found,) = result.json()["targets"]
    assert found["verdict"] == "VERDICT_DONE"
    assert list(tmp_path.glob("*.json.gz"))
    agents = listed(front_end, target)
    assert agents.attached and agents.uid == OWNER_UID


def test_rank_and_job_of_another_users_process_are_listed(front_end: Daemon, target: int) -> None:
    process = listed(front_end, target)
    assert (process.rank, process.job_id, process.uid) == (3, "7702", OWNER_UID)


def test_a_program_without_python_is_traced_through_its_proxy(
    front_end: Daemon, service: Service, tmp_path: Path
) -> None:
    with FakeProgram(environ={"RANK": "5"}) as program:
        result = trace(front_end, program.pid, tmp_path, "2s")  # a starved program launches nothing in less
        assert result.code == 0, result.stderr
        (found,) = result.json()["targets"]
        assert found["verdict"] == "VERDICT_DONE"
        assert {kernel["name"] for kernel in found["summary"]["top_kernels"]} == {"void infer<float>(float const*)"}
        assert listed(front_end, program.pid).rank == 5
        service.logged("toolkit by process")


def test_the_helper_sees_that_a_program_launches_graphs_from_the_device(
    front_end: Daemon, service: Service, tmp_path: Path
) -> None:
    with FakeProgram(device_graphs=True) as program:
        result = trace(front_end, program.pid, tmp_path)
        (found,) = result.json()["targets"]
        assert found["reason_code"] == "CUDA_DEVICE_GRAPHS"
        service.logged("devicecode by process")


def test_what_the_policy_forbids_is_denied_with_the_reason(
    front_end: Daemon, service: Service, target: int, tmp_path: Path
) -> None:
    before = service.policy.read_text()
    service.policy.write_text(f"{before}denied_users = [{OWNER_UID}]\n")
    try:
        result = trace(front_end, target, tmp_path)
    finally:
        service.policy.write_text(before)
    assert result.code == 6
    assert f"processes of uid {OWNER_UID} are left alone" in result.stderr


def test_doctor_shows_what_the_helper_sees(front_end: Daemon, target: int, tmp_path: Path) -> None:
    result = run_process(["doctor", str(target), "-o", "json"], front_end.client_environ(), tmp_path)
    checks = {check["name"]: check for check in result.json()["checks"]}
    assert checks["permission"]["status"] == "CHECK_STATUS_OK"
    assert f"the daemon as uid {attach_service.SERVICE_UID}" in checks["owner"]["detail"]


def test_doctor_of_the_host_asks_the_helper(front_end: Daemon, tmp_path: Path) -> None:
    result = run_process(["doctor", "-o", "json"], front_end.client_environ(), tmp_path)
    checks = {check["name"]: check for check in result.json()["checks"]}
    assert (checks["attach_helper"]["status"], checks["attach_helper"]["detail"]) == ("CHECK_STATUS_OK", "answers")
    assert "the attach helper attaches to processes for it" in checks["permissions"]["detail"]


def test_profilers_in_other_users_processes_are_known_by_the_helper(service: Service, tmp_path: Path) -> None:
    library = tmp_path / "libToolsInjection64.so"
    library.write_bytes(b"x" * 4096)
    environ = {"KINETOD_ATTACH_HELPER_SOCKET": str(service.socket)}
    with (
        subjects.python(MAPS % str(library), prefix=tuple(unprivileged(OWNER_UID, "dac_read_search"))) as pid,
        running_daemon(uid=CALLER_UID, environ=environ) as daemon,  # one that has not looked before
    ):
        checks = daemon.stub().DiagnoseHost(pb.DiagnoseHostRequest(), timeout=scaled(30)).checks
        details = " ".join(check.detail for check in checks if check.name == "profilers")
        assert re.search(rf"Nsight Systems \(.*\bpid {pid}\b", details), details
        service.logged(f"search by process {daemon.pid} of uid {CALLER_UID}: ")


def test_without_the_helper_the_front_end_serves_and_says_what_is_missing(target: int, tmp_path: Path) -> None:
    environ = {"KINETOD_ATTACH_HELPER_SOCKET": str(tmp_path / "attach.sock")}  # there is none
    with running_daemon(uid=CALLER_UID, environ=environ) as daemon:
        result = trace(daemon, target, tmp_path)
        assert result.code == 5
        assert "the attach helper cannot be reached" in result.stderr and "kinetod-attach.socket" in result.stderr
        assert not listed(daemon, target).HasField("rank")
        doctor = run_process(["doctor", str(target)], daemon.client_environ(), tmp_path)
        assert "the attach helper cannot be reached" in doctor.stdout
        host = run_process(["doctor"], daemon.client_environ(), tmp_path)
        assert host.code == 5
        assert re.search(r"^attach_helper +PROBLEM +the attach helper cannot be reached", host.stdout, re.MULTILINE)


def test_a_helper_that_is_started_anew_serves_on(
    front_end: Daemon, service: Service, target: int, tmp_path: Path
) -> None:
    assert service.process is not None
    service.process.kill()
    service.process.wait()
    service.start()
    assert trace(front_end, target, tmp_path).code == 0


def test_the_front_end_had_no_capability_that_matters(front_end: Daemon) -> None:
    lines = Path(f"/proc/{front_end.pid}/status").read_text().splitlines()
    effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    assert int(effective, 16) == 1 << 2  # CAP_DAC_READ_SEARCH: Python may lie in /root
