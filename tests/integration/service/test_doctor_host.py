"""DiagnoseHost, `kinetoctl doctor` without a pid and `kinetoctl host` with a real daemon and real processes."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.calls_as import CallsAs
from support.service.cli import Result, run_process
from support.service.daemon import Daemon, running_daemon
from support.waiting import scaled, until

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
ADA, BOB = 61001, 61002
MODULES = "| 8         | Profiling          | Loaded                                           |"


@contextlib.contextmanager
def host_engine(folder: Path, uid: int | None = None) -> Iterator[int]:
    """A program of the name of DCGM's."""
    sleep = shutil.which("sleep")
    assert sleep
    (folder / "nv-hostengine").symlink_to(sleep)
    with subprocess.Popen([folder / "nv-hostengine", "60"], user=uid) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def with_dcgmi(folder: Path) -> dict[str, str]:
    """A `dcgmi` on PATH that says that the profiling module is loaded."""
    (folder / "dcgmi").write_text(f"#!/bin/sh\n[ \"$*\" = 'modules --list' ] && echo '{MODULES}'\n")
    (folder / "dcgmi").chmod(0o755)
    folder.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def checks(daemon: Daemon) -> dict[str, list[pb.Check]]:
    """By name, once the machine has let all of them be made in their time."""

    def made() -> list[pb.Check]:
        found = daemon.stub().DiagnoseHost(pb.DiagnoseHostRequest(), timeout=scaled(30)).checks
        late = "were not run: the check process did not finish within"
        return [] if any(late in check.detail for check in found) else list(found)

    by_name: dict[str, list[pb.Check]] = {}
    for check in until(made, "all checks are made", pause_s=2):
        by_name.setdefault(check.name, []).append(check)
    return by_name


def doctor_that_says(text: str, environ: dict[str, str]) -> Result | None:
    """None where that check was not made in its time."""
    result = run_process(["doctor"], environ)
    return result if text in result.stdout else None


def names(command: str, environ: dict[str, str]) -> set[str]:
    """Of the checks that a command shows."""
    return {each["name"] for each in run_process([command, "-o", "json"], environ).json()["checks"]}


@pytest.mark.slow
def test_a_host_is_looked_at_and_dcgm_is_found_and_asked(tmp_path: Path) -> None:
    with running_daemon(environ=with_dcgmi(tmp_path)) as daemon, host_engine(tmp_path) as pid:
        found = checks(daemon)
        assert {"permissions", "ptrace_scope", "clock", "gpu_counters", "cupti", "store", "gpus_nvml"} <= set(found)
        assert [check.status for check in found["store"]] == [pb.CHECK_STATUS_OK]
        (engine,) = (check for check in found["profilers"] if check.detail.startswith("DCGM ("))
        assert re.search(rf"\bpid {pid}\b.* has its profiling module loaded", engine.detail)
        assert "`dcgmi profile --pause`" in engine.advice
        environ = daemon.client_environ()
        result = until(lambda: doctor_that_says(f"pid {pid}", environ), "all checks are made", pause_s=2)
        assert result.stdout.splitlines()[1].split() == ["CHECK", "STATUS", "DETAIL"]
        for command in ("doctor", "host"):
            until(lambda command=command: names(command, environ) == set(found), "all checks are made", pause_s=2)  # type: ignore[misc]


@pytest.mark.slow
def test_a_store_that_takes_no_captures_is_a_problem_with_its_own_exit_code(tmp_path: Path) -> None:
    with running_daemon(environ={"KINETOD_STORE_START_FREE_BYTES": str(1 << 60)}) as daemon:
        result = run_process(["doctor"], daemon.client_environ())
    assert result.code == 5
    assert result.stdout.rstrip().rpartition("\n")[2].endswith("store")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are its user's alone."""
    with tempfile.TemporaryDirectory(prefix="kinetod-open-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def profilers(daemon: Daemon, who: CallsAs) -> str:
    """What is said to this user of other profilers; empty where that check was not made in its time."""
    found = who.call(daemon.address, "DiagnoseHost", pb.DiagnoseHostRequest()).only
    return " ".join(check.detail for check in found.checks if check.name == "profilers")


@pytest.mark.slow
@root_only
def test_pids_of_other_users_profilers_are_told_to_those_who_may_see_them(open_folder: Path) -> None:
    with running_daemon() as daemon, host_engine(open_folder, uid=ADA) as pid, CallsAs(ADA) as ada, CallsAs(BOB) as bob:
        seen = {}
        for name, who in (("ada", ada), ("bob", bob)):
            seen[name] = until(lambda who=who: profilers(daemon, who), "the processes are looked at", pause_s=2)  # type: ignore[misc]
        assert re.search(rf"DCGM \(.*\bpid {pid}\b", seen["ada"])
        assert f"pid {pid}" not in seen["bob"]
        assert re.search(r"DCGM \(.*of other users\)", seen["bob"])
